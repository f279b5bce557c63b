"""Ours computes what the class computes that stood there: what that leaves out, ours leaves out."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import Attention
from diffusers.pipelines.animatediff.pipeline_animatediff_sdxl import AnimateDiffSDXLPipeline
from torch import Tensor, nn

import sdx_patches
from sdx_patches import attention
from sdx_patches.families.tables import REPLACED

PLAIN = ("AttnProcessor", "AttnProcessor2_0", "SlicedAttnProcessor", "XFormersAttnProcessor")
ADDED = (
    "AttnAddedKVProcessor", "AttnAddedKVProcessor2_0", "SlicedAttnAddedKVProcessor",
    "XFormersAttnAddedKVProcessor",
)  # fmt: skip
CUSTOM = (
    "CustomDiffusionAttnProcessor", "CustomDiffusionAttnProcessor2_0",
    "CustomDiffusionXFormersAttnProcessor",
)  # fmt: skip
IMAGE = ("IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0", "IPAdapterXFormersAttnProcessor")
JOINT = ("JointAttnProcessor2_0", "XFormersJointAttnProcessor")


@pytest.fixture(autouse=True)
def _xformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that diffusers' classes make of xFormers, in (batch, length, …, dim)."""

    class Ops:
        @staticmethod
        def memory_efficient_attention(
            q: Tensor, k: Tensor, v: Tensor, attn_bias: Any = None, op: Any = None,
            scale: float | None = None,
        ) -> Tensor:  # fmt: skip
            heads = [t.transpose(1, 2) if t.dim() == 4 else t for t in (q, k, v)]
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=attn_bias, scale=scale
            )
            return out.transpose(1, 2) if q.dim() == 4 else out

    monkeypatch.setattr(host, "xformers", type("xformers", (), {"ops": Ops}), raising=False)


def layer(name: str) -> Attention:
    """An attention layer with every part that a class may leave out, far from its default."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"query_dim": 32, "heads": 4, "dim_head": 8}
    if name in ADDED or name in JOINT:
        settings["added_kv_proj_dim"] = 32
    if name in ADDED:
        settings["norm_num_groups"] = 4
    if name in JOINT:
        settings |= {"context_pre_only": False, "qk_norm": "rms_norm"}
    attn = Attention(**settings).eval()
    if name in IMAGE:
        made = getattr(host, name)(32, 32, num_tokens=(4,), scale=0.7)
    elif name in CUSTOM:
        made = getattr(host, name)(True, False, hidden_size=32, cross_attention_dim=32)
    else:
        made = getattr(host, name)(*([2] if "Sliced" in name else []))
    attn.set_processor(made)
    return attn


def change(attn: Attention, what: str) -> None:
    if what == "scale":
        attn.scale = 1.0
    elif what == "norms":
        attn.norm_q, attn.norm_k = (nn.RMSNorm(attn.inner_dim // attn.heads) for _ in range(2))
        for norm in (attn.norm_q, attn.norm_k):
            nn.init.uniform_(norm.weight, 2.0, 4.0)
    elif what == "spatial norm":
        attn.spatial_norm = Shift()


class Shift(nn.Module):
    """Where a spatial norm stands; no norm after it takes back what it does."""

    def forward(self, hidden: Tensor, temb: Tensor) -> Tensor:
        return hidden.cumsum(1)


def run(attn: Attention, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    hidden = 4 * torch.randn(2, 6, 32, generator=generator)
    context = 4 * torch.randn(2, 5, 32, generator=generator)
    call: dict[str, Any] = {"temb": 3.0}
    if name in ADDED:
        hidden = hidden.transpose(1, 2).unflatten(2, (2, 3))
    if name in IMAGE:
        call["encoder_hidden_states"] = (
            context, [4 * torch.randn(2, 1, 4, 32, generator=generator)],
        )  # fmt: skip
    elif name not in PLAIN:
        call["encoder_hidden_states"] = context
    if "temb" in call and name in (*CUSTOM, *JOINT):
        del call["temb"]
    with torch.no_grad():
        out = attn(hidden, **call)
    return torch.cat([part.flatten() for part in out]) if isinstance(out, tuple) else out


@pytest.mark.filterwarnings("ignore:cross_attention_kwargs")
@pytest.mark.parametrize("what", ["nothing", "scale", "norms", "spatial norm"])
@pytest.mark.parametrize("name", [*PLAIN, *ADDED, *CUSTOM, *IMAGE, *JOINT])
def test_equals_the_class_that_stood_there(name: str, what: str) -> None:
    attn = layer(name)
    change(attn, what)
    expected = run(attn, name)
    sdx_patches.patch(attn, owner="test")
    assert type(attn.processor).__module__.startswith("sdx_patches")
    assert torch.allclose(run(attn, name), expected, atol=1e-4)
    # and when the host has made it anew from its class, where it could do so with its own
    if name not in (*CUSTOM, *IMAGE):
        attn.set_processor(type(attn.processor)())
        assert torch.allclose(run(attn, name), expected, atol=1e-4)
    sdx_patches.restore(attn, owner="test")
    assert type(attn.processor).__name__ == name


@pytest.mark.parametrize("what", ["scale", "norms", "spatial norm"])
def test_each_change_is_seen_by_some_class_and_not_by_another(what: str) -> None:
    seen = set()
    for name in PLAIN:
        attn = layer(name)
        before = run(attn, name)
        change(attn, what)
        seen.add(torch.allclose(run(attn, name), before, atol=1e-2))
    assert seen == {True, False}


def test_a_scale_of_one_by_configuration(tiny_unet: Any) -> None:
    attn = Attention(query_dim=32, heads=4, dim_head=8, scale_qk=False).eval()
    assert type(attn.processor) is host.AttnProcessor
    hidden = 3 * torch.randn(2, 6, 32)
    with torch.no_grad():
        expected = attn(hidden)
        sdx_patches.patch(attn, owner="test")
        assert torch.allclose(attn(hidden), expected, atol=1e-5)
        attn.scale = 0.1
        assert not torch.allclose(attn(hidden), expected, atol=1e-3)


def test_each_class_of_ours_knows_its_own() -> None:
    found = {name.rpartition(".")[2]: entry.processor for name, entry in REPLACED.items()}
    assert {name: ours.host for name, ours in found.items()} == {name: name for name in found}
    assert len(set(found.values())) == len(found)


def test_animatediff_upcasts_what_it_upcasts_without_ours() -> None:
    def dtypes(ours: bool) -> dict[str, torch.dtype]:
        vae = AutoencoderKL(
            block_out_channels=(32,), norm_num_groups=8, layers_per_block=1,
            down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        ).half()  # fmt: skip
        if ours:
            sdx_patches.patch(vae, owner="test")
        AnimateDiffSDXLPipeline.upcast_vae(type("Pipe", (), {"vae": vae})())  # type: ignore[arg-type]
        return {name: weight.dtype for name, weight in vae.named_parameters()}

    assert dtypes(True) == dtypes(False)
    assert set(dtypes(True).values()) == {torch.float16, torch.float32}
    assert attention.SdxAttnProcessor not in {entry.processor for entry in REPLACED.values()}
