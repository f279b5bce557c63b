"""What the backward kernels are held to: the equation's gradients in fp64, and torch's own."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdx_kernels.reference.attention import attention

__all__ = ["Inputs", "autograd", "peer", "unit_grad"]

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def autograd(inputs: Inputs, grad: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """The truth: autograd of the equation in fp64 on the rounded inputs."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out, _ = attention(*leaves, scale=scale)
    return torch.autograd.grad(out, leaves, grad.double())


def peer(inputs: Inputs, grad: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """Torch's MATH backward in the inputs' dtype."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    return torch.autograd.grad(out.transpose(1, 2), leaves, grad)


def unit_grad(inputs: Inputs) -> torch.Tensor:
    q, _, v = inputs
    generator = torch.Generator().manual_seed(11)
    return torch.randn((*q.shape[:3], v.shape[3]), generator=generator).to(q.dtype)
