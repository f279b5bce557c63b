"""Torch's own attention kernels as implementations: its automatic choice, and each by name.

It knows what `scaled_dot_product_attention` takes and where it differs from our semantics.
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdx_kernels import target
from sdx_kernels.checks import AttentionInputs, Signature
from sdx_kernels.errors import InvalidInputs
from sdx_kernels.ops.attention_reasons import DTYPES, HALF, OLDEST, age_reason, dtype_reason
from sdx_kernels.registry import TOLERANCE, Impl

__all__ = ["TORCH_IMPLEMENTATIONS"]

Result = tuple[torch.Tensor, torch.Tensor | None]


def _sdpa_reasons(s: Signature) -> list[str]:
    reasons = dtype_reason("dtype", s.dtype, DTYPES)
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
        reasons += dtype_reason("dtype", s.dtype, HALF)
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
    # torch takes no comparison of dynamic sizes here, which is symbolic: a branch settles it
    grouped = {"enable_gqa": True} if s.heads != s.key_heads else {}
    call = functools.partial(
        F.scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=s.dropout,
        scale=inputs.scale,
        **grouped,
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
    return capability is None or capability >= OLDEST


def _torch_impl(name: str, backend: SDPBackend) -> Impl:
    return Impl(
        name=name,
        priority=-1,
        reasons=functools.partial(_backend_reasons, backend),
        run=functools.partial(_run_sdpa, backend=backend),
        differentiable=True,
        tolerance=TOLERANCE,
    )


TORCH_IMPLEMENTATIONS = (
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
    _torch_impl("sdpa-flash", SDPBackend.FLASH_ATTENTION),
    _torch_impl("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
    _torch_impl("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
    _torch_impl("sdpa-math", SDPBackend.MATH),
)
