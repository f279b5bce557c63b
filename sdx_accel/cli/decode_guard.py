"""Never a black picture silently: a decode that is not finite is done again in float32.

Knows a pipeline's VAE and torch; a decode that is finite passes through untouched.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sdx_accel.errors import BudgetExceeded, WorkError

__all__ = ["finite_decode"]


@contextmanager
def finite_decode(pipe: Any, tell: Callable[[str], None]) -> Iterator[None]:
    """Watch `pipe.vae.decode` while the context is open.

    Args:
        pipe: a pipeline with a `vae`.
        tell: receives one sentence when a decode had to be repeated.

    Raises:
        WorkError: from within the decode, when the latents themselves are not finite or float32
            does not help.
    """
    vae = pipe.vae
    original = vae.decode
    was_own = "decode" in vars(vae)

    def decode(latents: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        result = original(latents, *args, **kwargs)
        if bool(torch.isfinite(result[0]).all()):
            return result
        dtype = str(vae.dtype).removeprefix("torch.")
        if not bool(torch.isfinite(latents).all()):
            what = "overflow" if dtype == "float16" else "computed"
            cause = (
                "Use --dtype bf16 or --dtype fp32"
                if dtype == "float16"
                else "The weights of the model or of a LoRA are probably damaged, or --guidance or "
                "a LoRA's scale is far too large"
            )
            raise WorkError(
                f"the denoised latents are not finite ({what} in {dtype}); nothing was saved. "
                f"{cause}"
            )
        result = _decode_in_fp32(vae, original, latents, args, kwargs)
        if not bool(torch.isfinite(result[0]).all()):
            raise WorkError(
                "the decoded picture is not finite even in float32; nothing was saved. The "
                "weights of the VAE or a LoRA are probably damaged, or --guidance is far too large"
            )
        tell(f"the decode overflowed in {dtype} and was done again in float32")
        return result

    vae.decode = decode
    try:
        yield
    finally:
        if was_own:
            vae.decode = original
        else:
            del vae.decode


def _decode_in_fp32(
    vae: Any, original: Callable[..., Any], latents: Any, args: Any, kwargs: Any
) -> Any:
    """One decode with float32 weights; the module's own tensors are not touched."""
    import torch

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vae = vae

        def forward(self, latents: Any) -> Any:
            return original(latents, *args, **kwargs)

    decoder = Decoder()
    home = latents.device

    def on(device: Any) -> Any:
        weights = {
            name: value.detach().to(device, torch.float32)
            for name, value in (*decoder.named_parameters(), *decoder.named_buffers())
            if value.is_floating_point()
        }
        return torch.func.functional_call(
            decoder, weights, (latents.to(device, torch.float32),), strict=False
        )

    try:
        return on(home)
    except (torch.OutOfMemoryError, BudgetExceeded):
        result = on(torch.device("cpu"))
    if isinstance(result, tuple):
        return (result[0].to(home), *result[1:])
    result.sample = result.sample.to(home)
    return result
