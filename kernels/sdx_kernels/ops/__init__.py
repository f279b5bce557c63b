"""Operators: checks, selection, autograd; each one correct on every device."""

from sdx_kernels.ops.attention import (
    attend,
    choose,
    explain,
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)

__all__ = [
    "attend",
    "choose",
    "explain",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]
