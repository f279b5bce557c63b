"""The mask that dropout draws, as a function of seed and place: Philox 4x32-10 in plain PyTorch.

It knows the generator's arithmetic and must not know who drops what.
"""

import torch

__all__ = ["keep_mask", "threshold_of"]

_KEYS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = (0xD2511F53, 0xCD9E8D57)
_WORD = 0xFFFFFFFF


def threshold_of(p: float) -> int:
    """A 32-bit draw below it drops the weight; p in [0, 1)."""
    return int(p * 2**32)


def keep_mask(
    seed: torch.Tensor, batch: int, heads: int, rows: range, keys: range, p: float, first: int = 0
) -> torch.Tensor:
    """Which weights dropout keeps (Salmon et al. 2011, "Parallel random numbers").

    Args:
        seed: int64, one element, on the device of the result.
        batch, heads: number of items and heads.
        rows, keys: query rows and keys, counted within an item.
        p: dropout probability in [0, 1).
        first: number of the first item.

    Returns:
        Bool `[batch, heads, rows, keys]`, the same for every tiling and device.
    """
    device = seed.device
    items = torch.arange(first * heads, (first + batch) * heads, device=device)
    shape = (batch, heads, len(rows), len(keys))
    c0 = torch.arange(keys.start, keys.stop, device=device).expand(shape)
    c1 = torch.arange(rows.start, rows.stop, device=device)[:, None].expand(shape)
    c2 = items.view(batch, heads, 1, 1).expand(shape)
    c3 = torch.zeros((), dtype=torch.int64, device=device).expand(shape)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        # int64 products wrap, and their upper 32 bits are right all the same
        low, high = c0 * _ROUNDS[0], c2 * _ROUNDS[1]
        c0 = ((high >> 32) & _WORD) ^ c1 ^ k0
        c2 = ((low >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = high & _WORD, low & _WORD
        k0, k1 = (k0 + _KEYS[0]) & _WORD, (k1 + _KEYS[1]) & _WORD
    return c0 >= threshold_of(p)
