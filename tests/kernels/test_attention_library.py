"""The operators that autograd, torch.compile and checkpointing see; dropout's draws."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sdx_kernels import (
    BlockDiagonalMask,
    InvalidInputs,
    KeyPaddingMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularMask,
    attend,
    count,
    memory_efficient_attention,
)
from sdx_kernels.checks import Dropout, attention_inputs
from sdx_kernels.ops import attention_library
from sdx_kernels.reference.attention import attention
from sdx_kernels.reference.attention_gradients import attention_gradients
from sdx_kernels.reference.dropout import keep_mask
from sdx_kernels.testing import random_inputs

MASKS: dict[str, Any] = {
    "none": None,
    "causal": LowerTriangularMask(),
    "window": LocalAttentionFromBottomRightMask(2, 1),
    "packed": BlockDiagonalMask.from_seqlens((4, 5), (3, 8)).make_causal(),
    "keys": KeyPaddingMask(torch.tensor([[True] * 7 + [False] * 4])),
    "bias": torch.linspace(-1, 1, 99).reshape(1, 1, 9, 11),
    "bool": torch.ones(9, 11, dtype=torch.bool).tril(4),
}


def leaves(**kwargs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(t.requires_grad_() for t in random_inputs(1, 9, 11, 2, 8, **kwargs))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("op", ["reference", "triton"])
def test_torch_checks_the_operators(interpreter: None, name: str, op: str) -> None:
    # schema, fakes, autograd registration and tracing, as torch itself tests an operator
    q, k, v = leaves()
    inputs = attention_inputs(q, k, v, MASKS[name], lse=True)
    shared = attention_library._Shared.of(inputs).arguments()
    arguments = (q, k, v, *shared, torch.float32, True, op, "reference")
    torch.library.opcheck(torch.ops.sdx_kernels.attention_forward.default, arguments)
    with torch.no_grad():
        out, lse = torch.ops.sdx_kernels.attention_forward(*arguments)
        grads = (torch.randn_like(out), None, q, k, v, out, lse, *shared, False, "reference")
        torch.library.opcheck(
            torch.ops.sdx_kernels.attention_backward.default,
            tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in grads),
        )


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("op", [None, "reference", "triton"])
def test_fullgraph_compiles_forward_and_backward(
    interpreter: None, name: str, op: str | None
) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return memory_efficient_attention(q, k, v, MASKS[name], op=op)

    torch.compiler.reset()  # each case is one more version of the same function
    q, k, v = leaves()
    expected = call(q, k, v)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    assert torch.equal(out, expected)
    for one, other in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v), expected)


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_closed_form_gradients_are_autograds(structured: bool, groups: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 5, 4, 6, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(2, 7, 4 // groups, 6, dtype=torch.float64, requires_grad=True) for _ in "kv"
    )
    bias = torch.randn(2, 4, 5, 7, dtype=torch.float64, requires_grad=True)
    rest: dict[str, Any] = {"scale": 0.4, "bias": bias}
    if structured:
        allowed = torch.rand(5, 7) > 0.4
        allowed[3] = False
        rest |= {"allowed": allowed[None, None], "keep": torch.rand(2, 4, 5, 7) > 0.3, "p": 0.3}
    out, lse = attention(q, k, v, **rest)
    grad, lse_grad = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad([out, lse], [q, k, v, bias], [grad, lse_grad])
    with torch.no_grad():
        actual = attention_gradients(grad, q, k, v, lse_grad=lse_grad, **rest)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_nan_in_excluded_keys_reaches_no_gradient() -> None:
    q, k, v = random_inputs(1, 6, 6, 1, 8)
    k[:, 4], v[:, 5] = torch.nan, torch.inf
    wild = [t.clone().requires_grad_() for t in (q, k, v)]
    memory_efficient_attention(*wild, LowerTriangularMask())[:, :4].sum().backward()
    assert wild[0].grad is not None
    assert wild[0].grad[:, :4].isfinite().all()
    exists = torch.tensor([[True] * 4 + [False] * 2])
    wild = [t.clone().requires_grad_() for t in (q, k, v)]
    memory_efficient_attention(*wild, KeyPaddingMask(exists)).sum().backward()
    cropped = [t.clone().requires_grad_() for t in (q, k[:, :4], v[:, :4])]
    memory_efficient_attention(*cropped).sum().backward()
    for tensor, other in zip(wild, cropped, strict=True):
        assert tensor.grad is not None
        assert other.grad is not None
        rows = other.shape[1]
        torch.testing.assert_close(tensor.grad[:, :rows], other.grad, rtol=0, atol=1e-6)
        assert not tensor.grad[:, rows:].any()


def test_a_second_derivative_is_refused_in_words() -> None:
    q, k, v = leaves()
    out = memory_efficient_attention(q, k, v, LowerTriangularMask())
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative here: use op='sdpa-math'"):
        dq.sum().backward()


def test_only_wanted_gradients_come_back() -> None:
    q, k, v = random_inputs(1, 9, 11, 2, 8)
    bias = torch.zeros(1, 1, 1, 11, requires_grad=True)
    memory_efficient_attention(q, k, v.requires_grad_(), bias).sum().backward()
    assert (q.grad, k.grad) == (None, None)
    assert v.grad is not None
    assert bias.grad is not None


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float = 0.4) -> torch.Tensor:
    return memory_efficient_attention(q, k, v, LowerTriangularMask(), p)


def test_dropout_follows_torchs_generator() -> None:
    q, k, v = random_inputs(2, 33, 33, 2, 8)
    torch.manual_seed(3)
    first, second = dropped(q, k, v), dropped(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(dropped(q, k, v), first)
    # p = 0 draws nothing
    state = torch.get_rng_state()
    dropped(q, k, v, 0.0)
    attend(q, k, v)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_keeps_the_mean_and_its_ends() -> None:
    q, k, v = random_inputs(1, 64, 64, 1, 8)
    torch.manual_seed(0)
    draws = torch.stack([dropped(q, k, v + 3.0) for _ in range(300)])
    assert (draws.mean(0) - dropped(q, k, v + 3.0, 0.0)).abs().mean() < 0.1
    leaf = v.clone().requires_grad_()
    out = dropped(q, k, leaf, 1.0)
    assert out.abs().max() == 0
    out.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().max() == 0


@pytest.mark.parametrize("packed", [False, True])
def test_dropouts_gradients_are_those_of_its_mask(packed: bool) -> None:
    q, k, v = leaves()
    mask = BlockDiagonalMask.from_seqlens((4, 5), (5, 6)) if packed else LowerTriangularMask()
    torch.manual_seed(11)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64)
    if packed:
        keep = torch.zeros(1, 2, 9, 11, dtype=torch.bool)
        keep[:, :, :4, :5] = keep_mask(seed, 1, 2, range(4), range(5), 0.4)
        keep[:, :, 4:, 5:] = keep_mask(seed, 1, 2, range(5), range(6), 0.4, first=1)
    else:
        keep = keep_mask(seed, 1, 2, range(9), range(11), 0.4)
    expected, _ = attention(
        q, k, v, scale=8**-0.5, allowed=mask.allowed((9, 11))[None, None], keep=keep, p=0.4
    )
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    torch.manual_seed(11)
    out = memory_efficient_attention(q, k, v, mask, 0.4)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    for one, other in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_case_054_checkpointing_draws_the_same_dropout() -> None:
    grads = []
    for wrapped in (False, True):
        q, k, v = leaves()
        torch.manual_seed(5)
        out = checkpoint(dropped, q, k, v, use_reentrant=False) if wrapped else dropped(q, k, v)
        grads.append(torch.autograd.grad(out.square().sum(), q)[0])
    assert torch.equal(*grads)


def test_backward_counts_what_ran() -> None:
    before = count("reference-backward")
    q, k, v = leaves()
    memory_efficient_attention(q, k, v, LowerTriangularMask()).sum().backward()
    assert count("reference-backward") == before + 1


def test_pairs_of_operators() -> None:
    class Cutlass:
        NAME = "cutlassB-pt"

    q, k, v = leaves()
    out, choice = attend(q, k, v, LowerTriangularMask(), op=("reference", "reference"))
    assert choice.name == "reference"
    out.sum().backward()
    with pytest.raises(InvalidInputs, match="sdpa-efficient cannot continue reference"):
        attend(q, k, v, op=("reference", Cutlass))
    with pytest.raises(InvalidInputs, match="torch's sdpa-math differentiates itself"):
        attend(q, k, v, op=("sdpa-math", "reference"))
    with pytest.raises(InvalidInputs, match="no implementation named 'nothing'"):
        attend(q, k, v, op=("reference", "nothing"))


def test_dropout_is_a_value_of_the_settled_inputs() -> None:
    seed = torch.tensor([4])
    q, k, v = random_inputs(1, 9, 11, 2, 8)
    inputs = attention_inputs(q, k, v, None, 0.25)
    assert inputs.dropout is None
    assert Dropout(0.25, seed).seed is seed
