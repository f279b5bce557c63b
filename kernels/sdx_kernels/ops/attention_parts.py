"""Attention in parts, by xFormers' names: without autograd, backward alone, key by key segment.

It knows the log-sum-exp and how parts are merged; selection is `attention`'s.
"""

from collections.abc import Sequence

import torch

from sdx_kernels.checks import attention_inputs
from sdx_kernels.errors import InvalidInputs
from sdx_kernels.ops import attention_library as library
from sdx_kernels.ops.attention import Bias, memory_efficient_attention, run
from sdx_kernels.ops.attention_bwd_impls import BackwardInputs
from sdx_kernels.ops.attention_names import Op, allowed_by, backward_by

__all__ = [
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
]


def _no_dropout(p: float) -> None:
    if p != 0.0:
        raise NotImplementedError("the forms without autograd take no dropout: pass p=0.0")


def memory_efficient_attention_partial(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Op = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to some of the keys, for `merge_attentions`; both results are differentiable.

    Returns:
        The output, and `[B, H, Mq]` fp32 (fp64 for fp64), the rows' natural log-sum-exp; −inf for
        a row with nothing to attend.

    Raises:
        NotImplementedError: p is not 0.
    """
    _no_dropout(p)
    only = allowed_by(op)
    explicit = only is not None
    inputs = attention_inputs(
        query, key, value, attn_bias, p, scale, output_dtype, lse=True, explicit=explicit
    )
    out, lse, choice = run(inputs, only, backward_by(op, only))
    if lse is None:
        raise InvalidInputs(f"`{choice.name}` does not return the log-sum-exp")
    return out, lse


def memory_efficient_attention_forward_requires_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Op = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward without autograd that also returns the rows' log-sum-exp, for a backward by hand.

    Returns:
        The output, and `[B, H, Mq]` fp32 as `memory_efficient_attention_partial` returns it.

    Raises:
        NotImplementedError: p is not 0.
    """
    with torch.no_grad():
        return memory_efficient_attention_partial(
            query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype
        )


def memory_efficient_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Op = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`memory_efficient_attention` without autograd.

    Raises:
        NotImplementedError: p is not 0.
    """
    _no_dropout(p)
    with torch.no_grad():
        return memory_efficient_attention(
            query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype
        )


def memory_efficient_attention_backward(
    grad: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Op = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients from what `memory_efficient_attention_forward_requires_grad` returned.

    Args:
        grad: gradient of the output, of its shape.
        output, lse: what the forward returned.
        query, key, value, attn_bias, p, scale: as given to the forward.
        op: None, or the backward's name or class (or a pair whose second part that is).

    Returns:
        Gradients of query, key and value, each in its tensor's shape and dtype; those of a key
        head that was expanded over its group come once, as `[B, Mk, G, 1, K]`.

    Raises:
        NotImplementedError: p is not 0.
        InvalidInputs: grad, output or lse do not belong to these inputs.
    """
    _no_dropout(p)
    with torch.no_grad():
        inputs = attention_inputs(
            query, key, value, attn_bias, p, scale, lse=True, explicit=op is not None
        )
        s = inputs.signature
        if grad.shape != inputs.shape or output.shape != inputs.shape:
            raise InvalidInputs(
                f"grad {tuple(grad.shape)} and output {tuple(output.shape)} must have the "
                f"forward's shape {inputs.shape}"
            )
        if lse.shape != (s.batch, s.heads, s.queries):
            raise InvalidInputs(
                f"lse of shape {tuple(lse.shape)} is not (batch, heads, queries) = "
                f"{(s.batch, s.heads, s.queries)}"
            )
        flat = (s.batch, s.queries, s.heads, s.value_dim)
        named = backward_by(op if isinstance(op, tuple) else (None, op), None)
        dq, dk, dv, _ = library.backward(
            BackwardInputs(inputs, grad.reshape(flat), output.reshape(flat), lse),
            tuple(named.split(",")) if named else None,
        )
    return _like(dq, query), _like(dk, key), _like(dv, value)


def _like(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A BMHK gradient in a tensor's own layout and dtype."""
    if gradient.numel() == tensor.numel():
        return gradient.reshape(tensor.shape).to(tensor.dtype)
    # one key head a group was read for all its query heads: the sum over these is its gradient
    return gradient.unsqueeze(3).to(tensor.dtype)


def merge_attentions(
    attn_split: torch.Tensor | Sequence[torch.Tensor],
    lse_split: torch.Tensor | Sequence[torch.Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Joins attention over disjoint sets of keys into attention over all of them.

    out = Σᵢ exp(lseᵢ − lse) · outᵢ with lse = log Σᵢ exp(lseᵢ), in fp32; differentiable.

    Args:
        attn_split: S outputs `[B, M, H, Kv]` (or `[B, M, G, H, Kv]`), or one tensor `[S, …]`.
        lse_split: S log-sum-exps `[B, H, M]` (or `[B, G, H, M]`), or one tensor `[S, …]`.
        write_lse: whether the joined log-sum-exp is wanted.
        output_dtype: of the result. Default: the parts'.

    Returns:
        The joined output in the parts' layout, and its log-sum-exp or None. A row that no part
        attends anything in is 0 and −inf.

    Raises:
        InvalidInputs: no parts, or parts of different shapes.
    """
    outs, lses = list(attn_split), list(lse_split)
    if not outs or len(outs) != len(lses):
        raise InvalidInputs(f"{len(outs)} outputs and {len(lses)} log-sum-exps cannot be merged")
    if any(o.shape != outs[0].shape for o in outs) or any(e.shape != lses[0].shape for e in lses):
        raise InvalidInputs("all parts must have the same shape")
    if lses[0].shape != (outs[0].shape[0], *outs[0].shape[2:-1], outs[0].shape[1]):
        raise InvalidInputs(
            f"log-sum-exps of shape {tuple(lses[0].shape)} do not belong to outputs of shape "
            f"{tuple(outs[0].shape)}"
        )
    stacked = torch.stack(lses).float() if lses[0].dtype != torch.float64 else torch.stack(lses)
    top = stacked.detach().amax(0)
    nothing = top == -torch.inf
    # −inf − −inf is NaN, in torch.logsumexp's gradient too: a row of nothing sums exp(−inf) = 0
    top = torch.where(nothing, 0.0, top)
    weights = torch.exp(stacked - top)
    sums = torch.where(nothing, 1.0, weights.sum(0))
    whole = torch.where(nothing, -torch.inf, top + torch.log(sums))
    # part by part: stacking the outputs would hold them all in fp32 at once
    total: torch.Tensor | None = None
    for out, weight in zip(outs, weights / sums, strict=True):
        part = out.to(weight.dtype) * weight.movedim(-1, 1).unsqueeze(-1)
        total = part if total is None else total + part
    assert total is not None
    return total.to(output_dtype or outs[0].dtype), whole if write_lse else None
