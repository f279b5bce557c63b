"""Case 041: a decode that overflows is done again in float32; a black picture is never silent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdx_accel.cli.decode_guard import finite_decode
from sdx_accel.errors import WorkError
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.random_models import build_random


@pytest.fixture
def pipe() -> Any:
    """In float16 with a VAE whose first decoder activations pass 65504."""
    # not through `load`, which makes it float32 on a machine without a GPU
    pipe = build_random("random:sdxl-tiny", torch.float16)
    with torch.no_grad():
        weight = pipe.vae.decoder.conv_in.weight
        weight.mul_(60000 / weight.abs().max().item())
    return pipe


@torch.no_grad()
def test_overflow_is_decoded_again_in_float32(pipe: Any) -> None:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).half() * 4
    assert not torch.isfinite(pipe.vae.decode(latents).sample).all()
    before = {name: value.clone() for name, value in pipe.vae.state_dict().items()}
    told: list[str] = []
    with finite_decode(pipe, told.append):
        tuple_result = pipe.vae.decode(latents, return_dict=False)[0]
        result = pipe.vae.decode(latents).sample
    assert told == ["the decode overflowed in float16 and was done again in float32"] * 2
    after = pipe.vae.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    expected = pipe.vae.float().decode(latents.float()).sample
    assert torch.equal(result, expected)
    assert torch.equal(tuple_result, expected)


@torch.no_grad()
def test_finite_decode_passes_through_untouched() -> None:
    pipe = load("random:sdxl-tiny")
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = pipe.vae.decode(latents).sample
    told: list[str] = []
    with finite_decode(pipe, told.append):
        assert torch.equal(pipe.vae.decode(latents).sample, expected)
    assert told == []
    assert "decode" not in vars(pipe.vae)


@torch.no_grad()
def test_latents_that_are_not_finite_are_an_error(pipe: Any) -> None:
    latents = torch.full((1, 4, 8, 8), float("nan"), dtype=torch.float16)
    with finite_decode(pipe, print), pytest.raises(WorkError, match=r"overflow in float16.*fp32"):
        pipe.vae.decode(latents)
    assert "decode" not in vars(pipe.vae)


@torch.no_grad()
def test_weights_that_are_not_finite_are_an_error(pipe: Any) -> None:
    pipe.vae.decoder.conv_out.bias.fill_(float("nan"))
    latents = torch.zeros(1, 4, 8, 8, dtype=torch.float16)
    with finite_decode(pipe, print), pytest.raises(WorkError, match="even in float32"):
        pipe.vae.decode(latents)


@torch.no_grad()
def test_out_of_memory_in_the_repeat_goes_to_the_cpu(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    latents = torch.ones(1, 4, 8, 8, dtype=torch.float16) * 4
    calls: list[torch.dtype] = []
    original = pipe.vae.decode

    def decode(latents: torch.Tensor, **kwargs: Any) -> Any:
        calls.append(latents.dtype)
        if calls == [torch.float16, torch.float32]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(latents, **kwargs)

    monkeypatch.setattr(pipe.vae, "decode", decode)
    with finite_decode(pipe, print):
        assert torch.isfinite(pipe.vae.decode(latents).sample).all()
    assert calls == [torch.float16, torch.float32, torch.float32]
    assert pipe.vae.decode is decode


@pytest.mark.parametrize("force_upcast", [True, False])
def test_command_line_says_so_and_saves_a_picture(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, pipe: Any, force_upcast: bool
) -> None:
    from PIL import Image

    pipe.vae.register_to_config(force_upcast=force_upcast)
    monkeypatch.setattr("sdx_accel.runtime.checkpoints.load", lambda *_, **__: pipe)
    line = ("generate", "x", "--model", "random:sdxl-tiny", "--seed", 1)
    result = cli(*line, "--width", 64, "--height", 64, "--vram", 8)
    assert result.code == 0, result.err
    assert ("done again in float32" in result.err) is not force_upcast
    with Image.open(result.paths[0]) as picture:
        assert max(high - low for low, high in picture.getextrema()) > 0
