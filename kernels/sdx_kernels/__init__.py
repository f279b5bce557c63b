"""Exact attention on any device: Triton kernels, torch's kernels and a reference, and who runs.

Importing this imports torch but not Triton, asks no device and registers nothing.
"""

from sdx_kernels.bias import (
    AttentionBias,
    BlockDiagonalCausalMask,
    BlockDiagonalMask,
    KeyPaddingMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)
from sdx_kernels.errors import InvalidInputs, KernelError, LaunchRefused, UnsupportedInputs
from sdx_kernels.ops import (
    attend,
    choose,
    explain,
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)
from sdx_kernels.registry import Choice, count, launches

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalMask",
    "BlockDiagonalMask",
    "Choice",
    "InvalidInputs",
    "KernelError",
    "KeyPaddingMask",
    "LaunchRefused",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "UnsupportedInputs",
    "attend",
    "choose",
    "count",
    "explain",
    "launches",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]
