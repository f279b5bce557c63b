"""The same equation in slices of queries, forward and backward, so that memory stays bounded.

The slices are a pure function of the shapes: recomputing a forward splits it in the same way, so
gradient checkpointing sees the same bits. No slice adds to another's output by atomics.
"""

from collections.abc import Iterator
from typing import Any

import torch

from sdx_kernels.reference.attention import attention
from sdx_kernels.reference.attention_gradients import attention_gradients
from sdx_kernels.reference.structures import Structure

__all__ = ["attention_backward", "attention_forward", "slices"]

#: most scores alive at once: 2**26 fp32 values are 256 MiB, and a backward holds four to six such
#: matrices (six with dropout), so that it stays near 1.5 GiB whatever the shape
MAX_SCORES = 1 << 26


def slices(
    batch: int, heads: int, queries: int, keys: int, limit: int = MAX_SCORES
) -> Iterator[tuple[slice, slice]]:
    """(batch, query) slices that hold at most `limit` scores each, or one row of one item."""
    per_row = max(1, heads * keys)
    items = max(1, min(batch, limit // (per_row * max(1, queries))))
    rows = max(1, min(queries, limit // (per_row * items)))
    for item in range(0, batch, items):
        for row in range(0, queries, rows):
            yield slice(item, min(item + items, batch)), slice(row, min(row + rows, queries))


def _cut(dense: torch.Tensor | None, items: slice, rows: slice) -> torch.Tensor | None:
    if dense is None:
        return None
    dense = dense[items] if dense.shape[0] > 1 else dense
    return dense[:, :, rows] if dense.shape[2] > 1 else dense


def _structured(
    structure: Structure | None,
    items: slice,
    rows: slice,
    query: torch.Tensor,
    key: torch.Tensor,
) -> dict[str, Any]:
    if structure is None:
        return {}
    queries, heads, keys, device = query.shape[1], query.shape[2], key.shape[1], query.device
    return {
        "allowed": structure.keys_of(items, rows, queries, keys, device),
        "keep": structure.keep(items, rows, heads, keys, device),
        "p": 0.0 if structure.dropout is None else structure.dropout.p,
    }


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    bias: torch.Tensor | None = None,
    structure: Structure | None = None,
    output_dtype: torch.dtype | None = None,
    limit: int = MAX_SCORES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention.attention` slice by slice; arguments and results as there.

    Args:
        structure: bands, packed sequences, missing keys, dropout; made slice by slice.
        output_dtype: of the output. Default: the query's.
        limit: most scores alive at once.
    """
    batch, queries, heads, _ = query.shape
    dtype = output_dtype or query.dtype
    wide = torch.promote_types(query.dtype, dtype)
    out = query.new_zeros((batch, queries, heads, value.shape[3]), dtype=dtype)
    accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_full((batch, heads, queries), -torch.inf, dtype=accumulate)
    for items, rows in slices(batch, heads, queries, key.shape[1], limit):
        part, part_lse = attention(
            query[items, rows].to(wide),
            key[items].to(wide),
            value[items].to(wide),
            scale=scale,
            bias=_cut(bias, items, rows),
            **_structured(structure, items, rows, query, key),
        )
        out[items, rows] = part.to(dtype)
        lse[items, :, rows] = part_lse
    return out, lse


def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    bias: torch.Tensor | None = None,
    bias_grad: bool = False,
    lse_grad: torch.Tensor | None = None,
    structure: Structure | None = None,
    limit: int = MAX_SCORES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of `attention` by recomputing each slice in the accumulation dtype.

    Args:
        grad: gradient of the output, `[B, Mq, H, Kv]`.
        bias_grad: whether the bias's gradient is wanted.
        lse_grad: gradient of the log-sum-exp, `[B, H, Mq]`; None = zero.
        structure: as given to the forward.
        limit: most scores alive at once.

    Returns:
        Gradients of query, key, value and (when `bias_grad`) of the bias in the bias's own,
        unbroadcast shape; each in its tensor's dtype, summed in fp32 (fp64).
    """
    accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, queries, heads, _ = query.shape
    sums = [torch.zeros_like(t, dtype=accumulate) for t in (query, key, value)]
    bias_sum: torch.Tensor | None = None
    if bias is not None and bias_grad:
        bias_sum = torch.zeros_like(bias, dtype=accumulate)
    for items, rows in slices(batch, heads, queries, key.shape[1], limit):
        parts = [grad[items, rows], query[items, rows], key[items], value[items]]
        dq, dk, dv, ds = attention_gradients(
            *(part.to(accumulate) for part in parts),
            scale=scale,
            bias=_cut(bias, items, rows),
            lse_grad=None if lse_grad is None else lse_grad[items, :, rows].to(accumulate),
            **_structured(structure, items, rows, query, key),
        )
        sums[0][items, rows] += dq
        sums[1][items] += dk
        sums[2][items] += dv
        if bias_sum is not None:
            target = _cut(bias_sum, items, rows)
            assert target is not None
            target += ds.sum_to_size(target.shape)
    dq, dk, dv = (s.to(t.dtype) for s, t in zip(sums, (query, key, value), strict=True))
    db = None if bias is None or bias_sum is None else bias_sum.to(bias.dtype)
    return dq, dk, dv, db
