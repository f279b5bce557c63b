"""A tiny Flux, whose attention asks diffusers' dispatcher, and what to look at on it."""

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn


def flux(seed: int = 0, singles: int = 2) -> FluxTransformer2DModel:
    """A model of one double layer and `singles` single ones, with seeded random weights."""
    torch.manual_seed(seed)
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=singles,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip


def out(model: nn.Module) -> Tensor:
    """What one call gives on fixed inputs."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        return model(
            hidden_states=torch.randn(1, 16, 4, generator=generator),
            encoder_hidden_states=torch.randn(1, 7, 32, generator=generator),
            pooled_projections=torch.randn(1, 32, generator=generator),
            timestep=torch.tensor([0.5]),
            img_ids=torch.arange(16)[:, None].expand(16, 3).float(),
            txt_ids=torch.zeros(7, 3),
        ).sample


def attentions(model: nn.Module) -> list[Any]:
    """Every module with a processor, in order."""
    return [m for m in model.modules() if hasattr(m, "processor")]


def backends(model: nn.Module) -> list[Any]:
    """What each processor names as its backend."""
    return [m.processor._attention_backend for m in attentions(model)]
