"""A diffusers or transformers that lacks what the patches use: one line, and no crash."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import sdx_accel  # noqa: F401  (attaches enable_xattn)
from sdx_patches import compat

#: Names that a later version may well drop, and the host's classes that go with them.
LOST = (
    "AttnAddedKVProcessor2_0", "AttnProcessor2_0", "CustomDiffusionAttnProcessor2_0",
    "FusedAttnProcessor2_0", "IPAdapterAttnProcessor2_0", "JointAttnProcessor2_0",
    "SlicedAttnProcessor", "XFormersAttnProcessor",
)  # fmt: skip


@pytest.fixture(autouse=True)
def silent_so_far() -> Iterator[None]:
    """Each test begins and leaves as a process that has said nothing."""
    compat.warn_once.cache_clear()
    yield
    compat.warn_once.cache_clear()


@pytest.mark.parametrize("model", ["sd", "unet"])
def test_enabling_says_once_what_is_missing(
    tiny_sd: Any, tiny_unet: Any, monkeypatch: Any, caplog: Any, model: str
) -> None:
    lost = ("diffusers.models.attention:Gone", "transformers:Lost.register")
    monkeypatch.setattr(compat, "_HOST_NAMES", (*compat._HOST_NAMES, *lost))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            root = tiny_sd() if model == "sd" else tiny_unet()
            root.enable_xattn()
            root.disable_xattn()
    (record,) = [r for r in caplog.records if r.name == "sdx_patches"]
    assert record.levelno == logging.WARNING
    said = record.getMessage()
    assert "\n" not in said
    for library, what in (("diffusers", "Gone"), ("transformers", "Lost.register")):
        first, last = compat.CHECKED[library]
        version = sys.modules[library].__version__
        assert f"{library} {version} (checked with {first} to {last}) lacks {what}" in said


def test_many_lost_names_are_counted(monkeypatch: Any, caplog: Any) -> None:
    lost = tuple(f"diffusers.models.attention:Gone{number}" for number in range(9))
    monkeypatch.setattr(compat, "_HOST_NAMES", lost)
    compat.warn_once()
    assert "lacks Gone0, Gone1, Gone2 and 6 more" in caplog.text


def test_nothing_is_said_where_nothing_is_missing(tiny_unet: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        tiny_unet().enable_xattn()
    assert [r for r in caplog.records if r.name == "sdx_patches"] == []


def test_a_host_that_cannot_be_asked_is_no_crash(monkeypatch: Any, tmp_path: Any) -> None:
    (tmp_path / "broken_host.py").write_text("raise RuntimeError('no such operator')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compat, "_HOST_NAMES", ("broken_host:x",))
    assert compat.missing() == ["broken_host:x"]
    compat.warn_once()


SCRIPT = """
import sys
import torch
from diffusers import UNet2DConditionModel
from diffusers.models import attention_processor as host

sdxl = dict(
    block_out_channels=(32, 64), layers_per_block=1, sample_size=8, norm_num_groups=8,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=32,
)
torch.manual_seed(0)
added = host.Attention(query_dim=32, added_kv_proj_dim=16, heads=2, dim_head=16,
                       norm_num_groups=8, bias=True)
added.set_processor(host.AttnAddedKVProcessor())
model = UNet2DConditionModel(**sdxl).eval()
for layer in model.modules():
    if isinstance(layer, host.Attention):
        layer.set_processor(host.AttnProcessor())
for name in sys.argv[1:]:
    delattr(host, name)

import sdx_accel, sdx_patches
sample, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 32)
tokens, words = torch.randn(1, 32, 4, 4), torch.randn(1, 5, 16)
roots = torch.nn.ModuleList([added])
with torch.no_grad():
    stock = model(sample, 1, text).sample, added(tokens, encoder_hidden_states=words)
    model.enable_xattn()
    sdx_patches.patch(roots, owner="me")
    ours = model(sample, 1, text).sample, added(tokens, encoder_hidden_states=words)
print(max((one - other).abs().max().item() for one, other in zip(stock, ours)) < 1e-5)
layers = sdx_patches.layers(model)
print(len(layers), sum(layer.patched and layer.running != "not run yet" for layer in layers))
print(*[(layer.requested, layer.reason) for layer in sdx_patches.layers(roots)])
model.disable_xattn()
sdx_patches.restore(roots, owner="me")
print(*sorted({type(layer.processor).__name__ for layer in (*model.modules(), added)
               if isinstance(layer, host.Attention)}))
"""


def test_lost_classes_leave_their_layers_alone_and_no_others() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *LOST],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    equal, counts, added, after = done.stdout.splitlines()
    assert equal == "True"
    layers, ours = map(int, counts.split())
    assert layers == ours > 0
    assert added.startswith("('unchanged', ")
    assert "lacks AttnAddedKVProcessor2_0" in added
    assert after == "AttnAddedKVProcessor AttnProcessor"
    said = [line for line in done.stderr.splitlines() if "torchvision" not in line]
    assert len(said) == 1, done.stderr
    assert "lacks AttnAddedKVProcessor2_0, AttnProcessor2_0" in said[0]
    assert said[0].endswith("keeps the host's own attention; xattn_report() says which layers")
