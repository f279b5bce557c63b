"""The implementations of attention's backward as data; each one repeats bit for bit.

It knows which gradient kernel takes which inputs, and must not know what ran forward.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from sdx_kernels.checks import AttentionInputs, Signature
from sdx_kernels.ops.attention_impls import structure_of
from sdx_kernels.ops.attention_reasons import (
    DTYPES,
    HALF,
    OLDEST,
    descriptor_reasons,
    dtype_reason,
    triton_reasons,
)
from sdx_kernels.ops.attention_triton_impls import (
    BY_NAME,
    DESCRIPTORS,
    no_ladder,
    structure_reasons,
    unit_stride,
    wide_kind,
    width_reason,
)
from sdx_kernels.reference.attention_chunks import attention_backward
from sdx_kernels.registry import Impl, Operator
from sdx_kernels.tuning.attention_bwd import (
    MAX_FP32_DIM,
    MAX_HEAD_DIM,
    BackwardLadder,
    backward_ladder_for,
)
from sdx_kernels.tuning.attention_tma_bwd import (
    MAX_TMA_GRAD_DIM,
    TmaBackwardLadder,
    ladder_for_tma_bwd,
)
from sdx_kernels.tuning.attention_wide import MAX_WIDE_DIM, WideGradConfig, wide_grad_ladder_for

__all__ = ["BACKWARD", "BackwardInputs", "Gradients"]

#: of query, key, value and (None where it is not wanted) the bias
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """What a backward needs: the forward's inputs and results, and the gradients of these.

    Attributes:
        forward: the forward's inputs; `signature.bias_grad` says whether the bias's is wanted.
        grad: `[B, Mq, H, Kv]`, of the output.
        out: `[B, Mq, H, Kv]`. lse: `[B, H, Mq]` fp32 (fp64).
        lse_grad: `[B, H, Mq]`, of the log-sum-exp; None = zero.
    """

    forward: AttentionInputs
    grad: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    lse_grad: torch.Tensor | None = None

    @property
    def signature(self) -> Signature:
        """The forward's."""
        return self.forward.signature

    def describe(self) -> list[str]:
        """One line per argument, for error messages."""
        return self.forward.describe()


def _run_reference(inputs: BackwardInputs) -> Gradients:
    forward = inputs.forward
    return attention_backward(
        inputs.grad,
        forward.query,
        forward.key,
        forward.value,
        scale=forward.scale,
        bias=forward.bias,
        bias_grad=forward.signature.bias_grad,
        lse_grad=inputs.lse_grad,
        structure=structure_of(forward),
    )


def _kernel_arguments(inputs: BackwardInputs) -> dict[str, Any]:
    f = inputs.forward
    return {
        "grad": inputs.grad,
        "query": unit_stride(f.query),
        "key": unit_stride(f.key),
        "value": unit_stride(f.value),
        "out": inputs.out,
        "lse": inputs.lse,
        "bias": None if f.bias is None else f.bias.resolve_neg(),
        "scale": f.scale,
        "key_mask": f.key_mask,
        "band": f.band,
        "packed": f.packed,
        "dropout": f.dropout,
        "bias_grad": f.signature.bias_grad,
        "lse_grad": inputs.lse_grad,
    }


@functools.lru_cache(maxsize=1024)
def _ladder(s: Signature) -> BackwardLadder | None:
    return backward_ladder_for(
        s.target.capability or OLDEST,
        s.head_dim,
        s.value_dim,
        s.dtype,
        biased=s.bias != "none",
        masked=bool(s.band) or s.key_mask or s.packed,
        dropout=s.dropout > 0.0,
        bias_grad=s.bias_grad,
        shared_memory_bytes=s.target.shared_memory_bytes or None,
    )


def _reasons(s: Signature) -> list[str]:
    reasons = triton_reasons(s) + width_reason(s, MAX_HEAD_DIM)
    if s.dropout == 1.0:
        reasons.append("dropout = 1.0")
    if not reasons and _ladder(s) is None:
        reasons.append(f"no tile fits {s.dtype} and head dims {s.head_dim} and {s.value_dim}")
    return reasons


def _run(inputs: BackwardInputs) -> Gradients:
    from sdx_kernels._triton.attention_launchers import launch_attention_bwd

    ladder = _ladder(inputs.signature)
    assert ladder is not None
    return launch_attention_bwd(**_kernel_arguments(inputs), ladder=ladder)


