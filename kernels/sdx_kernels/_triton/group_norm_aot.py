"""Launches of the group norm kernels for the ahead-of-time check, with all they serve.

It knows their arguments and tiles; compiling is `aot_compile`'s.
"""

from collections.abc import Iterator
from typing import Any

import torch

from sdx_kernels._triton.aot_compile import TYPES, Launch, source_of
from sdx_kernels._triton.group_norm import (
    affine_constants,
    affine_kernel,
    normalize_kernel,
    store_kernel,
    tile_constants,
    upsample_kernel,
)
from sdx_kernels.tuning.group_norm import AFFINE_WARPS, tile_for

__all__ = ["group_norm_launches"]

_FAMILY = "group-norm"

#: channels of SDXL's decoder and of smaller ones, and numbers that tiles do not divide
CHANNELS = (32, 128, 256, 320, 512)
GROUPS = 32

#: Triton's own number, which their launches leave as it is
STAGES = 3

#: what the first kernel is asked to do; each of its options is on in one of these
_STORES: dict[str, dict[str, bool]] = {
    "store": {"BIAS": True, "RESIDUAL": True, "DIVIDE": True, "STORE": True, "MOMENTS": True},
    "statistics": {
        "BIAS": False,
        "RESIDUAL": False,
        "DIVIDE": False,
        "STORE": False,
        "MOMENTS": True,
    },
}

#: fp32 whatever the picture's dtype is
_FLOATS = dict.fromkeys(("moments_ptr", "counts_ptr", "affine_ptr"), "fp32")


def group_norm_launches(architecture: int) -> Iterator[Launch]:
    """Each kernel for each dtype that an architecture computes with, and channels of real models.

    There are no products in them, and so nothing for tensor cores: they serve Turing too, in fp16
    and fp32.
    """
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        if dtype == torch.bfloat16 and architecture < 80:
            continue
        for channels in CHANNELS:
            tile = tile_constants(channels)
            made: list[tuple[str, Any, dict[str, object], int]] = [
                (member, store_kernel, {**tile, **flags}, tile_for(channels).num_warps)
                for member, flags in _STORES.items()
            ]
            whole = affine_constants(channels, GROUPS, with_affine=True)
            normal = {**tile, "SILU": True}
            made += [
                ("affine", affine_kernel, whole, AFFINE_WARPS),
                ("normalize", normalize_kernel, normal, tile_for(channels).num_warps),
                ("upsample", upsample_kernel, tile, tile_for(channels).num_warps),
            ]
            for member, kernel, constants, warps in made:
                source = source_of(
                    kernel,
                    constants,
                    element=TYPES[dtype],
                    pointers=_FLOATS,
                    floats=("divisor", "eps"),
                )
                key = {
                    "kernel": member,
                    "channels": channels,
                    "dtype": str(dtype).removeprefix("torch."),
                }
                yield Launch(_FAMILY, key, source, warps, STAGES, tensor_core=False)
