"""The implementations of attention's backward as data; each one repeats bit for bit.

It knows which gradient kernel takes which inputs, and must not know what ran forward.
"""

from dataclasses import dataclass

import torch

from sdx_kernels.checks import AttentionInputs, Signature
from sdx_kernels.ops.attention_impls import dtype_reason, structure_of
from sdx_kernels.reference.attention_chunks import attention_backward
from sdx_kernels.registry import Impl, Operator

__all__ = ["BACKWARD", "BackwardInputs", "Gradients"]

#: of query, key, value and (None where it is not wanted) the bias
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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


BACKWARD = Operator(
    name="memory_efficient_attention_backward",
    implementations=(
        Impl(
            name="reference",
            priority=10,
            reasons=lambda s: dtype_reason("dtype", s.dtype, _DTYPES),
            run=_run_reference,
            closest="float16, bfloat16, float32 or float64 inputs",
        ),
    ),
)
