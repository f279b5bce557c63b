"""Which dtype a model runs in on a device, and what to say when it is not the one asked for."""

from __future__ import annotations

from typing import Any

from sdx_accel.errors import RefusedError

__all__ = ["DTYPES", "dtype_for"]

DTYPES = {
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
}
# fp16 arithmetic is fast from Volta on; bf16 exists from Ampere on
_FAST_HALF = (7, 0)
_HAS_BFLOAT = (8, 0)


def dtype_for(device: Any = None, requested: Any = "auto") -> tuple[Any, str | None]:
    """The dtype to run in, and one line for the user when it is not what was asked for.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, a `torch.device`, or None/``"auto"``: CUDA
            where there is one.
        requested: ``"auto"``, a name of `DTYPES` or a `torch.dtype`. ``"auto"`` is fp16 on an
            NVIDIA GPU from Volta on and fp32 elsewhere.

    Returns:
        (`torch.dtype`, note or None).

    Raises:
        RefusedError: unknown dtype, or a CUDA device that is not there.
    """
    import torch

    name = str(requested).removeprefix("torch.").lower()
    if name != "auto" and name not in DTYPES:
        raise RefusedError(f"unknown dtype {requested!r}; known: auto, fp16, bf16, fp32")
    if device is None or device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise RefusedError(f"unknown device {device!r}; known: auto, cpu, cuda, cuda:N") from None
    wanted = None if name == "auto" else getattr(torch, DTYPES[name])
    if place.type == "cpu":
        if wanted is torch.float16:
            return torch.float32, "no GPU for fp16: running in fp32 on the CPU"
        return wanted or torch.float32, None
    if place.type != "cuda":
        return wanted or torch.float32, None
    if not torch.cuda.is_available():
        raise RefusedError(
            f"there is no CUDA device for {str(device)!r}; use --device cpu, or see "
            "`sdx-accel doctor` for why none is found"
        )
    count = torch.cuda.device_count()
    if place.index is not None and place.index >= count:
        raise RefusedError(f"there is no {place}; this machine has {count} CUDA device(s)")
    capability = torch.cuda.get_device_capability(place)
    if wanted is torch.bfloat16 and capability < _HAS_BFLOAT:
        card = torch.cuda.get_device_name(place)
        return torch.float16, f"{card} has no bf16: running in fp16"
    if wanted is None:
        return (torch.float16 if capability >= _FAST_HALF else torch.float32), None
    return wanted, None
