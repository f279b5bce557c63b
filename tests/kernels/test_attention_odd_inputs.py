"""Arguments that are legal for torch but not what a kernel sees in memory, and illegal ones."""

import pytest
import torch

from sdx_kernels import memory_efficient_attention
from sdx_kernels.errors import InvalidInputs
from sdx_kernels.testing import assert_close, random_inputs, reference64


@pytest.mark.parametrize("which", range(4))
def test_a_lazily_negated_view_counts_with_its_sign(interpreter, which):
    tensors = [*random_inputs(1, 5, 9, 2, 16), torch.randn(1, 2, 5, 9)]
    tensors[which] = torch._neg_view(tensors[which])
    assert tensors[which].is_neg()
    expected = reference64(*(t.resolve_neg() for t in tensors))
    assert_close(memory_efficient_attention(*tensors, op="triton"), expected)


def test_arguments_of_the_wrong_kind_are_named():
    q, k, v = random_inputs(1, 5, 9, 2, 16)
    with pytest.raises(InvalidInputs, match="output_dtype"):
        memory_efficient_attention(q, k, v, output_dtype=torch.int32)
    with pytest.raises(InvalidInputs, match="key is a ndarray"):
        memory_efficient_attention(q, k.numpy(), v)
    with pytest.raises(InvalidInputs, match="op=3"):
        memory_efficient_attention(q, k, v, op=3)
