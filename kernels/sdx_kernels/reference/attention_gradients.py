"""Attention's gradients in closed form, in the accumulation dtype: no autograd, no saved scores.

It knows the mathematics and must not know devices, tiles or who calls. Autograd is of no use here:
inside a `torch.library` operator it records nothing.
"""

import math

import torch

__all__ = ["attention_gradients"]


def _tame(tensor: torch.Tensor) -> torch.Tensor:
    """What is not finite as 0, since 0 · NaN is NaN in a product."""
    return torch.where(tensor.isfinite(), tensor, 0.0)


def attention_gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    p: float = 0.0,
    lse_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `reference.attention.attention`, all in one dtype (fp32 or fp64).

    With P the softmax, D the dropout mask over 1 − p and dO the gradient of the output:
    dV = (P∘D)ᵀ·dO, dP = (dO·Vᵀ)∘D, dS = P∘(dP − Σⱼ P∘dP + dlse), dQ = scale · dS·K,
    dK = scale · dSᵀ·Q, dbias = dS (Dao et al. 2022, FlashAttention, appendix B.2).

    Args:
        grad: `[B, Mq, H, Kv]`.
        query, key, value, scale, bias, allowed, keep, p: as for `attention`.
        lse_grad: `[B, H, Mq]`, gradient of the log-sum-exp; None = zero.

    Returns:
        dQ, dK, dV in their tensors' shapes, and dS `[B, H, Mq, Mk]`.
    """
    groups = query.shape[2] // max(key.shape[2], 1)
    q, k, v, do = (t.transpose(1, 2) for t in (query, key, value, grad))
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    # in place wherever it can be: each of these matrices is a quarter of a slice's memory
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    if bias is not None and bias.dtype == torch.bool:
        scores += torch.zeros_like(bias, dtype=q.dtype).masked_fill(~bias, -math.inf)
    elif bias is not None:
        scores += bias.to(q.dtype)
    if allowed is not None:
        scores.masked_fill_(~allowed, -math.inf)
    if scores.shape[-1] > 0:
        top = scores.amax(-1, keepdim=True)
        scores.sub_(top.masked_fill(top == -math.inf, 0.0)).exp_()
    total = scores.sum(-1, keepdim=True)
    weights = scores.div_(torch.where(total == 0.0, 1.0, total))
    if allowed is not None:
        # a row that attends NaN is NaN throughout, also where it excludes a key
        weights.masked_fill_(~allowed, 0.0)

    kept: torch.Tensor | None = None
    if keep is not None:
        kept = keep / (1.0 - p) if p < 1.0 else torch.zeros_like(weights)
    dropped = weights if kept is None else weights * kept
    dv = dropped.transpose(-1, -2) @ (do if allowed is None else _tame(do))
    del dropped
    dp = do @ (v if allowed is None else _tame(v)).transpose(-1, -2)
    if kept is not None:
        dp *= kept
    delta = (weights * dp).sum(-1, keepdim=True)
    if allowed is not None:
        # a value that is not finite spoils the rows that attend it, as it does their output
        wild_v = (~v.isfinite()).any(-1, keepdim=True).to(q.dtype)
        delta = delta.masked_fill(allowed.to(q.dtype).expand_as(dp) @ wild_v > 0, math.nan)
    if lse_grad is not None:
        delta = delta - lse_grad.unsqueeze(-1)
    ds = dp.sub_(delta).mul_(weights)
    if allowed is None:
        dq, dk = ds @ k, ds.transpose(-1, -2) @ q
    else:
        # an excluded key is as if absent: neither its values nor a wild row reach the other's sum;
        # where a wild one is attended, the weights are NaN already
        ds.masked_fill_(~allowed, 0.0)
        dq, dk = ds @ _tame(k), ds.transpose(-1, -2) @ _tame(q)
        wild = (~do.isfinite()).any(-1, keepdim=True).to(q.dtype)
        dv = dv.masked_fill(
            allowed.to(q.dtype).expand_as(ds).transpose(-1, -2) @ wild > 0, math.nan
        )
    if groups > 1:
        dk, dv = (t.unflatten(1, (-1, groups)).sum(2) for t in (dk, dv))
    return (
        (dq * scale).transpose(1, 2),
        (dk * scale).transpose(1, 2),
        dv.transpose(1, 2),
        ds,
    )
