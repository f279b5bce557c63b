"""Attention for callers: xFormers' signature and layouts, selection, autograd.

It knows how to choose and to differentiate; implementations are in `attention_impls`.
"""

from dataclasses import replace

import torch

from sdx_kernels.bias import AttentionBias
from sdx_kernels.checks import AttentionInputs, Dropout, attention_inputs
from sdx_kernels.errors import LaunchRefused
from sdx_kernels.ops import attention_library as library
from sdx_kernels.ops.attention_impls import OPERATOR
from sdx_kernels.ops.attention_memo import forget, plain_key, recall, remember
from sdx_kernels.ops.attention_names import Op, allowed_by, backward_by
from sdx_kernels.registry import Choice, Impl, launches

__all__ = ["Bias", "attend", "choose", "explain", "memory_efficient_attention", "run"]

Bias = torch.Tensor | AttentionBias | None


def _draw_seed(device: torch.device) -> torch.Tensor:
    """Drawn on the device from torch's generator: `manual_seed`, checkpointing and CUDA graphs
    treat it as they treat torch's own dropout."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def _run(
    impl: Impl, inputs: AttentionInputs, backward_by: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    s = inputs.signature
    if not impl.differentiable:
        if s.dropout > 0.0:
            inputs = replace(inputs, dropout=Dropout(s.dropout, _draw_seed(inputs.query.device)))
        if s.grad or torch.compiler.is_compiling():
            return library.forward(inputs, impl.name, backward_by)
    result: tuple[torch.Tensor, torch.Tensor | None] = impl.run(inputs)
    return result


def run(
    inputs: AttentionInputs, only: tuple[str, ...] | None, backward_by: str = ""
) -> tuple[torch.Tensor, torch.Tensor | None, Choice]:
    """Runs checked inputs by the best implementation that the card can launch.

    Args:
        inputs: from `attention_inputs`.
        only: names that may run; None = all automatic ones.
        backward_by: names for the gradients, parted by commas; "" = automatic.

    Returns:
        The output in the caller's layout, the log-sum-exp where the inputs ask for it, the choice.
    """
    choice = OPERATOR.require(inputs, only)
    refused: dict[str, tuple[str, ...]] = {}
    settled = True
    with library.without_autocast(inputs.query.device.type):
        while True:
            try:
                out, lse = _run(OPERATOR.get(choice.name), inputs, backward_by)
            except LaunchRefused as refusal:
                refused[choice.name] = (str(refusal),)
                settled = settled and not refusal.of_tensors
                names = only or tuple(i.name for i in OPERATOR.ordered() if i.priority >= 0)
                rest = tuple(name for name in names if name not in refused)
                if not rest:
                    raise
                choice = OPERATOR.require(inputs, rest)
            else:
                break
    # a traced graph would count once, and be traced again because the count has changed
    if not torch.compiler.is_compiling():
        launches[choice.name] += 1
    if refused:
        choice = Choice(choice.name, {**choice.reasons, **refused}, settled)
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
    plain = p == 0.0 and output_dtype is None
    known = plain_key(query, key, value, op, attn_bias) if plain else None
    if known is not None and (hit := recall(known, query)) is not None:
        try:
            return hit(query, key, value, scale, attn_bias), hit.choice
        except LaunchRefused as refusal:
            if not refusal.of_tensors:
                forget(known)
    only = allowed_by(op)
    inputs = attention_inputs(
        query, key, value, attn_bias, p, scale, output_dtype, explicit=only is not None
    )
    out, _, choice = run(inputs, only, backward_by(op, only))
    # a call whose tensors had to be converted takes the long way each time
    as_given = inputs.query is query and inputs.key is key and inputs.value is value
    if known is not None and as_given and choice.settled:
        remember(known, inputs.signature, OPERATOR.get(choice.name), choice, inputs.band)
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
