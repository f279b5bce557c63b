"""Runs the backward attention kernels: row facts, dk and dv, dq, and a shared bias's gradient.

It knows tensors and their strides; it must not choose tiles or judge inputs.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from sdx_kernels import target
from sdx_kernels._triton.attention_bwd import keys_kernel, queries_kernel
from sdx_kernels._triton.attention_bwd_rows import bias_kernel, rows_kernel
from sdx_kernels._triton.attention_launch import (
    LOG2E,
    band_bounds,
    dropout_draw,
    reach,
    run_ladder,
)
from sdx_kernels.bias import Band, Packed
from sdx_kernels.checks import Dropout
from sdx_kernels.tuning.attention import AttentionConfig, padded
from sdx_kernels.tuning.attention_bwd import BackwardLadder

__all__ = ["KERNEL_OF", "constants_for", "grid_for", "launch_attention_bwd"]

Grid = tuple[int, int, int]

#: by the name that `tuning` gives them
KERNEL_OF: dict[str, Any] = {
    "rows": rows_kernel,
    "keys": keys_kernel,
    "queries": queries_kernel,
    "bias": bias_kernel,
}

#: |lse| from which a row's sum is computed again: fp32 holds an LSE of 1024 to 6e-5, which is the
#: relative error of all its weights. For fp32 inputs an LSE of 4 is too much already: dv has 4.4
#: times the error of torch's MATH backward (1 x 9 x 35, D 40), and 2.7 times with all sums repeated
WIDE = {torch.float32: 0.0, torch.float16: 1024.0, torch.bfloat16: 1024.0}


def grid_for(pairs: int, length: int, block: int) -> Grid:
    """Launch grid: everything on x (limit 2³¹ − 1), since y and z end at 65,535."""
    return pairs * -(-length // block), 1, 1


def constants_for(
    config: AttentionConfig,
    *,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    bias: torch.dtype | None = None,
    bias_sums: bool = False,
    left: bool = False,
    right: bool = False,
    key_mask: bool = False,
    packed: bool = False,
    dropout: bool = False,
) -> dict[str, object]:
    """The compile-time arguments of each kernel; also what the ahead-of-time check compiles.

    Args:
        config: one step of the kernel's ladder.
        head_dim: K. value_dim: Kv.
        dtype: of query, key, value and gradient.
        bias: dtype of the dense bias, or None.
        bias_sums: whether keys_kernel writes the sums of a bias that queries share.
        left, right: which bounds the band has.
        key_mask, packed, dropout: which of these there are.
    """
    return {
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_DV": padded(value_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BIAS": 0 if bias is None else 2 if bias == torch.bool else 1,
        "BIAS_SUMS": bias_sums,
        "LEFT": left,
        "RIGHT": right,
        "KEY_MASK": key_mask,
        "PACKED": packed,
        "DROPOUT": dropout,
        "PRECISION": "tf32x3",
        "LOG2E": LOG2E,
        "WIDE": WIDE[dtype],
    }


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose last dim is contiguous; other dims may have any stride."""
    one = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    return reach(tensor if one else tensor.contiguous(), 1)


