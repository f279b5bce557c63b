"""Implementations as classes with xFormers' attribute names, for code that passes `op=` that way.

It knows what each implementation supports, from the registry; it runs nothing itself.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sdx_kernels.bias import AttentionBias
from sdx_kernels.checks import Signature, attention_inputs
from sdx_kernels.ops.attention import Bias
from sdx_kernels.ops.attention_bwd_impls import BACKWARD
from sdx_kernels.ops.attention_impls import OPERATOR
from sdx_kernels.registry import TOLERANCE, Operator

__all__ = [
    "ALL_BW_OPS",
    "ALL_FW_OPS",
    "AttentionBwOp",
    "AttentionFwOp",
    "Inputs",
    "MemoryEfficientAttentionCuDNNOp",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "MemoryEfficientAttentionReferenceOp",
    "MemoryEfficientAttentionTritonOp",
]


@dataclass(frozen=True, eq=False)
class Inputs:
    """A call's arguments, as `memory_efficient_attention` takes them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_bias: Bias = None
    p: float = 0.0
    scale: float | None = None
    output_dtype: torch.dtype | None = None

    def signature(self) -> Signature:
        """What selection looks at when the implementation is named.

        Raises:
            InvalidInputs: the arguments can never work.
        """
        return attention_inputs(
            self.query,
            self.key,
            self.value,
            self.attn_bias,
            self.p,
            self.scale,
            self.output_dtype,
            explicit=True,
        ).signature


class _Op:
    """What forward and backward classes share. Attributes are xFormers'; None = no limit."""

    NAME: ClassVar[str] = ""
    SUPPORTED_DEVICES: ClassVar[frozenset[str]] = frozenset({"cuda", "cpu"})
    SUPPORTED_DTYPES: ClassVar[frozenset[torch.dtype]] = frozenset()
    SUPPORTED_MAX_K: ClassVar[float] = float("inf")
    SUPPORTED_MIN_K: ClassVar[int] = 1
    SUPPORTED_ATTN_BIAS_TYPES: ClassVar[tuple[type, ...]] = (
        type(None),
        torch.Tensor,
        AttentionBias,
    )
    SUPPORTS_DROPOUT: ClassVar[bool] = True
    SUPPORTS_CUSTOM_SCALE: ClassVar[bool] = True
    SUPPORTS_DIFFERENT_VALUE_EMBED: ClassVar[bool] = True
    SUPPORTS_OUTPUT_DTYPE: ClassVar[bool] = True
    SUPPORTS_PARTIAL: ClassVar[bool] = True
    SUPPORTS_BMGHK: ClassVar[bool] = True
    IS_DETERMINISTIC: ClassVar[bool] = True
    CUDA_MINIMUM_COMPUTE_CAPABILITY: ClassVar[tuple[int, int]] = (5, 0)
    CUDA_MAXIMUM_COMPUTE_CAPABILITY: ClassVar[tuple[int, int] | None] = None
    VARLEN_LSE_PACKED: ClassVar[bool] = True
    ERROR_ATOL: ClassVar[dict[torch.dtype, float]] = dict(TOLERANCE)
    ERROR_RTOL: ClassVar[dict[torch.dtype, float]] = dict.fromkeys(TOLERANCE, 0.0)

    _operator: ClassVar[Operator] = OPERATOR

    @classmethod
    def _implementation(cls) -> str:
        return cls.NAME.removesuffix("-backward")

    @classmethod
    def not_supported_reasons(cls, inputs: Inputs) -> list[str]:
        """Every reason why it cannot take these inputs; empty = it can."""
        return cls._operator.get(cls._implementation()).reasons(inputs.signature())

    @classmethod
    def supports(cls, inputs: Inputs) -> bool:
        """Whether it can take these inputs."""
        return not cls.not_supported_reasons(inputs)


class AttentionFwOp(_Op):
    """A forward implementation; pass the class as `op`, or first in a pair."""


class AttentionBwOp(_Op):
    """A backward implementation; pass it second in a pair."""

    SUPPORTS_ATTN_BIAS_GRAD: ClassVar[bool] = True
    _operator: ClassVar[Operator] = BACKWARD


_16_BITS = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _16_BITS | {torch.float32}


class TritonFwOp(AttentionFwOp):
    """Our kernels, forward."""

    NAME = "triton"
    SUPPORTED_DTYPES = _FLOATS
    SUPPORTED_MAX_K = 256
    CUDA_MINIMUM_COMPUTE_CAPABILITY = (8, 0)


class TritonBwOp(AttentionBwOp):
    """Our kernels, backward."""

    NAME = "triton-backward"
    SUPPORTED_DTYPES = _FLOATS
    SUPPORTED_MAX_K = 256
    CUDA_MINIMUM_COMPUTE_CAPABILITY = (8, 0)


class ReferenceFwOp(AttentionFwOp):
    """The equation in fp32, in slices; runs anywhere."""

    NAME = "reference"
    SUPPORTED_DTYPES = _FLOATS | {torch.float64}


class ReferenceBwOp(AttentionBwOp):
    """Its gradients in closed form; runs anywhere."""

    NAME = "reference-backward"
    SUPPORTED_DTYPES = _FLOATS | {torch.float64}


class _TorchFwOp(AttentionFwOp):
    """One of torch's kernels, which differentiates itself."""

    SUPPORTED_ATTN_BIAS_TYPES: ClassVar[tuple[type, ...]] = (type(None), torch.Tensor)
    SUPPORTS_OUTPUT_DTYPE = False
    SUPPORTS_PARTIAL = False
    IS_DETERMINISTIC = False


class EfficientFwOp(_TorchFwOp):
    """torch's memory-efficient kernel (CUTLASS)."""

    NAME = "sdpa-efficient"
    SUPPORTED_DEVICES = frozenset({"cuda"})
    SUPPORTED_DTYPES = _FLOATS


class FlashFwOp(_TorchFwOp):
    """torch's FlashAttention kernel."""

    NAME = "sdpa-flash"
    SUPPORTED_DTYPES = _16_BITS
    SUPPORTED_MAX_K = 256
    SUPPORTED_ATTN_BIAS_TYPES = (type(None),)
    SUPPORTS_DIFFERENT_VALUE_EMBED = False
    CUDA_MINIMUM_COMPUTE_CAPABILITY = (8, 0)


class CuDNNFwOp(_TorchFwOp):
    """torch's call of cuDNN."""

    NAME = "sdpa-cudnn"
    SUPPORTED_DEVICES = frozenset({"cuda"})
    SUPPORTED_DTYPES = _16_BITS
    SUPPORTED_MAX_K = 256
    SUPPORTS_DIFFERENT_VALUE_EMBED = False
    CUDA_MINIMUM_COMPUTE_CAPABILITY = (8, 0)


ALL_FW_OPS: tuple[type[AttentionFwOp], ...] = (
    TritonFwOp,
    ReferenceFwOp,
    FlashFwOp,
    EfficientFwOp,
    CuDNNFwOp,
)
ALL_BW_OPS: tuple[type[AttentionBwOp], ...] = (TritonBwOp, ReferenceBwOp)

MemoryEfficientAttentionTritonOp = (TritonFwOp, TritonBwOp)
MemoryEfficientAttentionReferenceOp = (ReferenceFwOp, ReferenceBwOp)
MemoryEfficientAttentionFlashAttentionOp = (FlashFwOp, None)
MemoryEfficientAttentionCutlassOp = (EfficientFwOp, None)
MemoryEfficientAttentionCuDNNOp = (CuDNNFwOp, None)
