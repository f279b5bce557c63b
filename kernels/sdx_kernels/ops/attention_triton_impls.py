"""Our kernels as implementations: the portable one, and those for one kind of shape each.

The latter run when named, and where the table of measured times in `tuning.attention_order` says
that they are the fastest; nothing is timed at run time.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from sdx_kernels.checks import AttentionInputs, Signature
from sdx_kernels.ops.attention_reasons import HALF, OLDEST, descriptor_reasons, triton_reasons
from sdx_kernels.registry import TOLERANCE, Again, Impl
from sdx_kernels.tuning.attention import (
    MAX_AUTOMATIC_FP32_DIM,
    MAX_HEAD_DIM,
    AttentionConfig,
    ladder_for,
)
from sdx_kernels.tuning.attention_short import (
    MAX_SHORT_HEAD_DIM,
    MAX_SHORT_KEYS,
    ShortConfig,
    ladder_for_short,
)
from sdx_kernels.tuning.attention_tma import MAX_TMA_HEAD_DIM, TmaConfig, ladder_for_tma
from sdx_kernels.tuning.attention_wide import (
    MAX_WIDE_DIM,
    WideConfig,
    WideKind,
    WideOnePassConfig,
    wide_ladder_for,
)

__all__ = [
    "BY_NAME",
    "DESCRIPTORS",
    "TRITON_IMPLEMENTATIONS",
    "no_ladder",
    "structure_reasons",
    "unit_stride",
    "wide_kind",
    "width_reason",
]

#: priority of kernels that run when named or where a table of measured times prefers them
BY_NAME = -1

Result = tuple[torch.Tensor, torch.Tensor | None]

#: gets what does a launch again
Bind = Callable[[Again], None]

#: the first cards that load through tensor descriptors; interpreted launches take their tiles
DESCRIPTORS = (9, 0)


def width_reason(s: Signature, limit: int) -> list[str]:
    """Why head dims are refused; empty when they are not."""
    if max(s.head_dim, s.value_dim) <= limit:
        return []
    return [f"max(query.shape[-1], value.shape[-1]) > {limit}"]


def _triton_reasons(s: Signature) -> list[str]:
    reasons = triton_reasons(s) + width_reason(s, MAX_HEAD_DIM)
    width = max(s.head_dim, s.value_dim)
    if not reasons and not _ladder(s):
        reasons.append(no_ladder(s))
    if s.dtype == torch.float32 and width > MAX_AUTOMATIC_FP32_DIM and not s.explicit:
        reasons.append(
            f"float32 with max(query.shape[-1], value.shape[-1]) > {MAX_AUTOMATIC_FP32_DIM} spills "
            f"registers: op='triton' asks for it all the same"
        )
    if s.dropout == 1.0:
        reasons.append("dropout = 1.0")
    return reasons


@functools.lru_cache(maxsize=1024)
def _ladder(s: Signature) -> tuple[AttentionConfig, ...]:
    capability = s.target.capability or OLDEST
    limit = s.target.shared_memory_bytes or None
    return ladder_for(
        capability,
        s.head_dim,
        s.value_dim,
        s.dtype,
        s.keys,
        s.bias != "none",
        bool(s.band),
        limit,
        packed=s.packed,
        key_mask=s.key_mask,
        dropout=s.dropout > 0.0,
    )


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a kernel may read it: dense in its last dim, with the values of its memory."""
    # a lazily negated view (the imaginary part of a conjugate) holds the wrong sign in memory
    tensor = tensor.resolve_neg()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _shared(inputs: AttentionInputs) -> dict[str, Any]:
    """What every launcher of a forward kernel takes."""
    return {
        "query": unit_stride(inputs.query),
        "key": unit_stride(inputs.key),
        "value": unit_stride(inputs.value),
        "scale": inputs.scale,
        "output_dtype": inputs.output_dtype,
        "with_lse": inputs.signature.lse,
    }


def _run_triton(inputs: AttentionInputs, bind: Bind | None = None) -> Result:
    from sdx_kernels._triton.attention_launchers import launch_attention_fwd

    return launch_attention_fwd(
        **_shared(inputs),
        bias=None if inputs.bias is None else inputs.bias.resolve_neg(),
        key_mask=inputs.key_mask,
        band=inputs.band,
        packed=inputs.packed,
        dropout=inputs.dropout,
        ladder=_ladder(inputs.signature),
        bind=bind,
    )


def structure_reasons(s: Signature, *, key_mask: bool) -> list[str]:
    """Why masks and dropout are refused; `key_mask`: whether some keys may be missing."""
    reasons = []
    if s.band or s.packed or s.foreign or (s.key_mask and not key_mask):
        reasons.append(f"attn_bias type is {s.structure}")
    if s.dropout > 0.0:
        reasons.append("dropout > 0.0")
    return reasons


def no_ladder(s: Signature) -> str:
    """The reason where no tile fits."""
    return f"no tile fits the {s.target.shared_memory_bytes} bytes of shared memory"


@functools.lru_cache(maxsize=1024)
def _short_ladder(s: Signature) -> tuple[ShortConfig, ...]:
    return ladder_for_short(
        s.target.capability or DESCRIPTORS,
        s.head_dim,
        s.value_dim,
        s.dtype,
        s.keys,
        s.bias != "none",
        s.target.shared_memory_bytes or None,
        queries=s.queries,
    )


