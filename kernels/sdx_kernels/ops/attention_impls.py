"""The implementations of attention as data: when each refuses, how it runs, how exact it is.

It knows torch's kernels and ours, and must not know how a caller chose between them.
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdx_kernels import target
from sdx_kernels.checks import AttentionInputs, Signature
from sdx_kernels.errors import InvalidInputs
from sdx_kernels.reference.attention_chunks import attention_forward
from sdx_kernels.reference.structures import Structure
from sdx_kernels.registry import TOLERANCE, Impl, Operator
from sdx_kernels.tuning.attention import (
    MAX_AUTOMATIC_FP32_DIM,
    MAX_HEAD_DIM,
    AttentionConfig,
    ladder_for,
    preference,
)

__all__ = ["OPERATOR", "TORCH_NAMES", "age_reason", "dtype_reason", "structure_of"]

Result = tuple[torch.Tensor, torch.Tensor | None]

#: what `op="torch"` may choose from
TORCH_NAMES = ("sdpa", "reference")

_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DTYPES = (*_TRITON_DTYPES, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
#: Triton ≥ 3.3 has no tensor-core path below sm_80: its dots fall back to FMA there
_OLDEST = (8, 0)


def dtype_reason(what: str, dtype: torch.dtype, supported: tuple[torch.dtype, ...]) -> list[str]:
    """Why a dtype is refused; empty when it is supported."""
    if dtype in supported:
        return []
    names = ", ".join(sorted(str(entry) for entry in supported))
    return [f"{what}={dtype} (supported: {{{names}}})"]


def age_reason(s: Signature) -> list[str]:
    """Why an NVIDIA card is too old for 16-bit tensor-core kernels; empty when it is not."""
    capability = s.target.capability
    if capability is None or capability >= _OLDEST:
        return []
    return [
        f"requires device with capability >= {_OLDEST} but your GPU has capability {capability} "
        f"(too old)"
    ]


def _triton_reasons(s: Signature) -> list[str]:
    reasons = []
    interpreted = s.explicit and s.interpreting and s.target.kind == "cpu"
    if s.target.kind != "cuda" and not interpreted:
        reasons.append(f"device={s.target.kind} (supported: {{'cuda'}})")
    if s.interpreting and not s.explicit:
        reasons.append("TRITON_INTERPRET is set, and the interpreter runs only for op='triton'")
    if not target.triton_status()[0]:
        reasons.append(str(target.triton_status()[1]))
    reasons += age_reason(s)
    reasons += dtype_reason("dtype", s.dtype, _TRITON_DTYPES)
    reasons += dtype_reason("output_dtype", s.output_dtype, _TRITON_DTYPES)
    if s.bias_dtype is not None:
        reasons += dtype_reason("attn_bias.dtype", s.bias_dtype, (torch.bool, *_DTYPES))
    if s.interpreting and s.dtype == torch.bfloat16:
        reasons.append("Triton's interpreter multiplies bfloat16 bit patterns, not values")
    width = max(s.head_dim, s.value_dim)
    if width > MAX_HEAD_DIM:
        reasons.append(f"max(query.shape[-1], value.shape[-1]) > {MAX_HEAD_DIM}")
    elif s.dtype in _TRITON_DTYPES and not s.empty and not _ladder(s):
        reasons.append(f"no tile fits the {s.target.shared_memory_bytes} bytes of shared memory")
    if s.dtype == torch.float32 and width > MAX_AUTOMATIC_FP32_DIM and not s.explicit:
        reasons.append(
            f"float32 with max(query.shape[-1], value.shape[-1]) > {MAX_AUTOMATIC_FP32_DIM} spills "
            f"registers: op='triton' asks for it all the same"
        )
    if s.foreign:
        reasons.append(f"attn_bias type is {s.structure}, not one of sdx_kernels'")
    if s.dropout == 1.0:
        reasons.append("dropout = 1.0")
    if s.empty:
        reasons.append("an input has a dimension of size 0")
    # the smallest tile has 16 rows
    if s.batch * s.heads * -(-s.queries // 16) > 2**31 - 1:
        reasons.append("batch x heads x query tiles > 2**31 - 1")
    return reasons


@functools.lru_cache(maxsize=1024)
def _ladder(s: Signature) -> tuple[AttentionConfig, ...]:
    capability = s.target.capability or _OLDEST
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


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    # a lazily negated view (the imaginary part of a conjugate) holds the wrong sign in memory
    tensor = tensor.resolve_neg()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _run_triton(inputs: AttentionInputs) -> Result:
    from sdx_kernels._triton.attention_fwd import launch_attention_fwd

    return launch_attention_fwd(
        _unit_stride(inputs.query),
        _unit_stride(inputs.key),
        _unit_stride(inputs.value),
        None if inputs.bias is None else inputs.bias.resolve_neg(),
        scale=inputs.scale,
        key_mask=inputs.key_mask,
        band=inputs.band,
        packed=inputs.packed,
        dropout=inputs.dropout,
        output_dtype=inputs.output_dtype,
        with_lse=inputs.signature.lse,
        ladder=_ladder(inputs.signature),
    )


def _sdpa_reasons(s: Signature) -> list[str]:
    reasons = dtype_reason("dtype", s.dtype, _DTYPES)
    if s.output_dtype != s.dtype:
        reasons.append(f"output_dtype={s.output_dtype} (supported: the inputs' {s.dtype})")
    if s.structure and (not s.key_mask or s.target.kind != "cpu"):
        reasons.append(f"attn_bias type is {s.structure}: NaN in excluded keys would leak")
    if s.bias != "none" and s.target.kind != "cpu":
        reasons.append(
            f"attn_bias is a tensor on {s.target.kind}: rows with nothing to attend are not 0 "
            f"in every torch kernel"
        )
    if s.bias == "float" and s.bias_dtype is not None:
        reasons += dtype_reason("attn_bias.dtype", s.bias_dtype, (torch.float32, s.dtype))
    if s.bias_grad:
        reasons.append("attn_bias requires grad")
    if s.lse:
        reasons.append("does not return the log-sum-exp")
    if s.empty:
        reasons.append("an input has a dimension of size 0")
    if s.grad and s.target.kind == "cuda" and not s.explicit:
        reasons.append("operator is non-deterministic, but only repeatable backwards are automatic")
    return reasons


def _backend_reasons(backend: SDPBackend, s: Signature) -> list[str]:
    reasons = _sdpa_reasons(s)
    if backend == SDPBackend.MATH:
        return reasons
    on_cuda = s.target.kind in {"cuda", "rocm"}
    if backend != SDPBackend.FLASH_ATTENTION and not on_cuda:
        reasons.append(f"device={s.target.kind} (supported: {{'cuda'}})")
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        return reasons
    if s.head_dim != s.value_dim:
        reasons.append("query.shape[-1] != value.shape[-1]")
    if on_cuda:
        reasons += age_reason(s)
        reasons += dtype_reason("dtype", s.dtype, _HALF)
        if s.head_dim > 256:
            reasons.append("max(query.shape[-1], value.shape[-1]) > 256")
    return reasons


def _run_sdpa(inputs: AttentionInputs, backend: SDPBackend | None = None) -> Result:
    s = inputs.signature
    query = inputs.query.transpose(1, 2)
    key, value = inputs.key.transpose(1, 2), inputs.value.transpose(1, 2)
    mask = inputs.bias
    if inputs.key_mask is not None:
        # 0 · NaN is NaN: what a missing key holds must not be multiplied
        exists = inputs.key_mask[:, None, :, None]
        key, value = torch.where(exists, key, 0), torch.where(exists, value, 0)
        mask = inputs.key_mask[:, None, None, :]
    # cards before sm_80 have no bfloat16 units, and some torch kernels no code for it either
    widen = s.dtype == torch.bfloat16 and bool(age_reason(s))
    if widen:
        query, key, value = query.float(), key.float(), value.float()
    call = functools.partial(
        F.scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=s.dropout,
        scale=inputs.scale,
        enable_gqa=s.heads != s.key_heads,
    )
    if backend is None:
        out = call()
    else:
        try:
            with sdpa_kernel(backend):
                out = call()
        except RuntimeError as error:
            raise InvalidInputs(
                f"torch's {backend.name} kernel refuses these inputs on {s.target.name}: {error}"
            ) from error
    return out.transpose(1, 2).to(s.dtype), None


def _plain_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    if query.dtype == torch.bfloat16 and query.is_cuda and not _has_bfloat16(query.device):
        out = _plain_sdpa(query.float(), key.float(), value.float(), scale)
        return out.to(query.dtype)
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scale
    )
    return out.transpose(1, 2)


def _has_bfloat16(device: torch.device) -> bool:
    capability = target.of(device).capability
    return capability is None or capability >= _OLDEST


def structure_of(inputs: AttentionInputs) -> Structure | None:
    """What the reference needs to know beyond the tensors and the bias; None = nothing."""
    parts = (inputs.band, inputs.packed, inputs.key_mask, inputs.allowed, inputs.dropout)
    return Structure(*parts) if any(part is not None for part in parts) else None


def _run_reference(inputs: AttentionInputs) -> Result:
    return attention_forward(
        inputs.query,
        inputs.key,
        inputs.value,
        scale=inputs.scale,
        bias=inputs.bias,
        structure=structure_of(inputs),
        output_dtype=inputs.output_dtype,
    )


def _torch_impl(name: str, backend: SDPBackend) -> Impl:
    return Impl(
        name=name,
        priority=-1,
        reasons=functools.partial(_backend_reasons, backend),
        run=functools.partial(_run_sdpa, backend=backend),
        differentiable=True,
        tolerance=TOLERANCE,
    )


OPERATOR = Operator(
    name="memory_efficient_attention_forward",
    implementations=(
        Impl(
            name="triton",
            priority=30,
            reasons=_triton_reasons,
            run=_run_triton,
            tolerance=TOLERANCE,
            closest=(
                f"float16, bfloat16 or float32 with head dims up to {MAX_HEAD_DIM} on an "
                f"NVIDIA GPU of capability 8.0 or newer"
            ),
        ),
        Impl(
            name="sdpa",
            priority=20,
            reasons=_sdpa_reasons,
            run=_run_sdpa,
            plain=_plain_sdpa,
            differentiable=True,
            tolerance=TOLERANCE,
            closest="attn_bias=None, floating-point inputs of one dtype",
        ),
        Impl(
            name="reference",
            priority=10,
            reasons=lambda s: dtype_reason("dtype", s.dtype, _DTYPES),
            run=_run_reference,
            tolerance=TOLERANCE,
            closest="float16, bfloat16, float32 or float64 inputs",
        ),
        _torch_impl("sdpa-flash", SDPBackend.FLASH_ATTENTION),
        _torch_impl("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
        _torch_impl("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
        _torch_impl("sdpa-math", SDPBackend.MATH),
    ),
    prefer=preference,
)
