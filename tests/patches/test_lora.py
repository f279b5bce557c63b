"""LoRA weights and our attention: in any order the result is stock's, and it can be taken back."""

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor

import sdx_patches
from sdx_patches.plain import SdxPlainAttnProcessor


def patched(root: Any, **settings: Any) -> Any:
    sdx_patches.patch(root, owner="test", **settings)
    return root


def lora(pipe: Any, rank: int = 4) -> dict[str, Tensor]:
    """Rank-4 changes of every query, key, value and output projection of the UNet."""
    generator = torch.Generator().manual_seed(11)
    weights = {}
    for name, module in pipe.unet.named_modules():
        if not isinstance(module, Attention):
            continue
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            rows, columns = module.get_submodule(part).weight.shape
            for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                weights[f"unet.{name}.{part}.lora_{side}.weight"] = 0.2 * torch.randn(
                    shape, generator=generator
                )
    return weights


@pytest.mark.parametrize("order", ["load first", "enable first"])
def test_case_072_loading_leaves_the_fast_attention_on(
    tiny_sd: Any, latents: Any, order: str
) -> None:
    stock = tiny_sd()
    without = latents(stock)
    stock.load_lora_weights(lora(stock))
    expected = latents(stock)
    assert not torch.allclose(expected, without, atol=1e-2)
    pipe = tiny_sd()
    if order == "enable first":
        patched(pipe)
    pipe.load_lora_weights(lora(pipe))
    if order == "load first":
        patched(pipe)
    assert torch.allclose(latents(pipe), expected, atol=1e-4)
    unet = [layer for layer in sdx_patches.layers(pipe) if layer.path.startswith("unet.")]
    assert len(unet) == 8
    assert all(layer.patched and layer.running != "not run yet" for layer in unet)


@pytest.mark.parametrize("enabled", ["before", "between", "after"])
def test_case_074_unloading_takes_it_back_exactly(tiny_sd: Any, latents: Any, enabled: str) -> None:
    pipe = tiny_sd()
    stock = latents(pipe)
    if enabled == "before":
        patched(pipe)
    before = latents(pipe)
    pipe.load_lora_weights(lora(pipe))
    if enabled == "between":
        patched(pipe)
    assert not torch.allclose(latents(pipe), before, atol=1e-2)
    pipe.unload_lora_weights()
    if enabled == "after":
        patched(pipe)
    after = latents(pipe)
    attentions = [m for m in pipe.unet.modules() if isinstance(m, Attention)]
    assert {type(m.processor) for m in attentions} == {SdxPlainAttnProcessor}
    if enabled == "before":
        assert torch.equal(after, before)
    assert torch.allclose(after, stock, atol=1e-4)
    sdx_patches.restore(pipe, owner="test")
    assert torch.equal(latents(pipe), stock)
