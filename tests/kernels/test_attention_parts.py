"""Attention key segment by key segment, joined by the log-sum-exp; backward by hand."""

import itertools

import pytest
import torch

from sdx_kernels import (
    InvalidInputs,
    LowerTriangularMask,
    count,
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
    merge_attentions,
)
from sdx_kernels.testing import assert_close, random_inputs, reference64


@pytest.mark.parametrize("op", ["reference", "triton"])
@pytest.mark.parametrize("cuts", [(7,), (1, 12), (4, 4, 8)], ids=str)
def test_segments_of_keys_merge_to_the_whole(
    interpreter: None, op: str, cuts: tuple[int, ...]
) -> None:
    q, k, v = random_inputs(2, 9, 16, 3, 8)
    borders = sorted({0, *cuts, 16})
    parts = [
        memory_efficient_attention_partial(q, k[:, a:b], v[:, a:b], op=op)
        for a, b in itertools.pairwise(borders)
    ]
    out, lse = merge_attentions([out for out, _ in parts], [lse for _, lse in parts])
    assert_close(out, reference64(q, k, v))
    scores = torch.einsum("bmhk,bnhk->bhmn", q.double(), k.double()) * 8**-0.5
    assert lse is not None
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)
    stacked = merge_attentions(
        torch.stack([out for out, _ in parts]),
        torch.stack([lse for _, lse in parts]),
        write_lse=False,
        output_dtype=torch.float64,
    )
    assert stacked[1] is None
    assert stacked[0].dtype == torch.float64


@pytest.mark.parametrize("op", ["reference", "triton"])
@pytest.mark.parametrize("head_dim", [8, 264])
def test_gradients_flow_through_merged_parts(interpreter: None, op: str, head_dim: int) -> None:
    dtype, limit = (torch.float64, 1e-12) if op == "reference" else (torch.float32, 1e-4)
    before = count("triton-backward") + count("triton-wide-backward")
    q, k, v = (t.to(dtype).requires_grad_() for t in random_inputs(1, 6, 10, 2, head_dim))
    bias = torch.randn(1, 2, 6, 10, dtype=dtype, requires_grad=True)
    whole = memory_efficient_attention(q, k, v, bias, op="reference")
    upstream = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, (q, k, v, bias), upstream)
    parts = [
        memory_efficient_attention_partial(q, k[:, cut], v[:, cut], bias[..., cut], op=op)
        for cut in (slice(0, 3), slice(3, 10))
    ]
    out, _ = merge_attentions(*zip(*parts, strict=True))
    grads = torch.autograd.grad(out, (q, k, v, bias), upstream)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=limit)
    ran = count("triton-backward") + count("triton-wide-backward") - before
    assert ran == (2 if op == "triton" else 0)


def test_rows_that_attend_nothing_stay_zero_and_have_finite_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in random_inputs(1, 4, 6, 1, 8))
    nothing = torch.ones(4, 6, dtype=torch.bool)
    nothing[2] = False
    parts = [
        memory_efficient_attention_partial(q, k[:, cut], v[:, cut], nothing[:, cut])
        for cut in (slice(0, 2), slice(2, 6))
    ]
    out, lse = merge_attentions(*zip(*parts, strict=True))
    assert lse is not None
    assert lse[0, 0, 2] == -torch.inf
    assert out[0, 2].abs().max() == 0
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_parts_that_do_not_fit_are_refused() -> None:
    out, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    with pytest.raises(InvalidInputs, match="0 outputs and 0"):
        merge_attentions([], [])
    with pytest.raises(InvalidInputs, match="same shape"):
        merge_attentions([out, out[:, :2]], [lse, lse])
    with pytest.raises(InvalidInputs, match="do not belong"):
        merge_attentions([out], [lse.transpose(1, 2)])


@pytest.mark.parametrize("layout", ["BMK", "BMHK", "BMGHK"])
def test_backward_by_hand_is_autograds(layout: str) -> None:
    shapes = {"BMK": (2, 9, 8), "BMHK": (2, 9, 3, 8), "BMGHK": (2, 9, 3, 2, 8)}
    torch.manual_seed(1)
    q = torch.randn(shapes[layout])
    k, v = (torch.randn(shapes[layout]) for _ in "kv")
    mask = LowerTriangularMask()
    out, lse = memory_efficient_attention_forward_requires_grad(q, k, v, mask)
    assert not out.requires_grad
    grad = torch.randn_like(out)
    by_hand = memory_efficient_attention_backward(grad, out, lse, q, k, v, mask)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    memory_efficient_attention(*leaves, mask).backward(grad)
    for gradient, leaf in zip(by_hand, leaves, strict=True):
        assert leaf.grad is not None
        assert gradient.shape == leaf.shape
        torch.testing.assert_close(gradient, leaf.grad, rtol=0, atol=1e-6)
    with pytest.raises(InvalidInputs, match="must have the forward's shape"):
        memory_efficient_attention_backward(grad[:1], out, lse, q, k, v, mask)
    with pytest.raises(InvalidInputs, match="is not \\(batch, heads, queries\\)"):
        memory_efficient_attention_backward(grad, out, lse[:, :, :1], q, k, v, mask)
    with pytest.raises(NotImplementedError, match="no dropout"):
        memory_efficient_attention_backward(grad, out, lse, q, k, v, mask, 0.1)
