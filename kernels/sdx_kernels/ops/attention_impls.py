"""All forward implementations of attention in one operator; the reference among them.

It knows which there are, and must not know how a caller chose between them.
"""

import torch

from sdx_kernels.checks import AttentionInputs
from sdx_kernels.ops.attention_reasons import DTYPES, dtype_reason
from sdx_kernels.ops.attention_torch_impls import TORCH_IMPLEMENTATIONS
from sdx_kernels.ops.attention_triton_impls import TRITON_IMPLEMENTATIONS
from sdx_kernels.reference.attention_chunks import attention_forward
from sdx_kernels.reference.structures import Structure
from sdx_kernels.registry import TOLERANCE, Impl, Operator
from sdx_kernels.tuning.measured_order import order

__all__ = ["OPERATOR", "TORCH_NAMES", "structure_of"]

Result = tuple[torch.Tensor, torch.Tensor | None]

#: what `op="torch"` may choose from
TORCH_NAMES = ("sdpa", "reference")


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


OPERATOR = Operator(
    name="memory_efficient_attention_forward",
    implementations=(
        *TRITON_IMPLEMENTATIONS,
        *TORCH_IMPLEMENTATIONS,
        Impl(
            name="reference",
            priority=10,
            reasons=lambda s: dtype_reason("dtype", s.dtype, DTYPES),
            run=_run_reference,
            tolerance=TOLERANCE,
            closest="float16, bfloat16, float32 or float64 inputs",
        ),
    ),
    prefer=order,
)
