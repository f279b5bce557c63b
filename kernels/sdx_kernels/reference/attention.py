"""Attention as one equation in fp32 (fp64 for fp64): the truth, and the path of last resort.

It knows the mathematics and must not know devices, tiles or who calls.
"""

import math

import torch

__all__ = ["attention"]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · query · keyᵀ + bias) · value, one full score matrix at once.

    Args:
        query: `[B, Mq, H, K]`.
        key: `[B, Mk, Hk, K]`, H a multiple of Hk.
        value: `[B, Mk, Hk, Kv]`.
        scale: factor of the scores, applied in the accumulation dtype.
        bias: float (added to the scaled scores) or bool (True = attend), broadcastable to
            `[B, H, Mq, Mk]`. A masked key still belongs to the sum: NaN there makes the row NaN.
        allowed: structural mask (bool, broadcastable likewise); excluded keys are as if absent.
        keep: bool, broadcastable likewise: the weights that dropout keeps; None = all.
        p: dropout probability, by which the kept weights are scaled up.

    Returns:
        `(out, lse)`: `[B, Mq, H, Kv]` in the query's dtype, and the natural logarithm of each row's
        sum `[B, H, Mq]` in fp32 (fp64). A row with nothing to attend gives 0 and −inf.
    """
    accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = query.shape[2] // max(key.shape[2], 1)
    q, k, v = (t.transpose(1, 2).to(accumulate) for t in (query, key, value))
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-1, -2)) * scale
    if bias is not None and bias.dtype == torch.bool:
        scores = scores + torch.zeros_like(bias, dtype=accumulate).masked_fill(~bias, -math.inf)
    elif bias is not None:
        scores = scores + bias.to(accumulate)
    poison = None
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
        # 0 · NaN is NaN: keep what is not finite out of rows that may not attend it
        wild = ~v.isfinite()
        poison = allowed.to(accumulate).expand_as(scores) @ wild.to(accumulate) > 0
        v = v.masked_fill(wild, 0.0)
    if scores.shape[-1] == 0:
        top = scores.new_full((*scores.shape[:-1], 1), -math.inf)
    else:
        top = scores.detach().amax(-1, keepdim=True)
    nothing = top == -math.inf
    # a row of nothing would give exp(−inf + inf): any finite reference makes it exp(−inf) = 0
    weights = torch.exp(scores - top.masked_fill(nothing, 0.0))
    total = weights.sum(-1, keepdim=True)
    safe_total = torch.where(nothing, torch.ones_like(total), total)
    weights = weights / safe_total
    if keep is not None:
        weights = weights * (keep / (1.0 - p)) if p < 1.0 else weights * 0.0
    out = weights @ v
    if poison is not None:
        out = out.masked_fill(poison, math.nan)
    lse = torch.where(nothing, top, top + torch.log(safe_total)).squeeze(-1)
    return out.transpose(1, 2).to(query.dtype), lse
