"""Operator classes as xFormers' users write them, and what diffusers reads of them."""

import pytest
import torch

from sdx_kernels import InvalidInputs, LowerTriangularMask, attend, ops
from sdx_kernels.ops.attention_bwd_impls import BACKWARD
from sdx_kernels.ops.attention_classes import ALL_BW_OPS, ALL_FW_OPS, Inputs
from sdx_kernels.ops.attention_impls import OPERATOR
from sdx_kernels.testing import assert_close, random_inputs, reference64


def test_every_class_names_an_implementation() -> None:
    assert {op.NAME for op in ALL_FW_OPS} <= set(OPERATOR.names())
    assert {op.NAME for op in ALL_BW_OPS} <= {f"{name}-backward" for name in BACKWARD.names()}


@pytest.mark.parametrize("op", [*ALL_FW_OPS, *ALL_BW_OPS], ids=lambda op: op.NAME)
def test_what_a_class_claims_is_what_the_registry_refuses(op: type) -> None:
    own = not op.NAME.startswith("sdpa")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        inputs = Inputs(*random_inputs(1, 5, 7, 1, 16, dtype=dtype))
        refused = any(why.startswith("dtype=") for why in op.not_supported_reasons(inputs))
        # torch's CPU kernels take more than its CUDA kernels, which the classes speak of
        assert not (refused and dtype in op.SUPPORTED_DTYPES)
        assert refused or not own or dtype in op.SUPPORTED_DTYPES
    if own:
        wide = Inputs(*random_inputs(1, 5, 7, 1, 300, dtype=torch.float16))
        refused = any("shape[-1]) >" in why for why in op.not_supported_reasons(wide))
        assert refused == (op.SUPPORTED_MAX_K < 300)


def test_classes_and_pairs_are_taken_as_op() -> None:
    inputs = random_inputs(1, 9, 11, 2, 8)
    pair = ops.MemoryEfficientAttentionReferenceOp
    assert pair[0].supports(Inputs(*inputs, LowerTriangularMask()))
    out, choice = attend(*inputs, LowerTriangularMask(), op=pair)
    assert choice.name == "reference"
    allowed = LowerTriangularMask().allowed((9, 11))
    assert_close(out, reference64(*inputs, allowed[None, None]))
    with pytest.raises(InvalidInputs, match="`sdpa-cudnn` is not supported because"):
        attend(*inputs, op=ops.MemoryEfficientAttentionCuDNNOp)
