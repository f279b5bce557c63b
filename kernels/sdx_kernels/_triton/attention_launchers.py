"""The launchers of all attention kernels, whose repeated launches Triton does not inspect again.

It knows which kernels there are, and nothing of how they are launched. Operators import launchers
from here, so that no kernel of theirs goes the slow way.
"""

from typing import Any

from sdx_kernels import target
from sdx_kernels._triton.attention_bwd_launch import KERNEL_OF, launch_attention_bwd
from sdx_kernels._triton.attention_fwd import attention_fwd_kernel, launch_attention_fwd
from sdx_kernels._triton.attention_short import (
    attention_short_kernel,
    launch_attention_short,
)
from sdx_kernels._triton.attention_tma import (
    attention_tma_kernel,
    launch_attention_tma,
)
from sdx_kernels._triton.attention_tma_bwd import (
    keys_tma_kernel,
    marks_kernel,
    queries_tma_kernel,
)
from sdx_kernels._triton.attention_tma_bwd_launch import launch_attention_tma_bwd
from sdx_kernels._triton.attention_wide import (
    attention_wide_fwd_kernel,
    attention_wide_mix_kernel,
    attention_wide_scores_kernel,
    attention_wide_tops_kernel,
)
from sdx_kernels._triton.attention_wide_bwd import (
    attention_wide_rows_kernel,
    attention_wide_sum_kernel,
    attention_wide_weights_kernel,
)
from sdx_kernels._triton.attention_wide_launch import (
    launch_attention_wide_bwd,
    launch_attention_wide_fwd,
)
from sdx_kernels._triton.binaries import quicken

__all__ = [
    "KERNELS",
    "launch_attention_bwd",
    "launch_attention_fwd",
    "launch_attention_short",
    "launch_attention_tma",
    "launch_attention_tma_bwd",
    "launch_attention_wide_bwd",
    "launch_attention_wide_fwd",
]

KERNELS: tuple[Any, ...] = (
    attention_fwd_kernel,
    attention_short_kernel,
    attention_tma_kernel,
    attention_wide_fwd_kernel,
    attention_wide_scores_kernel,
    attention_wide_tops_kernel,
    attention_wide_mix_kernel,
    attention_wide_rows_kernel,
    attention_wide_weights_kernel,
    attention_wide_sum_kernel,
    *KERNEL_OF.values(),
    marks_kernel,
    keys_tma_kernel,
    queries_tma_kernel,
)

if not target.interpreting():
    for _kernel in KERNELS:
        quicken(_kernel)
