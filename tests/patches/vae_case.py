"""A tiny VAE of diffusers' own blocks, for what runs it in parts."""

from typing import Any

import torch
from diffusers import AutoencoderKL

__all__ = ["build"]


def build(channels: tuple[int, ...] = (16, 32, 32), **changes: Any) -> AutoencoderKL:
    """An AutoencoderKL of seeded random weights; `changes` are more of its configuration."""
    torch.manual_seed(0)
    levels = len(channels)
    vae = AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=8,
        **changes,
    )
    return vae.eval().requires_grad_(False)
