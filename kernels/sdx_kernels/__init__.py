"""Exact attention on any device: Triton kernels, torch's kernels and a reference, and who runs.

Importing this imports torch but not Triton and asks no device; it defines the operators
`torch.ops.sdx_kernels.attention_forward` and `attention_backward`.
"""

from sdx_kernels import ops
from sdx_kernels.errors import InvalidInputs, KernelError, LaunchRefused, UnsupportedInputs
from sdx_kernels.ops import *  # noqa: F403
from sdx_kernels.registry import Choice, count, launches

__all__ = [
    "Choice",
    "InvalidInputs",
    "KernelError",
    "LaunchRefused",
    "UnsupportedInputs",
    "count",
    "launches",
]
__all__ += ops.__all__
