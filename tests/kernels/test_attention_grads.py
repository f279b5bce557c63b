"""Gradients against autograd of the fp64 equation, whatever ran forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sdx_kernels import (
    KeyPaddingMask,
    LowerTriangularMask,
    attend,
    memory_efficient_attention,
)
from sdx_kernels.checks import Dropout
from sdx_kernels.reference.attention_chunks import attention_backward, attention_forward, slices
from sdx_kernels.reference.structures import Structure
from sdx_kernels.testing import assert_close, random_inputs, reference64

Run = Callable[..., torch.Tensor]

#: absolute bounds on unit-normal inputs and gradients
GRADIENT = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def check_grads(run: Run, inputs: tuple[torch.Tensor, ...], bias: object = None) -> None:
    leaves = [t.clone().requires_grad_() for t in inputs]
    truth = [t.double().requires_grad_() for t in inputs]
    grad = torch.randn(leaves[0].shape[:-1] + leaves[2].shape[-1:], dtype=inputs[0].dtype)
    run(*leaves, attn_bias=bias).backward(grad)
    reference64(*truth, bias).backward(grad.double())  # type: ignore[arg-type]
    for leaf, expected in zip(leaves, truth, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        assert expected.grad is not None
        scale = max(1.0, expected.grad.abs().max().item())
        assert_close(leaf.grad, expected.grad, limit=GRADIENT[leaf.dtype] * scale)


@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_case_052_backward_exists_wherever_forward_does(
    run: Run, head_dim: int, dtype: torch.dtype
) -> None:
    check_grads(run, random_inputs(2, 57, 77, 1, head_dim, dtype=dtype))


def test_case_052_backward_in_bfloat16() -> None:
    run: Run = lambda *a, **kw: attend(*a, **kw)[0]  # noqa: E731
    check_grads(run, random_inputs(2, 57, 77, 1, 80, dtype=torch.bfloat16))


def test_gradients_through_masks(run: Run) -> None:
    inputs = random_inputs(2, 33, 45, 2, 16)
    for bias in (LowerTriangularMask(), torch.rand(33, 45) > 0.4, torch.randn(2, 1, 1, 45)):
        check_grads(run, inputs, bias)
    mask = torch.ones(2, 45, dtype=torch.bool)
    mask[1, 30:] = False
    check_grads(run, inputs, KeyPaddingMask(mask))


@pytest.mark.parametrize(
    "shape", [(1, 1, 17, 23), (17, 23), (4, 1, 23), (2, 1, 1, 23), (2, 4, 17, 23)], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
def test_case_005_bias_gradient_has_the_biass_own_shape(
    run: Run, shape: tuple[int, ...], causal: bool
) -> None:
    q, k, v = random_inputs(2, 17, 23, 4, 40)
    bias = torch.zeros(shape, requires_grad=True)
    truth = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    if causal:
        triangle = LowerTriangularMask()
        run(q, k, v, attn_bias=triangle.add_bias(bias)).square().sum().backward()
        expected = reference64(q, k, v, triangle.add_bias(truth))
    else:
        run(q, k, v, attn_bias=bias).square().sum().backward()
        expected = reference64(q, k, v, truth)
    expected.square().sum().backward()
    assert bias.grad is not None
    assert truth.grad is not None
    assert bias.grad.shape == shape
    assert truth.grad.abs().max() > 1e-3
    assert (bias.grad - truth.grad).abs().max() < 1e-4


def test_case_005_bias_gradient_of_a_parameter_in_16_bits(run: Run) -> None:
    q, k, v = random_inputs(1, 9, 11, 2, 16, dtype=torch.float16)
    bias = torch.nn.Parameter(torch.zeros(2, 9, 11, dtype=torch.float16))
    run(q, k, v, attn_bias=bias).float().sum().backward()
    assert bias.grad is not None
    assert bias.grad.isfinite().all()


def test_case_027_strided_and_expanded_gradients(run: Run) -> None:
    torch.manual_seed(2)
    leaf = torch.randn(1, 40, 17, 2, requires_grad=True)
    k, v = torch.randn(1, 20, 2, 80)[..., ::2], torch.randn(1, 20, 2, 80)[..., 1::2]
    run(leaf.permute(0, 2, 3, 1), k, v).sum().backward()
    truth = leaf.detach().double().requires_grad_()
    reference64(truth.permute(0, 2, 3, 1), k, v).sum().backward()
    assert leaf.grad is not None
    assert truth.grad is not None
    assert (leaf.grad - truth.grad).abs().max() < 1e-4


def test_case_037_gradients_of_huge_scores_are_finite(run: Run) -> None:
    torch.manual_seed(3)
    q = torch.full((1, 32, 1, 64), 576.0).half().requires_grad_()
    k = (382.0 * torch.randn(1, 32, 1, 1).sign()).half().expand(1, 32, 1, 64).requires_grad_()
    v = torch.randn(1, 32, 1, 64).half().requires_grad_()
    grads = torch.autograd.grad(run(q, k, v).float().sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads)


def test_case_035_gradients_come_back_in_each_tensors_dtype(run: Run) -> None:
    q, k, v = random_inputs(1, 9, 12, 2, 16)
    q.requires_grad_()
    k16, v16 = k.half().requires_grad_(), v.half().requires_grad_()
    run(q, k16, v16).sum().backward()
    assert [t.grad.dtype for t in (q, k16, v16) if t.grad is not None] == [
        torch.float32,
        torch.float16,
        torch.float16,
    ]


def test_case_054_checkpointing_recomputes_the_same_bits(run: Run) -> None:
    q, k, v = random_inputs(1, 65, 65, 2, 40)
    grads = []
    for wrapped in (False, True):
        leaf = q.clone().requires_grad_()
        out = checkpoint(run, leaf, k, v, use_reentrant=False) if wrapped else run(leaf, k, v)
        out.square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])


def test_case_048_backward_repeats_bit_for_bit(run: Run) -> None:
    q, k, v = (t.requires_grad_() for t in random_inputs(1, 65, 77, 1, 40, dtype=torch.float16))
    loss = run(q, k, v).float().square().sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    for _ in range(19):
        again = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("limit", [1, 50, 1000, 10**9])
def test_slices_cover_everything_once_and_give_the_same_result(limit: int) -> None:
    q, k, v = random_inputs(3, 17, 23, 2, 8, dtype=torch.float64)
    seen = torch.zeros(3, 17, dtype=torch.int)
    for items, rows in slices(3, 2, 17, 23, limit):
        seen[items, rows] += 1
    assert torch.equal(seen, torch.ones_like(seen))
    bias, mask = torch.randn(17, 23)[None, None], torch.ones(17, 23, dtype=torch.bool).tril(3)
    structure = Structure(allowed=mask[None, None], dropout=Dropout(0.2, torch.tensor([5])))
    arguments: dict[str, Any] = {"scale": 0.3, "bias": bias, "structure": structure}
    whole, lse = attention_forward(q, k, v, **arguments)
    parts, part_lse = attention_forward(q, k, v, **arguments, limit=limit)
    assert (whole - parts).abs().max() < 1e-12
    assert (lse - part_lse).abs().max() < 1e-12
    grad = torch.randn_like(whole)
    arguments |= {"bias_grad": True, "lse_grad": torch.randn_like(lse)}
    one = attention_backward(grad, q, k, v, **arguments)
    many = attention_backward(grad, q, k, v, **arguments, limit=limit)
    for a, b in zip(one, many, strict=True):
        assert a is not None
        assert b is not None
        assert (a - b).abs().max() < 1e-5


def test_no_gradient_is_computed_for_tensors_that_need_none() -> None:
    q, k, v = random_inputs(1, 5, 7, 1, 8)
    out = memory_efficient_attention(q, k, v, LowerTriangularMask())
    assert not out.requires_grad
