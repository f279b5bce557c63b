"""Runs the gradients through tensor descriptors: row facts, marks, dk and dv, dq.

It knows tensors and their strides; it must not choose tiles or judge inputs.
"""

import contextlib
import functools
from typing import Any

import torch

from sdx_kernels import target
from sdx_kernels._triton.attention_bwd_launch import WIDE, constants_for, grid_for
from sdx_kernels._triton.attention_bwd_rows import rows_kernel
from sdx_kernels._triton.attention_launch import LOG2E, Unaligned, reach, run_ladder
from sdx_kernels._triton.attention_tma import _descriptor, describable
from sdx_kernels._triton.attention_tma_bwd import (
    keys_tma_kernel,
    marks_kernel,
    queries_tma_kernel,
)
from sdx_kernels._triton.descriptors import TensorDescriptor
from sdx_kernels.tuning.attention import AttentionConfig, padded
from sdx_kernels.tuning.attention_tma_bwd import TmaBackwardLadder, TmaGradConfig

__all__ = ["MARKS", "constants_for_tma_bwd", "launch_attention_tma_bwd"]

#: the compile-time arguments of marks_kernel that no input decides
MARKS = {"BLOCK": 1024, "LOG2E": LOG2E}


def constants_for_tma_bwd(
    config: TmaGradConfig, *, head_dim: int, value_dim: int
) -> dict[str, object]:
    """Compile-time arguments of both kernels; also what the ahead-of-time check compiles."""
    return {
        "BLOCK_D": padded(head_dim),
        "BLOCK_DV": padded(value_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "LOG2E": LOG2E,
    }


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that a tensor map can hold: a gradient may come in any strides."""
    return tensor if describable(tensor) else tensor.contiguous()


def _of_rows(facts: torch.Tensor, queries: int, rows: int) -> TensorDescriptor:
    """fp32 `[4, B · H, at least queries]` in blocks of `rows`; beyond `queries` it reads as 0."""
    return TensorDescriptor(
        facts, [*facts.shape[:2], queries], [*facts.stride()[:2], 1], [1, 1, rows]
    )


def launch_attention_tma_bwd(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: None = None,
    *,
    scale: float,
    lse_grad: torch.Tensor | None = None,
    ladder: TmaBackwardLadder,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
    """Gradients of unmasked attention from its output and log-sum-exp.

    Beside its results it allocates 24 bytes a row of scores.

    Args:
        grad: gradient of the output, `[B, Mq, H, Kv]`; any strides, copied where a tensor map
            cannot hold it or its dtype is not the query's.
        query: `[B, Mq, H, K]`. key: `[B, Mk, Hk, K]`. value: `[B, Mk, Hk, Kv]`; one 16-bit dtype,
            each `describable`.
        out: `[B, Mq, H, Kv]`, what forward gave.
        lse: fp32 `[B, H, Mq]`, natural logarithm.
        bias: None, as launchers of other kernels take one.
        scale: factor of the scores.
        lse_grad: `[B, H, Mq]`, gradient of the log-sum-exp; None = zero.
        ladder: launch configurations of each kernel.

    Returns:
        Gradients of query, key and value, contiguous, in their dtype, and None for the bias. All
        sums are fp32 and in a fixed order.

    Raises:
        LaunchRefused: strides or addresses are not multiples of 16 bytes, or the driver has too
            few resources for every configuration of a kernel.
    """
    batch, queries, heads, head_dim = query.shape
    keys, key_heads, value_dim = key.shape[1], key.shape[2], value.shape[3]
    device = query.device
    if not all(describable(tensor) for tensor in (query, key, value)):
        # before anything is launched: what follows would be done in vain
        raise Unaligned
    # reached for the row facts, which go by pointers
    query, key, value = reach(query, 1), reach(key, 1), reach(value, 1)
    grad, out = _dense(reach(grad.to(query.dtype), 1)), _dense(reach(out, 1))
    dq, dk, dv = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for tensor in (query, key, value)
    )
    lse = lse.contiguous()
    delta, tail = torch.empty((2, *lse.shape), dtype=torch.float32, device=device)
    # rows of whole 16 bytes
    line = -(-queries // 4) * 4
    marked = torch.empty((4, batch * heads, line), dtype=torch.float32, device=device)
    wide = torch.empty((batch * heads,), dtype=torch.int32, device=device)
    kind = {"head_dim": head_dim, "value_dim": value_dim, "dtype": query.dtype}
    card = target.of(device)
    lengths = (heads, heads // key_heads, queries, keys)

    def facts(config: AttentionConfig) -> None:
        kernel: Any = rows_kernel
        kernel[grid_for(batch * heads, queries, config.block_m)](
            *(query, key, value, grad, lse, delta, tail, query, query, lse, lse, lse),
            *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3]),
            *((0,) * 6),
            *(*lengths, queries, keys, 0, 0, 0, scale, 1.0, 0),
            out,
            *out.stride()[:3],
            **constants_for(config, **kind),  # type: ignore[arg-type]
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )

    def launch(name: str, config: TmaGradConfig) -> None:
        of_queries = tuple(_descriptor(tensor, config.block_m) for tensor in (query, grad))
        of_keys = tuple(_descriptor(tensor, config.block_n) for tensor in (key, value))
        kernel: Any
        facts_of_rows: tuple[torch.Tensor, ...] = ()
        if name == "keys":
            kernel, grid = keys_tma_kernel, grid_for(batch * key_heads, keys, config.block_n)
            results = (
                *(_descriptor(tensor, config.block_n) for tensor in (dk, dv)),
                _of_rows(marked, queries, config.block_m),
            )
        else:
            kernel, grid = queries_tma_kernel, grid_for(batch * heads, queries, config.block_m)
            results = (_descriptor(dq, config.block_m),)
            facts_of_rows = (lse, delta, tail)
        kernel[grid](
            *(of_queries[0], *of_keys, of_queries[1], *results),
            *(*facts_of_rows, wide, scale, *lengths),
            **constants_for_tma_bwd(config, head_dim=head_dim, value_dim=value_dim),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            maxnreg=config.registers or None,
            enable_fp_fusion=True,
        )

    with torch.cuda.device(device) if query.is_cuda else contextlib.nullcontext():
        run_ladder(("rows", card, False, *kind.values(), ladder.rows), ladder.rows, facts)
        if lse_grad is not None:
            # dS = P · (dP − delta + dlse)
            delta -= lse_grad
        marks: Any = marks_kernel
        marks[(batch * heads, 1, 1)](
            *(lse, delta, tail, marked, wide, queries, line, marked.stride(0)),
            WIDE=WIDE[query.dtype],
            **MARKS,
            num_warps=4,
        )
        for name in ("keys", "queries"):
            steps: tuple[TmaGradConfig, ...] = getattr(ladder, name)
            step_key = ("tma-bwd", name, card, *kind.values(), steps)
            run_ladder(step_key, steps, functools.partial(launch, name))
    return dq, dk, dv, None