def launch_attention_bwd(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
    band: Band | None = None,
    packed: Packed | None = None,
    dropout: Dropout | None = None,
    bias_grad: bool = False,
    lse_grad: torch.Tensor | None = None,
    ladder: BackwardLadder,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of attention from its output and log-sum-exp (Dao et al. 2022, algorithm 4).

    Beside its results it allocates eight bytes a row of scores, and for a bias that is broadcast
    over queries one fp32 `[B, H, Mk]`.

    Args:
        grad: gradient of the output, `[B, Mq, H, Kv]`; any strides, copied only where its last dim
            is not contiguous or its dtype is not the query's.
        query: `[B, Mq, H, K]`. key: `[B, Mk, Hk, K]`. value: `[B, Mk, Hk, Kv]`; one dtype,
            contiguous last dim.
        out: `[B, Mq, H, Kv]`, what forward gave.
        lse: fp32 `[B, H, Mq]`, natural logarithm, −inf where a row attended nothing.
        bias: float or bool, broadcastable to `[B, H, Mq, Mk]`; read through its strides.
        scale: factor of the scores.
        key_mask: bool `[B, Mk]`, True = the key exists.
        band: the keys that each query may attend.
        packed: sequences that a batch of one holds.
        dropout: which weights forward dropped.
        bias_grad: whether to compute the gradient of a float bias.
        lse_grad: `[B, H, Mq]`, gradient of the log-sum-exp; None = zero.
        ladder: launch configurations of each kernel.

    Returns:
        Gradients of query, key and value, contiguous, in their dtype, and of the bias in its own
        dtype and shape, or None. All sums are fp32 and in a fixed order.

    Raises:
        LaunchRefused: the driver has too few resources for every configuration of a kernel.
    """
    batch, queries, heads, head_dim = query.shape
    keys, key_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    dq, dk, dv = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for tensor in (query, key, value)
    )
    scores = (batch, heads, queries, keys)
    items, longest_query, longest_key = batch, queries, keys
    if packed is not None:
        items = packed.query_starts.numel() - 1
        longest_query, longest_key = packed.longest_query, packed.longest_key
    if 0 in (*scores, items, longest_query, longest_key, head_dim, value_dim):
        none = torch.zeros_like(bias) if bias is not None and bias_grad else None
        return dq.zero_(), dk.zero_(), dv.zero_(), none

    dense, dbias, sums = bias, None, None
    own_shape = torch.Size((1, 1, 1, 1))
    if bias is not None:
        dense = bias[(None,) * (4 - bias.dim())]
        own_shape = dense.shape
        if bias_grad and own_shape[3] == 1:
            # a softmax does not see one constant a row
            dbias = torch.zeros_like(bias)
        elif bias_grad and own_shape[2] == 1:
            sums = torch.empty((batch, heads, keys), dtype=torch.float32, device=bias.device)
        elif bias_grad:
            dbias = torch.empty(own_shape, dtype=bias.dtype, device=bias.device)
        dense = reach(dense, 2, 3).expand(scores)
        dense = dense.view(torch.uint8) if dense.dtype == torch.bool else dense

    grad = grad.to(query.dtype)
    grad, out = _unit_stride(grad), _unit_stride(out)
    query, key, value, lse = reach(query, 1), reach(key, 1), reach(value, 1), lse.contiguous()
    facts = torch.empty((2, batch, heads, queries), dtype=torch.float32, device=query.device)
    exists = None if key_mask is None else key_mask.view(torch.uint8)
    threshold, inverse_keep = dropout_draw(dropout)
    arguments = (
        *(query, key, value, grad, lse, facts[0], facts[1]),
        query if dense is None else dense,
        query if exists is None else exists,
        *((lse, lse) if packed is None else (packed.query_starts, packed.key_starts)),
        lse if dropout is None else dropout.seed,
        *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3]),
        *((0, 0, 0, 0) if dense is None else dense.stride()),
        *((0, 0) if exists is None else exists.stride()),
        *(heads, heads // key_heads, longest_query, longest_key, queries, keys),
        *(*band_bounds(band, longest_query + longest_key), scale, inverse_keep, threshold),
    )
    kind: dict[str, Any] = {
        "head_dim": head_dim,
        "value_dim": value_dim,
        "dtype": query.dtype,
        "bias": None if bias is None else bias.dtype,
        "left": band is not None and band.left is not None,
        "right": band is not None and band.right is not None,
        "key_mask": key_mask is not None,
        "packed": packed is not None,
        "dropout": dropout is not None,
    }
    card = target.of(query.device)

    def run(name: str, grid: Callable[[AttentionConfig], Grid], *own: object) -> None:
        steps: tuple[AttentionConfig, ...] = getattr(ladder, name)
        bias_sums = name == "keys" and sums is not None

        def launch(config: AttentionConfig) -> None:
            KERNEL_OF[name][grid(config)](
                *arguments,
                *own,
                **constants_for(config, bias_sums=bias_sums, **kind),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                enable_fp_fusion=True,
            )

        run_ladder((name, card, bias_sums, *kind.values(), steps), steps, launch)

    def per_queries(config: AttentionConfig) -> Grid:
        return grid_for(items * heads, longest_query, config.block_m)

    def per_keys(config: AttentionConfig) -> Grid:
        return grid_for(items * key_heads, longest_key, config.block_n)

    def per_tile(config: AttentionConfig) -> Grid:
        tiles = -(-queries // config.block_m)
        return grid_for(own_shape[0] * own_shape[1] * tiles, keys, config.block_n)

    on_device = torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext()
    with on_device:
        run("rows", per_queries, out, *out.stride()[:3])
        if lse_grad is not None:
            # dS = P · (dP − delta + dlse)
            facts[0] -= lse_grad
        run("keys", per_keys, dk, dv, facts if sums is None else sums)
        run("queries", per_queries, dq)
        if dbias is not None and own_shape[3] > 1:
            run("bias", per_tile, dbias, batch, *own_shape[:2])
    if bias is not None and sums is not None:
        dbias = sums.unsqueeze(2).sum_to_size(own_shape).to(bias.dtype)
    return dq, dk, dv, None if bias is None or dbias is None else dbias.view(bias.shape)
