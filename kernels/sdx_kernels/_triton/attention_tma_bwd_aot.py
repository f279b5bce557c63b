"""Launches of the gradients through tensor descriptors for the ahead-of-time check.

It knows their arguments and tables; compiling is `aot_compile`'s.
"""

from collections.abc import Iterator
from typing import Any

import torch
from triton.compiler import ASTSource

from sdx_kernels._triton.aot_compile import TYPES, Launch, key_of, source_of
from sdx_kernels._triton.attention_tma_bwd import (
    keys_tma_kernel,
    marks_kernel,
    queries_tma_kernel,
)
from sdx_kernels._triton.attention_tma_bwd_launch import MARKS, constants_for_tma_bwd
from sdx_kernels.tuning.attention import padded
from sdx_kernels.tuning.attention_tma_bwd import (
    TMA_KERNELS,
    TmaGradConfig,
    candidates,
    ladder_for_tma_bwd,
)

__all__ = ["tma_backward_launches"]

_KERNEL_OF: dict[str, Any] = {"keys": keys_tma_kernel, "queries": queries_tma_kernel}

#: what has as many rows as there are queries; the others have a row a key
_OF_QUERIES = ("q_desc", "grad_desc", "dq_desc")
_FAMILY = "attention-tma-bwd"


def _source(kernel: str, config: TmaGradConfig, head_dim: int, dtype: torch.dtype) -> ASTSource:
    constants = constants_for_tma_bwd(config, head_dim=head_dim, value_dim=head_dim)
    plain = source_of(
        _KERNEL_OF[kernel],
        constants,
        element="fp32",
        pointers={"wide_ptr": "i32"},
    )
    signature = dict(plain.signature)
    for name in signature:
        rows = config.block_m if name in _OF_QUERIES else config.block_n
        if name == "facts_desc":
            signature[name] = f"tensordesc<fp32[1,1,{config.block_m}]>"
        elif name.endswith("_desc"):
            signature[name] = f"tensordesc<{TYPES[dtype]}[1,1,{rows},{padded(head_dim)}]>"
    return ASTSource(_KERNEL_OF[kernel], signature, constexprs=constants, attrs=plain.attrs)


def tma_backward_launches(architecture: int) -> Iterator[Launch]:
    """Every step and every candidate, with the kernel that goes before; nothing below sm_90."""
    capability = divmod(architecture, 10)
    for dtype in (torch.float16, torch.bfloat16):
        for head_dim in (64, 40, 80, 128):
            ladder = ladder_for_tma_bwd(capability, head_dim, head_dim, dtype)
            if ladder is None:
                continue
            tried = (ladder, *candidates(capability, head_dim, head_dim, dtype).values())
            for kernel in TMA_KERNELS:
                steps: dict[TmaGradConfig, str] = {}
                for one in tried:
                    for config in getattr(one, kernel):
                        steps.setdefault(config, "ladder" if one is ladder else "candidate")
                for config, member in steps.items():
                    key = key_of(config, head_dim=head_dim, dtype=dtype, member=member)
                    yield Launch(
                        _FAMILY,
                        {"kernel": kernel, **key, "most_registers": config.registers},
                        _source(kernel, config, head_dim, dtype),
                        config.num_warps,
                        config.num_stages,
                        registers=config.registers,
                    )
    if capability >= (9, 0):
        source = source_of(
            marks_kernel, {**MARKS, "WIDE": 1024.0}, element="fp32", pointers={"wide_ptr": "i32"}
        )
        # sums of flags, not products; and plain loads
        yield Launch(_FAMILY, {"kernel": "marks"}, source, 4, 3, tensor_core=False)
