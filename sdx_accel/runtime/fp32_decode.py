"""One decode in float32, on the card or on the CPU; the autoencoder's own weights are not touched.

Knows an autoencoder and torch: nothing of budgets or pipelines.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["decode_in_fp32"]


class _Decoder(torch.nn.Module):
    """A decode as the call of a module, which is what can be given other weights."""

    def __init__(self, vae: Any, decode: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.vae = vae
        self.decode = decode

    def forward(self, latents: torch.Tensor) -> Any:
        return self.decode(latents)


def decode_in_fp32(
    vae: Any,
    decode: Callable[[torch.Tensor], Any],
    latents: torch.Tensor,
    device: torch.device,
    home: torch.device,
) -> Any:
    """Decode with float32 weights.

    Args:
        vae: a diffusers autoencoder.
        decode: calls its `decode` with latents.
        latents: of any dtype, anywhere.
        device: where to compute.
        home: where the picture is wanted.

    Returns:
        What `decode` returns. Where the card has no room left for the picture it stays on the CPU,
        which is where it is saved from.
    """
    decoder = _Decoder(vae, decode)
    weights = {
        name: value.detach().to(device, torch.float32)
        for name, value in (*decoder.named_parameters(), *decoder.named_buffers())
        if value.is_floating_point()
    }
    given = latents.to(device, torch.float32)
    result = torch.func.functional_call(decoder, weights, (given,), strict=False)
    if isinstance(result, tuple):
        return (_brought(result[0], home), *result[1:])
    result.sample = _brought(result.sample, home)
    return result


def _brought(picture: torch.Tensor, home: torch.device) -> torch.Tensor:
    try:
        return picture.to(home)
    except torch.OutOfMemoryError:
        return picture
