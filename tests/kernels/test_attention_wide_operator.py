"""Wide heads through the operator: the kernels that were named are those that ran."""

import pytest
import torch

from sdx_kernels import LowerTriangularMask, count, memory_efficient_attention
from sdx_kernels.testing import assert_close, math_peer, random_inputs, reference64

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_reaches_them_by_name(dtype: torch.dtype, causal: bool) -> None:
    inputs = random_inputs(1, 7, 19, 1, 300, 264, dtype=dtype)
    mask = LowerTriangularMask() if causal else None
    names = ("triton-wide", "triton-wide-backward", "reference-backward")
    before = [count(name) for name in names]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = memory_efficient_attention(*leaves, mask, op="triton-wide")
    assert [count(name) for name in names] == [before[0] + 1, before[1], before[2]]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = torch.autograd.grad(out, leaves, grad)
    assert [count(name) for name in names] == [before[0] + 1, before[1] + 1, before[2]]
    assert_close(out.detach(), reference64(*inputs, mask), peer=math_peer(*inputs, mask))
    truth = [tensor.double().requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad(reference64(*truth, mask), truth, grad.double())
    others = [tensor.clone().requires_grad_() for tensor in inputs]
    peers = torch.autograd.grad(math_peer(*others, mask), others, grad)
    figure = 1e-4 if dtype == torch.float32 else 1e-2
    for ours, right, other in zip(found, expected, peers, strict=True):
        limit = figure * max(1.0, right.abs().max().item())
        # under a mask some rows have one key, and a peer's error there is luck
        assert_close(ours, right, peer=None if causal else other, factor=3.0, limit=limit)
