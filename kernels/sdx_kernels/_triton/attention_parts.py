"""Device code that the attention kernels share: what must agree between forward and backward.

It knows tiles and counters, and must not know which kernel calls.
"""

import triton
import triton.language as tl

__all__ = ["band_range", "dropout_keep", "load_rows"]


@triton.jit
def dropout_keep(seed, head, rows, keys, threshold):
    """[rows, keys] tile of the weights that dropout keeps.

    A pure function of the seed and of the weight's place, so that forward, backward and reference
    draw the same mask whatever their tiles are (Salmon et al. 2011, Philox 4x32-10).

    seed: int64 scalar. head: batch item (or packed sequence) · heads + head. rows and keys: int32,
    counted within the sequence. threshold: floor(p · 2³²) as an int64, or the int32 of the same
    lower bits: a smaller draw drops the weight.
    """
    place = tl.zeros((rows.shape[0], keys.shape[0]), tl.int32)
    draw, _, _, _ = tl.philox(
        seed, place + keys[None, :], place + rows[:, None], place + head.to(tl.int32), place
    )
    return draw >= threshold.to(tl.uint32)


@triton.jit
def band_range(
    first, last, length, shift, left, right,
    LOWER: tl.constexpr, UPPER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(begin, inner, inner_end, end): the keys that the rows first…last of a tile attend.

    Row i attends the keys i + shift − left … i + shift + right of `length`, where LOWER and UPPER
    say which of the two bounds exist. Tiles of BLOCK keys from begin to end hold every key that
    some row attends; the tiles from inner to inner_end every row attends whole. All but `end` are
    multiples of BLOCK; begin ≤ inner ≤ inner_end, and begin ≥ end where nothing is attended.

    The rows that attend a tile of keys are the same with −shift, and left and right exchanged.
    """
    begin = 0
    inner = 0
    end = length
    whole = length
    if UPPER:
        end = tl.minimum(length, last + shift + right + 1)
        whole = tl.minimum(length, tl.maximum(0, first + shift + right + 1))
    if LOWER:
        begin = (tl.maximum(0, first + shift - left) // BLOCK) * BLOCK
        inner = tl.cdiv(tl.maximum(0, last + shift - left), BLOCK) * BLOCK
    # a band narrower than a tile has no whole tile: inner_end must not fall before inner
    inner_end = tl.maximum(inner, (whole // BLOCK) * BLOCK)
    return begin, inner, inner_end, end


@triton.jit
def load_rows(ptrs, exists, offs, WIDTH: tl.constexpr, FULL: tl.constexpr, EDGE: tl.constexpr):
    """[rows, channels] tile; EDGE reads only rows that exist, not FULL only the first WIDTH."""
    if EDGE and FULL:
        tile = tl.load(ptrs, mask=exists[:, None], other=0.0)
    elif EDGE:
        tile = tl.load(ptrs, mask=exists[:, None] & (offs[None, :] < WIDTH), other=0.0)
    elif FULL:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=offs[None, :] < WIDTH, other=0.0)
    return tile
