"""Launches of the wide, short-key and descriptor kernels for the ahead-of-time check.

It knows their ladders and sources; compiling is `aot_compile`'s.
"""

from collections.abc import Iterator
from typing import Any

import torch

from sdx_kernels._triton.aot_compile import TYPES, Launch, key_of, source_of
from sdx_kernels._triton.attention_short import short_source
from sdx_kernels._triton.attention_tma import tma_source
from sdx_kernels._triton.attention_wide_launch import programs_for
from sdx_kernels.tuning.attention_short import ladder_for_short
from sdx_kernels.tuning.attention_tma import ladder_for_tma
from sdx_kernels.tuning.attention_wide import WideKind, wide_grad_ladder_for, wide_ladder_for

__all__ = ["short_launches", "tma_launches", "wide_launches"]

_HALF = (torch.float16, torch.bfloat16)
_WIDE_MASKS: dict[str, Any] = {"left": True, "right": True, "key_mask": True, "bias_grad": True}


def short_launches(architecture: int) -> Iterator[Launch]:
    """Every step for text (77 tokens, twice that) and for a picture encoder's 257."""
    for dtype in _HALF:
        for head_dim in (40, 64, 80, 128):
            for keys in (77, 154, 257):
                for biased in (False, True):
                    if biased and dtype == torch.bfloat16:
                        continue
                    bias = dtype if biased else None
                    ladder = ladder_for_short(
                        divmod(architecture, 10), head_dim, head_dim, dtype, keys, biased
                    )
                    for config in ladder:
                        member = f"{keys} keys" + (", bias, key mask" if biased else "")
                        source = short_source(
                            config,
                            head_dim=head_dim,
                            dtype=dtype,
                            bias=bias,
                            key_mask=biased,
                            with_lse=True,
                        )
                        key = key_of(config, head_dim=head_dim, dtype=dtype, member=member)
                        yield Launch("short", key, source, config.num_warps, config.num_stages)


def tma_launches(architecture: int) -> Iterator[Launch]:
    """Every step for many and for few keys; nothing below sm_90."""
    for dtype in _HALF:
        for head_dim in (40, 64, 80, 128):
            for keys in (1024, 4096):
                ladder = ladder_for_tma(divmod(architecture, 10), head_dim, head_dim, dtype, keys)
                for config in ladder:
                    source = tma_source(config, head_dim=head_dim, dtype=dtype, with_lse=True)
                    key = key_of(config, head_dim=head_dim, dtype=dtype, member=f"{keys} keys")
                    yield Launch(
                        "tma",
                        key,
                        source,
                        config.num_warps,
                        config.num_stages,
                        registers=config.registers,
                    )


def wide_launches(architecture: int) -> Iterator[Launch]:
    """First configurations forward and backward, whole and ragged dims, plain and all masks."""
    capability = divmod(architecture, 10)
    for dtype in (*_HALF, torch.float32):
        for dims in ((512, 512), (300, 264)):
            for masked in (False, True):
                masks = {"bias": dtype, **_WIDE_MASKS} if masked else {}
                kind = WideKind(*dims, dtype, **masks)
                for way, ladder in (
                    ("forward", wide_ladder_for(capability, kind)),
                    ("backward", wide_grad_ladder_for(capability, kind)),
                ):
                    for program in programs_for(ladder[0], kind) if ladder else ():
                        yield _wide(program, kind, way, masked)


def _wide(program: Any, kind: WideKind, way: str, masked: bool) -> Launch:
    source = source_of(
        program.kernel,
        program.constants,
        element=TYPES[kind.dtype],
        pointers={name: TYPES[dtype] for name, dtype in program.pointers.items()},
        floats=("scale", "factor", "p_factor"),
        ones=["bias_stride_n"] if masked and "bias_stride_n" in program.kernel.arg_names else [],
    )
    name = program.kernel.__name__
    key = {
        "kernel": name,
        "head_dim": kind.head_dim,
        "value_dim": kind.value_dim,
        "dtype": str(kind.dtype).removeprefix("torch."),
        "member": f"{way}, {'all masks' if masked else 'plain'}",
        "constants": {k: v for k, v in program.constants.items() if "BLOCK" in k or k == "ADD"},
    }
    # the tops are sums, not products
    return Launch(
        "wide", key, source, program.num_warps, program.num_stages, tensor_core="tops" not in name
    )
