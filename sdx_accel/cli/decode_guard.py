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
    """On the latents' own device, or on the CPU where that has no room."""
    import torch

    from sdx_accel.runtime.fp32_decode import decode_in_fp32

    def decode(given: Any) -> Any:
        return original(given, *args, **kwargs)

    home = latents.device
    try:
        return decode_in_fp32(vae, decode, latents, home, home)
    except (torch.OutOfMemoryError, BudgetExceeded):
        return decode_in_fp32(vae, decode, latents, torch.device("cpu"), home)
