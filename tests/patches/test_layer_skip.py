"""diffusers' layer skipping and its guiders: hooks that listen to torch's own attention call."""

import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry, LayerSkipConfig, apply_layer_skip
from diffusers.hooks._helpers import AttentionProcessorRegistry
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode
from torch.nn import functional
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

import sdx_accel  # noqa: F401  (attaches enable_xattn)
import sdx_patches
from sdx_patches import torch_call
from sdx_patches.attention import attend_heads

from .dispatcher_case import flux, out

BLOCKS = "mid_block.attentions.0.transformer_blocks"
SKIPPED = f"{BLOCKS}.0.attn1"
#: What a guider may skip in a layer; the feed-forward stays in all of them.
PARTS = ("skip_attention_scores", "skip_attention")


def skip(unet: Any, part: str) -> None:
    parts = dict.fromkeys(("skip_ff", *PARTS), False) | {part: True}
    apply_layer_skip(unet, LayerSkipConfig(indices=[0], fqn=BLOCKS, **parts))


def unskip(unet: Any) -> None:
    for module in unet.modules():
        if isinstance(hooks := getattr(module, "_diffusers_hook", None), HookRegistry):
            hooks.remove_hook("layer_skip_hook", recurse=False)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("order", ["skip first", "enable first"])
def test_skipping_equals_stock(tiny_unet: Any, unet_out: Any, part: str, order: str) -> None:
    twin, unet = tiny_unet(), tiny_unet()
    whole = unet_out(twin)
    skip(twin, part)
    assert not torch.allclose(unet_out(twin), whole, atol=1e-3)
    for step in (skip, enable) if order == "skip first" else (enable, skip):
        step(unet, part)
    assert torch.allclose(unet_out(unet), unet_out(twin), atol=1e-4)
    unskip(unet)
    assert torch.allclose(unet_out(unet), whole, atol=1e-4)
    unet.disable_xattn()
    unskip(twin)
    assert [type(p) for p in unet.attn_processors.values()] == [
        type(p) for p in twin.attn_processors.values()
    ]


def enable(unet: Any, part: str = "") -> None:
    unet.enable_xattn(attention_op="reference")


@pytest.mark.parametrize("part", PARTS)
def test_a_guider_that_skips_at_each_step_anew(tiny_unet: Any, unet_out: Any, part: str) -> None:
    twin, unet = tiny_unet(), tiny_unet()
    enable(unet)
    for _ in range(3):
        for change in (skip, lambda model, _: unskip(model)):
            for model in (twin, unet):
                change(model, part)
            assert torch.allclose(unet_out(unet), unet_out(twin), atol=1e-4)


def test_the_report_says_who_listens(tiny_unet: Any, unet_out: Any) -> None:
    unet = tiny_unet()
    enable(unet)
    skip(unet, "skip_attention_scores")
    unet_out(unet)
    layers = {layer.path: layer for layer in sdx_patches.layers(unet)}
    assert layers[SKIPPED].running == torch_call.NAME
    assert "AttentionScoreSkipFunctionMode" in layers[SKIPPED].reason
    assert {x.running for path, x in layers.items() if path != SKIPPED} == {"reference"}


def test_skipping_compiles_in_one_graph(tiny_unet: Any, unet_out: Any) -> None:
    torch._dynamo.reset()
    unet = tiny_unet(
        block_out_channels=(32,), down_block_types=("CrossAttnDownBlock2D",),
        mid_block_type=None, up_block_types=("UpBlock2D",),
    )  # fmt: skip
    enable(unet)
    block = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1

    def listened(hidden: torch.Tensor) -> torch.Tensor:
        with AttentionScoreSkipFunctionMode():
            return block(hidden)

    hidden = torch.randn(2, 6, 32)
    with torch.no_grad():
        whole = block(hidden)
        expected = listened(hidden)
        assert not torch.allclose(expected, whole, atol=1e-3)
        compiled = torch.compile(listened, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(hidden), expected, atol=1e-6)
        plain = torch.compile(block, backend="eager", fullgraph=True)
        assert torch.allclose(plain(hidden), whole, atol=1e-6)
        with AttentionScoreSkipFunctionMode():
            assert torch.allclose(plain(hidden), expected, atol=1e-6)
        assert torch.allclose(plain(hidden), whole, atol=1e-6)


class Listening(TorchFunctionMode):
    """Counts the calls of torch's attention and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[dict[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.heard.append(kwargs)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


def test_whoever_listens_hears_the_masks_and_the_encoders(tiny_sd: Any, latents: Any) -> None:
    pipe = tiny_sd()
    with Listening() as stock:
        expected = latents(pipe)
    pipe.enable_xattn(attention_op="reference")
    with Listening() as ours:
        assert torch.allclose(latents(pipe), expected, atol=1e-4)
    assert len(ours.heard) == len(stock.heard) > 6
    masks = [[kwargs.get("attn_mask") is None for kwargs in mode.heard] for mode in (ours, stock)]
    assert masks[0] == masks[1]


@pytest.mark.parametrize("mode", [None, BaseTorchFunctionMode])
def test_modes_of_torchs_own_do_not_listen(
    tiny_unet: Any, unet_out: Any, default_device: None, mode: Callable[[], Any] | None
) -> None:
    unet = tiny_unet()
    enable(unet)
    if mode is None:
        unet_out(unet)
    else:
        with mode():
            unet_out(unet)
    assert {layer.running for layer in sdx_patches.layers(unet)} == {"reference"}


@pytest.mark.parametrize("how", ["unpickled", "enabled again"])
def test_a_process_that_never_patched_anything(
    tiny_unet: Any, unet_out: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    unet = tiny_unet()
    enable(unet)
    pickled = pickle.dumps(unet)
    known = {k: v for k, v in AttentionProcessorRegistry._registry.items() if "sdx" not in str(k)}
    monkeypatch.setattr(AttentionProcessorRegistry, "_registry", known)
    if how == "unpickled":
        unet = pickle.loads(pickled)
    else:
        enable(unet)
    skip(unet, "skip_attention")
    unet_out(unet)


def test_a_diffusers_without_such_hooks(
    tiny_unet: Any, unet_out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers.hooks._helpers", None)
    unet = tiny_unet()
    expected = unet_out(unet)
    enable(unet)
    assert torch.allclose(unet_out(unet), expected, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_call_that_is_listened_to_is_the_same_attention(
    kind: torch.dtype, dtype: torch.dtype
) -> None:
    class Module(torch.nn.Module):
        upcast_attention = False

    query, key, value = (torch.randn(2, n, 4, 8, dtype=dtype) for n in (5, 9, 9))
    mask = torch.rand(2, 1, 1, 9) > 0.3
    bias = mask if kind == torch.bool else torch.where(mask, 0.0, -1e4)
    expected, _ = attend_heads(Module(), query, key, value, bias, 0.3)
    with Listening() as mode:
        heard, choice = attend_heads(Module(), query, key, value, bias, 0.3)
    assert len(mode.heard) == 1
    assert choice.name == torch_call.NAME
    assert heard.dtype == expected.dtype
    assert torch.allclose(heard, expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_listener_hears_a_transformer_too() -> None:
    stock, model = flux(), flux()
    model.enable_xattn(attention_op="reference")
    assert torch.allclose(out(model), out(stock), atol=1e-5)
    with AttentionScoreSkipFunctionMode():
        expected, skipped = out(stock), out(model)
    assert not torch.allclose(expected, out(stock), atol=1e-3)
    assert torch.allclose(skipped, expected, atol=1e-5)
    model.disable_xattn()
