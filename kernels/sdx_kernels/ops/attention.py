"""Attention for callers: xFormers' signature and layouts, selection, autograd.

It knows how to choose and to differentiate; implementations are in `attention_impls`.
"""

import contextlib
import os
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sdx_kernels.bias import AttentionBias
from sdx_kernels.checks import AttentionInputs, attention_inputs
from sdx_kernels.errors import InvalidInputs, LaunchRefused
from sdx_kernels.ops.attention_impls import OPERATOR, TORCH_NAMES
from sdx_kernels.ops.attention_memo import forget, plain_key, recall, remember
from sdx_kernels.reference.attention_chunks import attention_backward
from sdx_kernels.registry import Choice, Impl, launches

__all__ = [
    "allowed_by",
    "attend",
    "choose",
    "explain",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]

#: None or "auto", "torch", an implementation's name, or an xFormers operator class or pair
Op = str | type | tuple[type | None, type | None] | None
Bias = torch.Tensor | AttentionBias | None

#: xFormers' forward operators by their NAME: the torch kernel that each one is
_XFORMERS_NAMES = {
    "cutlassF": "sdpa-efficient",
    "cutlassF-pt": "sdpa-efficient",
    "fa2F": "sdpa-flash",
    "fa2F-pt": "sdpa-flash",
    "flshattF": "sdpa-flash",
}


def _switched_off() -> bool:
    return os.environ.get("SDX_DISABLE", "") not in ("", "0")


def allowed_by(op: Op) -> tuple[str, ...] | None:
    """The implementations that `op` allows; None = all automatic ones.

    Raises:
        InvalidInputs: `op` is nothing that names an implementation.
    """
    if isinstance(op, tuple):
        op = op[0]
    if op is None or op == "auto":
        # the off switch that reaches every model without touching a script
        return TORCH_NAMES if _switched_off() else None
    if op == "torch":
        return TORCH_NAMES
    if not isinstance(op, (str, type)):
        raise InvalidInputs(
            f"op={op!r}: pass None, the name of an implementation or an operator class"
        )
    name = op if isinstance(op, str) else str(getattr(op, "NAME", op.__name__))
    name = _XFORMERS_NAMES.get(name, name)
    OPERATOR.get(name)
    return (name,)