@functools.lru_cache(maxsize=1024)
def _wide_ladder(s: Signature) -> tuple[WideGradConfig, ...]:
    limit = s.target.shared_memory_bytes or None
    return wide_grad_ladder_for(s.target.capability or OLDEST, wide_kind(s), limit)


def _wide_reasons(s: Signature) -> list[str]:
    reasons = triton_reasons(s) + width_reason(s, MAX_WIDE_DIM)
    if s.packed:
        reasons.append(f"attn_bias type is {s.structure}")
    if s.dropout > 0.0:
        reasons.append("dropout > 0.0")
    if not reasons and not _wide_ladder(s):
        reasons.append(f"no tile fits {s.dtype} and head dims {s.head_dim} and {s.value_dim}")
    return reasons


def _run_wide(inputs: BackwardInputs) -> Gradients:
    from sdx_kernels._triton.attention_launchers import launch_attention_wide_bwd

    ladder = _wide_ladder(inputs.signature)
    return launch_attention_wide_bwd(**_kernel_arguments(inputs), ladder=ladder)


@functools.lru_cache(maxsize=1024)
def _tma_ladder(s: Signature) -> TmaBackwardLadder | None:
    return ladder_for_tma_bwd(
        s.target.capability or DESCRIPTORS,
        s.head_dim,
        s.value_dim,
        s.dtype,
        s.target.shared_memory_bytes or None,
    )


def _tma_reasons(s: Signature) -> list[str]:
    reasons = triton_reasons(s, HALF, DESCRIPTORS) + width_reason(s, MAX_TMA_GRAD_DIM)
    reasons += descriptor_reasons() + structure_reasons(s, key_mask=False)
    if s.bias != "none":
        reasons.append("attn_bias is a tensor")
    if s.head_dim % 8 or s.value_dim % 8:
        reasons.append("head dims are not multiples of 8")
    if not reasons and _tma_ladder(s) is None:
        reasons.append(no_ladder(s))
    return reasons


def _run_tma(inputs: BackwardInputs) -> Gradients:
    from sdx_kernels._triton.attention_launchers import launch_attention_tma_bwd

    ladder = _tma_ladder(inputs.signature)
    assert ladder is not None
    f = inputs.forward
    return launch_attention_tma_bwd(
        inputs.grad,
        unit_stride(f.query),
        unit_stride(f.key),
        unit_stride(f.value),
        inputs.out,
        inputs.lse,
        scale=f.scale,
        lse_grad=inputs.lse_grad,
        ladder=ladder,
    )


def _prefer(s: Signature) -> tuple[tuple[str, ...], str]:
    """Descriptors first on the cards that have them; interpreted, they are plain loads and slow."""
    if s.target.capability is None or _tma_reasons(s):
        return (), ""
    return ("triton-tma",), "triton-tma computes the same with tiles through tensor descriptors"


BACKWARD = Operator(
    name="memory_efficient_attention_backward",
    prefer=_prefer,
    implementations=(
        Impl(
            name="triton",
            priority=30,
            reasons=_reasons,
            run=_run,
            closest=(
                f"float16 or bfloat16 with head dims up to {MAX_HEAD_DIM} (float32 up to "
                f"{MAX_FP32_DIM}) on an NVIDIA GPU of capability 8.0 or newer"
            ),
        ),
        Impl(
            name="triton-wide",
            priority=20,
            reasons=_wide_reasons,
            run=_run_wide,
            closest=f"head dims up to {MAX_WIDE_DIM}, no packed sequences, p=0.0",
        ),
        Impl(
            name="triton-tma",
            priority=BY_NAME,
            reasons=_tma_reasons,
            run=_run_tma,
            closest=(
                f"no mask, head dims up to {MAX_TMA_GRAD_DIM} in multiples of 8, 16 bits, on an "
                f"NVIDIA GPU of capability 9.0 or newer"
            ),
        ),
        Impl(
            name="reference",
            priority=10,
            reasons=lambda s: dtype_reason("dtype", s.dtype, DTYPES),
            run=_run_reference,
            closest="float16, bfloat16, float32 or float64 inputs",
        ),
    ),
)
