"""Device code that the attention kernels share: what must agree between forward and backward.

It knows tiles and counters, and must not know which kernel calls.
"""

import triton
import triton.language as tl

__all__ = ["dropout_keep"]


@triton.jit
def dropout_keep(seed, head, rows, keys, threshold):
    """[rows, keys] tile of the weights that dropout keeps.

    A pure function of the seed and of the weight's place, so that forward, backward and reference
    draw the same mask whatever their tiles are (Salmon et al. 2011, Philox 4x32-10).

    seed: int64 scalar. head: batch item (or packed sequence) · heads + head. rows and keys: int32,
    counted within the sequence. threshold: int64, floor(p · 2³²): a smaller draw drops the weight.
    """
    place = tl.zeros((rows.shape[0], keys.shape[0]), tl.int32)
    draw, _, _, _ = tl.philox(
        seed, place + keys[None, :], place + rows[:, None], place + head.to(tl.int32), place
    )
    return draw >= threshold.to(tl.uint32)