def _short_reasons(s: Signature) -> list[str]:
    reasons = triton_reasons(s, HALF) + width_reason(s, MAX_SHORT_HEAD_DIM)
    reasons += structure_reasons(s, key_mask=True)
    if s.keys > MAX_SHORT_KEYS:
        reasons.append(f"key.shape[1] > {MAX_SHORT_KEYS}")
    if not reasons and not _short_ladder(s):
        reasons.append(no_ladder(s))
    return reasons


def _run_short(inputs: AttentionInputs, bind: Bind | None = None) -> Result:
    from sdx_kernels._triton.attention_launchers import launch_attention_short

    return launch_attention_short(
        **_shared(inputs),
        bias=None if inputs.bias is None else inputs.bias.resolve_neg(),
        key_mask=inputs.key_mask,
        ladder=_short_ladder(inputs.signature),
        bind=bind,
    )


@functools.lru_cache(maxsize=1024)
def _tma_ladder(s: Signature) -> tuple[TmaConfig, ...]:
    return ladder_for_tma(
        s.target.capability or DESCRIPTORS,
        s.head_dim,
        s.value_dim,
        s.dtype,
        s.keys,
        s.target.shared_memory_bytes or None,
    )


def _tma_reasons(s: Signature) -> list[str]:
    reasons = triton_reasons(s, HALF, DESCRIPTORS) + width_reason(s, MAX_TMA_HEAD_DIM)
    reasons += descriptor_reasons() + structure_reasons(s, key_mask=False)
    if s.bias != "none":
        reasons.append("attn_bias is a tensor")
    if s.head_dim % 8 or s.value_dim % 8:
        reasons.append("head dims are not multiples of 8")
    if not reasons and not _tma_ladder(s):
        reasons.append(no_ladder(s))
    return reasons


def _run_tma(inputs: AttentionInputs, bind: Bind | None = None) -> Result:
    from sdx_kernels._triton.attention_launchers import launch_attention_tma

    return launch_attention_tma(
        **_shared(inputs),
        ladder=_tma_ladder(inputs.signature),
        bind=bind,
    )


def wide_kind(s: Signature) -> WideKind:
    """What the wide kernels are compiled for."""
    # a band of any kind is compiled with the bounds it has; a causal one has only the right
    return WideKind(
        s.head_dim,
        s.value_dim,
        s.dtype,
        s.bias_dtype,
        left=s.band == "local",
        right=bool(s.band),
        key_mask=s.key_mask,
        bias_grad=s.bias_grad,
    )


@functools.lru_cache(maxsize=1024)
def _wide_ladder(s: Signature) -> tuple[WideConfig | WideOnePassConfig, ...]:
    limit = s.target.shared_memory_bytes or None
    return wide_ladder_for(s.target.capability or OLDEST, wide_kind(s), limit)


def _wide_reasons(s: Signature) -> list[str]:
    reasons = triton_reasons(s) + width_reason(s, MAX_WIDE_DIM)
    if s.packed:
        reasons.append(f"attn_bias type is {s.structure}")
    if s.dropout > 0.0:
        reasons.append("dropout > 0.0")
    if not reasons and not _wide_ladder(s):
        reasons.append(no_ladder(s))
    return reasons


def _run_wide(inputs: AttentionInputs) -> Result:
    from sdx_kernels._triton.attention_launchers import launch_attention_wide_fwd

    return launch_attention_wide_fwd(
        **_shared(inputs),
        bias=None if inputs.bias is None else inputs.bias.resolve_neg(),
        key_mask=inputs.key_mask,
        band=inputs.band,
        ladder=_wide_ladder(inputs.signature),
    )


def _bound(
    run: Callable[[AttentionInputs, Bind], Result], inputs: AttentionInputs
) -> tuple[torch.Tensor, Again | None]:
    """The output, and what does it again where no tensor had to be converted on the way."""
    found: list[Again] = []
    out = run(inputs, found.append)[0]
    given = (inputs.query, inputs.key, inputs.value)
    as_given = not any(t.is_neg() or t.stride(-1) != 1 for t in given)
    return out, found[0] if found and as_given else None


TRITON_IMPLEMENTATIONS = (
    Impl(
        name="triton",
        priority=30,
        reasons=_triton_reasons,
        run=_run_triton,
        bind=functools.partial(_bound, _run_triton),
        tolerance=TOLERANCE,
        closest=(
            f"float16, bfloat16 or float32 with head dims up to {MAX_HEAD_DIM} on an "
            f"NVIDIA GPU of capability 8.0 or newer"
        ),
    ),
    Impl(
        name="triton-wide",
        priority=BY_NAME,
        reasons=_wide_reasons,
        run=_run_wide,
        tolerance=TOLERANCE,
        closest=(
            f"head dims up to {MAX_WIDE_DIM}, no packed sequences, p=0.0, on an NVIDIA GPU of "
            f"capability 8.0 or newer"
        ),
    ),
    Impl(
        name="triton-short",
        priority=BY_NAME,
        reasons=_short_reasons,
        run=_run_short,
        bind=functools.partial(_bound, _run_short),
        tolerance=TOLERANCE,
        closest=f"at most {MAX_SHORT_KEYS} keys, head dims up to {MAX_SHORT_HEAD_DIM}, 16 bits",
    ),
    Impl(
        name="triton-tma",
        priority=BY_NAME,
        reasons=_tma_reasons,
        run=_run_tma,
        bind=functools.partial(_bound, _run_tma),
        tolerance=TOLERANCE,
        closest=(
            f"no mask, head dims up to {MAX_TMA_HEAD_DIM} in multiples of 8, 16 bits, on an "
            f"NVIDIA GPU of capability 9.0 or newer"
        ),
    ),
)
