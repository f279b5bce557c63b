"""Pictures in another colour, with the captions that say so; some pairs are never trained on.

A picture takes part when one hue covers most of its coloured area. Of every object's colours a few
are held out by a hash of the pair: those are the unseen combinations of the evaluation.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from captions import COLOURS, coloured_captions
from data import Picture
from torch import Tensor

__all__ = ["Recoloured", "main_hues", "object_name", "plan_colours", "recolour"]

GROUPS = ("animals-nature", "food-drink", "travel-places", "activities", "objects")
#: share of the picture's ink that the hue must cover, and how far from it still counts, degrees
SHARE, WIDTH = 0.5, 40.0
#: colours of an object that training sees, and those that it never sees
SEEN, HELD_OUT = 4, 2
_COLOUR_WORDS = {*COLOURS, "white", "black", "brown", "light", "dark"}


@dataclass(frozen=True)
class Recoloured:
    """`picture` (an index) with its hue `source` turned to that of `colour`, degrees."""

    picture: int
    name: str
    colour: str
    source: float

    @property
    def captions(self) -> list[str]:
        return coloured_captions(self.name, self.colour)


def object_name(name: str) -> str:
    """`name` without colour words: "red apple" → "apple"."""
    return " ".join(word for word in name.split() if word not in _COLOUR_WORDS)


def to_hsv(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue in degrees, saturation and value of (…, 3) colours in 0…1."""
    value, low = rgb.amax(-1), rgb.amin(-1)
    chroma = value - low
    red, green, blue = rgb.unbind(-1)
    safe = chroma.clamp_min(1e-6)
    hue = torch.where(
        value == red,
        (green - blue) / safe % 6.0,
        torch.where(value == green, (blue - red) / safe + 2.0, (red - green) / safe + 4.0),
    )
    return hue * 60.0, chroma / value.clamp_min(1e-6), value


def to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Inverse of `to_hsv`, (…, 3)."""
    offsets = torch.tensor([5.0, 3.0, 1.0], device=hue.device)
    k = (offsets + hue.unsqueeze(-1) / 60.0) % 6.0
    wave = torch.minimum(k, 4.0 - k).clamp(0.0, 1.0)
    return value.unsqueeze(-1) * (1.0 - saturation.unsqueeze(-1) * wave)


def apart(hue: Tensor, other: float | Tensor) -> Tensor:
    """Smallest angle between hues, degrees."""
    return ((hue - other + 180.0) % 360.0 - 180.0).abs()


def main_hues(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Main hue in degrees and the share of the ink within `WIDTH` of it, for each picture.

    Args:
        pixels: uint8 (N, H, W, 3). Ink is what is not nearly white.
    """
    centres = torch.arange(0.0, 360.0, 5.0, device=pixels.device)
    hues, shares = [], []
    for part in pixels.split(256):
        rgb = part.flatten(1, 2).float() / 255.0
        hue, saturation, value = to_hsv(rgb)
        ink = rgb.amin(-1) < 0.94
        vivid = ink & (saturation > 0.25) & (value > 0.2)
        bins = ((hue / 5.0).round().long() % 72) + 72 * torch.arange(len(part), device=hue.device)[
            :, None
        ]
        counts = torch.zeros(len(part) * 72, device=hue.device)
        counts.index_add_(0, bins.flatten(), vivid.flatten().float())
        near = (apart(centres[:, None], centres[None]) <= WIDTH / 2).float()
        peak = centres[(counts.view(-1, 72) @ near).argmax(1)]
        covered = (vivid & (apart(hue, peak[:, None]) <= WIDTH)).sum(1)
        hues.append(peak)
        shares.append(covered / ink.sum(1).clamp_min(1))
    return torch.cat(hues), torch.cat(shares)


def _rank(name: str, colour: str) -> str:
    return hashlib.sha256(f"{name}/{colour}".encode()).hexdigest()


def plan_colours(
    pixels: Tensor, pictures: list[Picture]
) -> tuple[list[Recoloured], list[Recoloured]]:
    """Colour changes to train on, and those that are held out.

    On the CPU wherever `pixels` are: a GPU may round a hue to the other side of a limit, and what
    is held out must be the same everywhere.
    """
    hues, shares = (values.numpy() for values in main_hues(pixels.cpu()))
    seen: list[Recoloured] = []
    unseen: list[Recoloured] = []
    done: set[str] = set()
    own = {picture.name for picture in pictures}
    for index in np.flatnonzero(shares >= SHARE):
        picture, hue = pictures[index], float(hues[index])
        name = object_name(picture.name)
        if picture.group not in GROUPS or picture.name != picture.base or not name or name in done:
            continue
        done.add(name)
        others = [
            colour
            for colour, (target, _) in COLOURS.items()
            if float(apart(torch.tensor(hue), target)) > 25.0 and f"{colour} {name}" not in own
        ]
        others.sort(key=lambda colour: _rank(name, colour))
        made = [Recoloured(int(index), name, colour, hue) for colour in others]
        unseen += made[:HELD_OUT]
        seen += made[HELD_OUT : HELD_OUT + SEEN]
    return seen, unseen


def recolour(pixels: Tensor, changes: list[Recoloured]) -> Tensor:
    """The changed pictures, uint8 (changes, H, W, 3), on the device of `pixels`."""
    out = []
    for change in changes:
        target, factor = COLOURS[change.colour]
        hue, saturation, value = to_hsv(pixels[change.picture].float() / 255.0)
        moved = (apart(hue, change.source) <= WIDTH) & (saturation > 0.02)
        # a dark hue has another name (dark orange is brown): lift it until the word is right
        vivid = moved & (saturation > 0.25)
        mean = value[vivid].mean() if vivid.any() else value.new_tensor(1.0)
        lift = (0.85 / mean.clamp_min(0.3)).clamp_min(1.0)
        hue = torch.where(moved, (hue + target - change.source) % 360.0, hue)
        value = torch.where(moved, (value * lift).clamp_max(1.0), value)
        saturation = torch.where(moved, (saturation * factor), saturation)
        out.append((to_rgb(hue, saturation, value) * 255.0).round().clamp(0, 255).to(torch.uint8))
    return torch.stack(out) if out else pixels[:0]
