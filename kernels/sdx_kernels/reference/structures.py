"""Which keys the rows of a slice may attend, and which weights dropout keeps there.

It knows bands, packed sequences and positions in them; it must not know the attention equation.
"""

from dataclasses import dataclass

import torch

from sdx_kernels.bias import Band, Packed
from sdx_kernels.checks import Dropout
from sdx_kernels.reference.dropout import keep_at

__all__ = ["Structure"]

#: most draws of dropout at once: Philox holds about eight int64 values for each, which makes these
#: 256 MiB, as much as the scores of a slice
MAX_DRAWS = 1 << 22


@dataclass(frozen=True, eq=False)
class Structure:
    """All of an attention call that is neither a tensor of it nor its dense bias.

    Attributes:
        band: keys a query may attend, around its sequence's diagonal; None = all.
        packed: sequences within a batch of one; None = each item is one.
        key_mask: bool `[B, Mk]`, True = the key exists; None = all do.
        allowed: bool, broadcastable to `[B, H, Mq, Mk]`; a caller's own structure, or None.
        dropout: which weights are dropped; None = none.
    """

    band: Band | None = None
    packed: Packed | None = None
    key_mask: torch.Tensor | None = None
    allowed: torch.Tensor | None = None
    dropout: Dropout | None = None

    def keys_of(
        self, items: slice, rows: slice, queries: int, keys: int, device: torch.device
    ) -> torch.Tensor | None:
        """Bool `[items|1, heads|1, rows, keys]`, True = attend; None = everything.

        Args:
            items: batch items of the slice. rows: its query rows.
            queries, keys: Mq and Mk of the whole call.
            device: where to build it.
        """
        inside: torch.Tensor | None = None
        if self.band is not None or self.packed is not None:
            inside = self._inside(rows, queries, keys, device)[None, None]
        if self.key_mask is not None:
            exists = self.key_mask[items][:, None, None, :]
            inside = exists if inside is None else inside & exists
        if self.allowed is not None:
            own = self.allowed
            own = own[items] if own.shape[0] > 1 else own
            own = own[:, :, rows] if own.shape[2] > 1 else own
            inside = own if inside is None else inside & own
        return inside

    def keep(
        self, items: slice, rows: slice, heads: int, keys: int, device: torch.device
    ) -> torch.Tensor | None:
        """Bool `[items, heads, rows, keys]`: the weights that dropout keeps; None = all."""
        if self.dropout is None:
            return None
        row = torch.arange(rows.start, rows.stop, device=device)
        column = torch.arange(keys, device=device)
        item = torch.arange(items.start, items.stop, device=device)[:, None, None, None]
        if self.packed is not None:
            sequence, row, _ = _places(row, self.packed.query_starts)
            item = sequence[None, None, :, None]
            column = _places(column, self.packed.key_starts)[1]
        head = item * heads + torch.arange(heads, device=device)[None, :, None, None]
        shape = (items.stop - items.start, heads, row.shape[0], keys)
        kept = torch.empty(shape, dtype=torch.bool, device=device)
        step = max(1, MAX_DRAWS // max(1, shape[0] * heads * keys))
        for first in range(0, shape[2], step):
            some = slice(first, first + step)
            of_rows = head if self.packed is None else head[:, :, some]
            kept[:, :, some] = keep_at(
                self.dropout.seed, of_rows, row[some, None], column, self.dropout.p
            )
        return kept

    def _inside(self, rows: slice, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        column = torch.arange(keys, device=device)[None, :]
        shift: int | torch.Tensor = keys - queries
        inside = torch.ones(row.shape[0], keys, dtype=torch.bool, device=device)
        if self.packed is not None:
            sequence, row, row_length = _places(row, self.packed.query_starts)
            other, column, _ = _places(column, self.packed.key_starts)
            key_lengths = self.packed.key_starts.diff()[sequence]
            shift = key_lengths - row_length
            inside &= sequence == other
        band = self.band or Band()
        diagonal = row + shift if band.from_end else row
        if band.left is not None:
            inside &= column >= diagonal - band.left
        if band.right is not None:
            inside &= column <= diagonal + band.right
        return inside


def _places(
    positions: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sequence, position in it, its length) of packed positions."""
    sequence = torch.searchsorted(starts, positions.to(starts.dtype), right=True) - 1
    return sequence, positions - starts[sequence], starts.diff()[sequence]
