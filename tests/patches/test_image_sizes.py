"""Pictures of any size that a model can do: token counts from 1 on, equal to stock."""

from typing import Any

import pytest
import torch

import sdx_patches

SIZES = [(72, 64), (64, 72), (8, 8), (16, 8), (520, 64)]


@pytest.mark.parametrize(("height", "width"), SIZES, ids=str)
@pytest.mark.parametrize("model", ["tiny_sd", "tiny_sdxl"])
def test_case_121_sizes_divisible_by_8_and_not_by_64_equal_stock(
    request: Any, latents: Any, model: str, height: int, width: int
) -> None:
    pipe = request.getfixturevalue(model)()
    size = {"height": height, "width": width}
    stock, again = latents(pipe, **size), latents(pipe, **size)
    assert torch.equal(stock, again)
    assert stock.shape == (1, 4, height // 8, width // 8)
    sdx_patches.patch(pipe, owner="test")
    ours = latents(pipe, **size)
    assert (ours - stock).abs().max() <= 1e-4
    layers = [layer for layer in sdx_patches.layers(pipe) if layer.path.startswith("unet.")]
    assert all(layer.patched and layer.running != "not run yet" for layer in layers)
    # the decoder's attention is of as many tokens; both sides have the same latents
    with torch.no_grad():
        decoded = pipe.vae.decode(stock).sample
        sdx_patches.restore(pipe, owner="test")
        assert (decoded - pipe.vae.decode(stock).sample).abs().max() <= 1e-4
    assert torch.equal(latents(pipe, **size), stock)


@pytest.mark.parametrize("model", ["tiny_sd", "tiny_sdxl"])
def test_case_121_attention_is_what_makes_those_latents(
    request: Any, latents: Any, monkeypatch: Any, model: str
) -> None:
    """A difference of ours would show at the smallest size too."""
    from sdx_patches import attention

    pipe = request.getfixturevalue(model)()
    stock = latents(pipe, height=8, width=8)
    sdx_patches.patch(pipe, owner="test")
    real = attention.attend_heads

    def shifted(*args: Any, **kwargs: Any) -> Any:
        out, choice = real(*args, **kwargs)
        return out + 1e-2, choice

    monkeypatch.setattr(attention, "attend_heads", shifted)
    assert (latents(pipe, height=8, width=8) - stock).abs().max() > 1e-4
