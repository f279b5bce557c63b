"""The mask that dropout draws, as a function of seed and place: Philox 4x32-10 in plain PyTorch.

It knows the generator's arithmetic and must not know who drops what.
"""

import torch

__all__ = ["keep_at", "keep_mask", "threshold_of"]

_KEYS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = (0xD2511F53, 0xCD9E8D57)
_WORD = 0xFFFFFFFF


def threshold_of(p: float) -> int:
    """A 32-bit draw below it drops the weight; p in [0, 1]."""
    return int(p * 2**32)


def keep_at(
    seed: torch.Tensor, heads: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, p: float
) -> torch.Tensor:
    """Which weights dropout keeps (Salmon et al. 2011, "Parallel random numbers").

    Args:
        seed: int64, one element, on the device of the result.
        heads: number of each weight's batch item (or packed sequence) times the number of heads,
            plus its head; int64.
        rows: number of its query, counted within the item or sequence; int64.
        keys: number of its key, likewise; int64.
        p: dropout probability in [0, 1].

    Returns:
        Bool, of the three tensors' broadcast shape; the same for every tiling and device.
    """
    c0, c1, c2 = torch.broadcast_tensors(keys, rows, heads)
    c3 = torch.zeros_like(c0)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        # int64 products wrap, and their upper 32 bits are right all the same
        low, high = c0 * _ROUNDS[0], c2 * _ROUNDS[1]
        c0 = ((high >> 32) & _WORD) ^ c1 ^ k0
        c2 = ((low >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = high & _WORD, low & _WORD
        k0, k1 = (k0 + _KEYS[0]) & _WORD, (k1 + _KEYS[1]) & _WORD
    return c0 >= threshold_of(p)


def keep_mask(
    seed: torch.Tensor, batch: int, heads: int, rows: range, keys: range, p: float, first: int = 0
) -> torch.Tensor:
    """`keep_at` for whole items: bool `[batch, heads, rows, keys]`.

    Args:
        seed: int64, one element.
        batch, heads: number of items and heads.
        rows, keys: query rows and keys, counted within an item.
        p: dropout probability in [0, 1].
        first: number of the first item.
    """
    device = seed.device
    items = torch.arange(first * heads, (first + batch) * heads, device=device)
    return keep_at(
        seed,
        items.view(batch, heads, 1, 1),
        torch.arange(rows.start, rows.stop, device=device)[:, None],
        torch.arange(keys.start, keys.stop, device=device),
        p,
    )