class _Recomputed(torch.autograd.Function):
    """Any implementation forward; backward recomputes through the reference in fp32.

    Written without atomics and in a fixed order, so gradients repeat bit for bit.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        inputs: AttentionInputs,
        impl: Impl,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, bias)
        ctx.scale, ctx.structure, ctx.scores = inputs.scale, inputs.structure, inputs.scores_shape
        out: torch.Tensor = impl.run(inputs)[0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, bias = ctx.saved_tensors
        allowed = None
        if ctx.structure is not None:
            allowed = ctx.structure.allowed(ctx.scores, query.device)
            allowed = allowed[(None,) * (4 - allowed.dim())]
        grads = attention_backward(
            grad,
            query,
            key,
            value,
            scale=ctx.scale,
            bias=bias,
            bias_grad=ctx.needs_input_grad[3],
            allowed=allowed,
        )
        return *grads, None, None


def _run(impl: Impl, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    s = inputs.signature
    if s.grad and not impl.differentiable and s.dropout == 0.0:
        out = _Recomputed.apply(inputs.query, inputs.key, inputs.value, inputs.bias, inputs, impl)
        return out, None
    result: tuple[torch.Tensor, torch.Tensor | None] = impl.run(inputs)
    return result


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    # dtypes are settled by then; autocast would round the reference's fp32 products again
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _dispatch(
    inputs: AttentionInputs, only: tuple[str, ...] | None
) -> tuple[torch.Tensor, torch.Tensor | None, Choice]:
    choice = OPERATOR.require(inputs, only)
    refused: dict[str, tuple[str, ...]] = {}
    with _without_autocast(inputs.query.device.type):
        while True:
            try:
                out, lse = _run(OPERATOR.get(choice.name), inputs)
            except LaunchRefused as refusal:
                refused[choice.name] = (str(refusal),)
                names = only or tuple(i.name for i in OPERATOR.ordered() if i.priority >= 0)
                rest = tuple(name for name in names if name not in refused)
                if not rest:
                    raise
                choice = OPERATOR.require(inputs, rest)
            else:
                break
    launches[choice.name] += 1
    if refused:
        choice = Choice(choice.name, {**choice.reasons, **refused})
    return out.reshape(inputs.shape), lse, choice


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Op = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, Choice]:
    """`memory_efficient_attention` that also tells which implementation ran and why.

    Returns:
        The output, and a `Choice` whose `name` ran and whose `reasons` say why no other did.
    """
    plain = attn_bias is None and p == 0.0 and output_dtype is None
    known = plain_key(query, key, value, op) if plain else None
    if known is not None and (hit := recall(known, query)) is not None:
        try:
            return hit(query, key, value, scale), hit.choice
        except LaunchRefused:
            forget(known)
    only = allowed_by(op)
    inputs = attention_inputs(
        query, key, value, attn_bias, p, scale, output_dtype, explicit=only is not None
    )
    out, _, choice = _dispatch(inputs, only)
    # a call whose tensors had to be converted takes the long way each time
    if known is not None and inputs.query is query and inputs.key is key and inputs.value is value:
        remember(known, inputs.signature, OPERATOR.get(choice.name), choice)
    return out, choice


def memory_efficient_attention(
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
    """Exact attention, softmax(scale · query · keyᵀ + attn_bias) · value, without the score matrix.

    Equivalent PyTorch, which uses another layout (B, H, M, K):

        >>> import torch
        >>> from sdx_kernels import memory_efficient_attention
        >>> q, k, v = (torch.randn(2, 50, 12, 4) for _ in range(3))
        >>> ours = memory_efficient_attention(q, k, v)
        >>> theirs = torch.nn.functional.scaled_dot_product_attention(
        ...     q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        ... ).transpose(1, 2)
        >>> bool((ours - theirs).abs().max() < 1e-5)
        True

    Args:
        query: `[B, Mq, H, K]` = [batch, seq, heads, dim]; or `[B, Mq, K]` (one head); or
            `[B, Mq, G, H, K]`, G groups of H query heads. Any strides; never written.
        key: `[B, Mk, H, K]` (or like the query; `[B, Mk, G, 1, K]` shares a key head in a group).
        value: `[B, Mk, H, Kv]`; Kv may differ from K.
        attn_bias (Optional): float tensor added to the scaled scores, bool tensor with True =
            attend (both broadcast to `[B, H, Mq, Mk]`, any length and alignment), or a class of
            `sdx_kernels.bias`. A row that may attend to nothing gives exactly 0. NaN in a key that
            a tensor masks reaches the output; keys that a class excludes are never read.
        p: dropout probability. Default: 0.0.
        scale (Optional): factor of the scores (not of the bias). Default: K ** -0.5.
        op (Optional): None or "auto" picks by itself; "torch" allows torch's kernels only; or one
            of "triton", "sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math",
            "reference".
        output_dtype (Optional): dtype of the result. Default: autocast's dtype inside autocast,
            else the promotion of the three inputs' dtypes.

    Returns:
        `[B, Mq, H, Kv]` (or in the query's layout). Differentiable in query, key, value and a
        tensor bias; equal inputs give equal bits.

    Raises:
        InvalidInputs: (a ValueError) shapes, dtypes or devices that cannot work, or an `op` that
            cannot run them.
        UnsupportedInputs: (a NotImplementedError) no implementation takes the inputs.
    """
    return attend(query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype)[0]


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
    """Forward without autograd that also returns the rows' log-sum-exp.

    Returns:
        The output, and `[B, H, Mq]` fp32, natural logarithm; −inf for a row with nothing to attend.

    Raises:
        NotImplementedError: p is not 0.
    """
    if p != 0.0:
        raise NotImplementedError("the forms without autograd take no dropout: pass p=0.0")
    only = allowed_by(op)
    with torch.no_grad():
        inputs = attention_inputs(
            query,
            key,
            value,
            attn_bias,
            p,
            scale,
            output_dtype,
            lse=True,
            explicit=only is not None,
        )
        out, lse, choice = _dispatch(inputs, only)
    if lse is None:
        raise InvalidInputs(f"`{choice.name}` does not return the log-sum-exp")
    return out, lse


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
    if p != 0.0:
        raise NotImplementedError("the forms without autograd take no dropout: pass p=0.0")
    with torch.no_grad():
        return memory_efficient_attention(
            query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype
        )


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Op = None,
) -> Choice:
    """Which implementation `attend` would run, without running it; tensors may be on `meta`."""
    only = allowed_by(op)
    inputs = attention_inputs(query, key, value, attn_bias, p, scale, explicit=only is not None)
    return OPERATOR.require(inputs, only)


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
) -> dict[str, list[str]]:
    """Every implementation's reasons for refusing these inputs; an empty list = it would work."""
    return OPERATOR.explain(attention_inputs(query, key, value, attn_bias, p, scale).signature)
