"""Which training picture is a drawn one nearest to: by four measures, one of them without our VAE.

Features are rows of a matrix; the nearest is the one at the smallest Euclidean distance.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from recolour import apart, to_hsv
from torch import Tensor
from train_vae import encode

__all__ = ["MEASURES", "colour_share", "edges", "features", "nearest"]


def by_latent(pixels: Tensor, vae: Any) -> Tensor:
    """Mean latents."""
    return encode(vae, pixels).flatten(1)


def by_pixels(pixels: Tensor, vae: Any = None) -> Tensor:
    """Colours of a quarter-size picture, so that one pixel's offset is not a difference."""
    picture = pixels.permute(0, 3, 1, 2).float() / 255.0
    return F.avg_pool2d(picture, 4).flatten(1)


def edges(pixels: Tensor, vae: Any = None) -> Tensor:
    """Directions of brightness edges in 8 × 8 cells (a HOG), blind to colour."""
    weights = torch.tensor([0.299, 0.587, 0.114], device=pixels.device)
    grey = F.pad((pixels.float() / 255.0) @ weights, (1, 1, 1, 1), value=1.0)
    across = grey[:, 1:-1, 2:] - grey[:, 1:-1, :-2]
    down = grey[:, 2:, 1:-1] - grey[:, :-2, 1:-1]
    strength = (across.square() + down.square()).sqrt()
    # an edge has no front and back: light on dark equals dark on light
    kind = (torch.atan2(down, across) / torch.pi * 8.0).round().long() % 8
    histogram = F.one_hot(kind, 8).permute(0, 3, 1, 2) * strength[:, None]
    cells = F.avg_pool2d(histogram.float(), pixels.shape[1] // 8).flatten(1)
    return F.normalize(cells.sqrt(), dim=1)


def by_histogram(pixels: Tensor, vae: Any = None) -> Tensor:
    """Colour histograms (4 × 4 × 4) of the four quarters, beside `edges`; no network involved."""
    side = pixels.shape[1] // 2
    parts = (pixels // 64).long()
    codes = 16 * parts[..., 0] + 4 * parts[..., 1] + parts[..., 2]
    counts = F.one_hot(codes, 64).permute(0, 3, 1, 2).float()
    colours = F.avg_pool2d(counts, side).flatten(1)
    return torch.cat([F.normalize(colours.sqrt(), dim=1), edges(pixels)], dim=1)


#: name → features of uint8 pictures (N, H, W, 3), given the VAE
MEASURES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "latent": by_latent,
    "pixels": by_pixels,
    "histogram": by_histogram,
    "edges": edges,
}


def features(measure: str, pixels: Tensor, vae: Any) -> Tensor:
    """One row of features for each picture, made in parts."""
    return torch.cat([MEASURES[measure](part, vae) for part in pixels.split(64)])


def nearest(
    measure: str, pixels: Tensor, gallery: Tensor, vae: Any, known: Tensor | None = None
) -> Tensor:
    """Index of the nearest picture of the gallery for each of `pixels`.

    Args:
        measure: a key of `MEASURES`.
        pixels, gallery: uint8 (N, H, W, 3).
        known: `features` of the gallery, where they were made before.
    """
    known = features(measure, gallery, vae) if known is None else known
    return torch.cdist(features(measure, pixels, vae), known).argmin(1)


def colour_share(pixels: Tensor, hue: float) -> float:
    """Share of a picture's vivid area within 30 degrees of `hue`."""
    found, saturation, value = to_hsv(pixels.float() / 255.0)
    vivid = (saturation > 0.2) & (value > 0.2)
    near = vivid & (apart(found, hue) <= 30.0)
    return (near.sum() / vivid.sum().clamp_min(1)).item()
