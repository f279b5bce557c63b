"""Tiles of the group norm kernels: a pure function of the number of channels.

They only stream memory, so one tile serves every card; nothing is timed.
"""

from dataclasses import dataclass

__all__ = ["AFFINE_WARPS", "GroupNormTile", "slots_for", "tile_for"]


@dataclass(frozen=True)
class GroupNormTile:
    """A tile of pixels by channels of a channels-last tensor.

    Attributes:
        pixels: pixels of one step.
        channels: channels, a power of two.
        steps: steps of one program, whose pixels share one slot of the statistics.
        num_warps: warps of a program.
    """

    pixels: int
    channels: int
    steps: int
    num_warps: int = 8


#: elements of a step: 16 a thread, which two loads of 16 bytes bring in 16 bits
_ELEMENTS = 4096
#: 256 contiguous bytes in 16 bits: two full sectors of every line that is touched
_CHANNELS = 128
#: pixels of a slot: 1024 x 1024 pixels of 128 channels need 4 MiB of statistics
_SLOT = 256


#: warps of the program that makes a group's factors from its statistics, a few thousand numbers
AFFINE_WARPS = 4


def tile_for(channels: int) -> GroupNormTile:
    """The tile for tensors of `channels` channels."""
    width = 16
    while width < min(channels, _CHANNELS):
        width *= 2
    pixels = _ELEMENTS // width
    return GroupNormTile(pixels, width, max(1, _SLOT // pixels))


def slots_for(channels: int, pixels: int) -> int:
    """Slots that the statistics of `pixels` pixels a picture take: one a program."""
    tile = tile_for(channels)
    return -(-pixels // (tile.pixels * tile.steps))
