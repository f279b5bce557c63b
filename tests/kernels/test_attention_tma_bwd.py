"""Gradients through tensor descriptors against autograd of the equation in fp64."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sdx_kernels import LowerTriangularMask, count, memory_efficient_attention
from sdx_kernels.checks import attention_inputs
from sdx_kernels.errors import LaunchRefused
from sdx_kernels.ops import attention_library
from sdx_kernels.ops.attention_bwd_impls import BACKWARD, BackwardInputs
from sdx_kernels.ops.attention_parts import memory_efficient_attention_partial
from sdx_kernels.reference.attention import attention
from sdx_kernels.target import Target
from sdx_kernels.testing import (
    ODD_LENGTHS,
    assert_close,
    at_end_of_nan,
    largest_error,
    poisoned_empty,
    random_inputs,
)
from sdx_kernels.tuning.attention import SHARED_MEMORY, AttentionConfig
from sdx_kernels.tuning.attention_bwd import BackwardLadder
from sdx_kernels.tuning.attention_tma_bwd import (
    TMA_KERNELS,
    TmaBackwardLadder,
    TmaGradConfig,
    candidates,
    ladder_for_tma_bwd,
    tma_bwd_shared_bytes,
)

from .gradients_case import Inputs, autograd, peer, unit_grad

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    # numpy says so where a test asks for infinities
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

#: tiles of 16 rows and 32 keys, so that small inputs have several of each
SMALL = TmaBackwardLadder(
    (AttentionConfig(16, 16, 4, 1, "test"),),
    (TmaGradConfig(16, 32, 4, 1, "test"),),
    (TmaGradConfig(16, 32, 4, 1, "test"),),
)
DESCRIPTORS = ("triton", "triton-tma")


def launch(
    inputs: Inputs,
    grad: torch.Tensor,
    scale: float = 0.3,
    ladder: TmaBackwardLadder | None = SMALL,
    *,
    output: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, ...]:
    """The kernels' gradients, in memory that held NaN, from the equation's output in fp32."""
    from sdx_kernels._triton.attention_tma_bwd_launch import launch_attention_tma_bwd

    q, k, v = inputs
    out, lse = attention(q.float(), k.float(), v.float(), scale=scale)
    assert ladder is not None
    with poisoned_empty():
        *grads, dbias = launch_attention_tma_bwd(
            grad, q, k, v, out.to(output), lse, scale=scale, ladder=ladder
        )
    assert dbias is None
    for gradient, tensor in zip(grads, inputs, strict=True):
        assert gradient.is_contiguous()
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
    return tuple(grads)


def hold(found: tuple[torch.Tensor, ...], inputs: Inputs, grad: torch.Tensor, scale: float) -> None:
    expected, others = autograd(inputs, grad, scale), peer(inputs, grad, scale)
    for gradient, right, other in zip(found, expected, others, strict=True):
        largest = right.abs().max().item()
        if largest == 0.0:
            # one key: the truth is 0, and so is three times a peer's luck
            assert_close(gradient, right, limit=4 * torch.finfo(gradient.dtype).eps)
        else:
            limit = 1e-2 * max(1.0, largest)
            assert_close(gradient, right, peer=other, factor=3.0, limit=limit)


def check(inputs: Inputs, scale: float = 0.3, ladder: TmaBackwardLadder | None = SMALL) -> None:
    grad = unit_grad(inputs)
    hold(launch(inputs, grad, scale, ladder), inputs, grad, scale)


def half(*sizes: int, seed: int = 0) -> Inputs:
    """Unit-normal inputs in fp16: the interpreter multiplies bfloat16 bit patterns."""
    return random_inputs(*sizes, dtype=torch.float16, seed=seed)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("dim", [40, 64, 80, 128])
def test_head_dims_with_the_shipped_tiles(dim: int, capability: tuple[int, int]) -> None:
    ladder = ladder_for_tma_bwd(capability, dim, dim, torch.float16)
    assert (ladder is None) == (capability == (12, 0) and dim > 64)
    if ladder is not None:
        check(half(1, 131, 150, 1, dim), dim**-0.5, ladder)


@pytest.mark.parametrize("dim", [40, 64, 80, 128])
def test_head_dims_with_every_candidate(dim: int) -> None:
    inputs = half(1, 70, 133, 1, dim, seed=1)
    found = candidates((9, 0), dim, dim, torch.float16)
    assert len(found) > 3
    for ladder in found.values():
        check(inputs, dim**-0.5, ladder)


@pytest.mark.parametrize("dims", [(8, 8), (24, 40), (40, 24), (128, 64), (64, 128)], ids=str)
def test_value_dims_of_their_own(dims: tuple[int, int]) -> None:
    check(half(1, 17, 33, 2, *dims), dims[0] ** -0.5)


@pytest.mark.parametrize("keys", ODD_LENGTHS)
def test_odd_lengths(keys: int) -> None:
    check(half(1, 17, keys, 2, 16, seed=keys))


@pytest.mark.parametrize("queries", [1, 2, 15, 16, 32, 47])
def test_odd_numbers_of_queries(queries: int) -> None:
    check(half(2, queries, 35, 2, 16, seed=queries))


@pytest.mark.slow
@pytest.mark.parametrize("queries", ODD_LENGTHS)
@pytest.mark.parametrize("keys", ODD_LENGTHS)
def test_all_odd_lengths(queries: int, keys: int) -> None:
    check(half(2, queries, keys, 2, 40, 24))


@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_heads_sum_their_gradients(key_heads: int) -> None:
    q, k, v = half(2, 19, 35, 4, 16)
    check((q, k[:, :, :key_heads], v[:, :, :key_heads]))


@pytest.mark.parametrize("scale", [-1.5, 2.0**-14])
def test_any_scale(scale: float) -> None:
    check(half(1, 19, 40, 1, 16), scale)


def test_peaked_scores() -> None:
    q, k, v = half(1, 40, 70, 2, 64)
    check((q * 6.0, k, v), 0.125)


def test_a_sink_key_and_the_tail_behind_it() -> None:
    q, k, v = half(1, 40, 70, 2, 64)
    # about 28 octaves above the other keys, and in no first tile
    q, k = q + 1.0, k.clone()
    k[:, 35] = 20.0 / 8.0
    inputs, grad = (q, k, v), unit_grad((q, k, v))
    # dq and dk are what is left of terms that cancel: with an output in fp16 that is its rounding
    hold(launch(inputs, grad, 0.125, output=torch.float32), inputs, grad, 0.125)


def test_fused_views_and_nan_around_them() -> None:
    dense = half(2, 37, 37, 3, 40)
    grad = unit_grad(dense)
    expected = launch(dense, grad)
    fused = torch.full((2, 45, 3, 3, 48), math.nan, dtype=torch.float16)
    for index, tensor in enumerate(dense):
        fused[:, :37, index, :, :40] = tensor
    views = [fused[:, :37, index, :, :40] for index in range(3)]
    ends = [at_end_of_nan(tensor) for tensor in dense]
    heads_first = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in dense]
    for inputs in (views, ends, heads_first):
        found = launch(tuple(inputs), at_end_of_nan(grad))  # type: ignore[arg-type]
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", ["expanded", "channels first", "odd", "fp32"])
def test_strides_and_dtype_of_the_gradient(kind: str) -> None:
    inputs = half(2, 7, 19, 2, 16)
    plain = unit_grad(inputs)
    grad = {
        "expanded": plain[:1, :1].expand(2, 7, 2, 16),
        "channels first": plain.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        "odd": F.pad(plain, (1, 2), value=math.nan)[..., 1:-2],
        "fp32": plain.float(),
    }[kind]
    found = launch(inputs, grad)
    assert all(map(torch.equal, found, launch(inputs, grad.half().contiguous())))
    hold(found, inputs, grad.half(), 0.3)


def test_strides_of_singleton_dims_mean_nothing() -> None:
    inputs = half(1, 20, 20, 1, 8)
    odd = [tensor.as_strided(tensor.shape, (7919, 8, 4099, 1)) for tensor in inputs]
    grad = unit_grad(inputs)
    found = launch(tuple(odd), grad)  # type: ignore[arg-type]
    assert all(map(torch.equal, found, launch(inputs, grad)))


def test_what_a_tensor_map_cannot_hold_is_refused() -> None:
    q, k, v = half(1, 20, 20, 2, 24)
    grad = unit_grad((q, k, v))
    odd = torch.zeros(1, 20, 2, 25, dtype=torch.float16)[..., :24]
    shifted = torch.zeros(q.numel() + 1, dtype=torch.float16)[1:].view(q.shape)
    for wrong in (odd, shifted, k[:, :1].expand(1, 20, 2, 24)):
        for place in range(3):
            inputs = tuple(wrong if index == place else q for index in range(3))
            with pytest.raises(LaunchRefused, match="16 bytes"):
                launch(inputs, grad)  # type: ignore[arg-type]


def test_two_calls_give_the_same_bits() -> None:
    inputs = half(2, 19, 70, 2, 40)
    grad = unit_grad(inputs)
    first = launch(inputs, grad)
    assert all(map(torch.equal, first, launch(inputs, grad)))


def huge_scores() -> Inputs:
    torch.manual_seed(3)
    q = torch.full((1, 32, 1, 64), 576.0).half()
    k = (382.0 * torch.randn(1, 32, 1, 1).sign()).half().expand(1, 32, 1, 64).contiguous()
    return q, k, torch.randn(1, 32, 1, 64).half()


def test_huge_scores_keep_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from sdx_kernels._triton.attention_bwd_launch import WIDE

    inputs = huge_scores()
    grad = torch.ones(1, 32, 1, 64).half()
    dq, dk, dv = launch(inputs, grad, 0.125)
    truth = autograd(inputs, grad, 0.125)
    limit = 2e-3 * truth[2].abs().max().item()
    # an LSE of 1.8e6 is a multiple of 0.125: by itself it would scale weights by up to 6 %
    assert_close(dv, truth[2], limit=limit)
    # dS has a few units, is rounded to fp16, and is multiplied by keys of 382 or queries of 576
    assert_close(dq, truth[0], limit=5e-4 * 382 * 0.125)
    assert_close(dk, truth[1], limit=5e-4 * 576 * 0.125 * 32)
    # and it is the tail that does it: whoever takes such rows for plain ones is far off
    monkeypatch.setitem(WIDE, torch.float16, math.inf)
    assert largest_error(launch(inputs, grad, 0.125)[2], truth[2]) > 4 * limit


def test_huge_scores_keep_what_does_not_cancel() -> None:
    q, k, v = huge_scores()
    # a channel that no score sees: dq is some tenths there, and off by as much as its weights are
    q[..., -1] = 0.0
    k[..., -1] = torch.randn(1, 32, 1).half()
    grad = torch.randn(1, 32, 1, 64).half()
    dq, _, dv = launch((q, k, v), grad, 0.125)
    truth = autograd((q, k, v), grad, 0.125)
    for ours, right in ((dq[..., -1], truth[0][..., -1]), (dv, truth[2])):
        assert_close(ours, right, limit=2e-3 * right.abs().max().item())
    # each head looks at its own rows: beside a plain one nothing changes
    plain = half(1, 32, 32, 1, 64)
    for place in (0, 1):
        pairs = [(a, b) if place else (b, a) for a, b in zip(plain, (q, k, v), strict=True)]
        both = tuple(torch.cat(pair, 2) for pair in pairs)
        beside = launch(both, grad.expand(1, 32, 2, 64), 0.125)  # type: ignore[arg-type]
        assert torch.equal(beside[0][:, :, place], dq[:, :, 0])
        assert torch.equal(beside[2][:, :, place], dv[:, :, 0])


def test_a_wide_row_changes_no_other_head() -> None:
    q, k, v = half(2, 40, 50, 2, 16)
    grad = unit_grad((q, k, v))
    plain = launch((q, k, v), grad)
    tall = q.clone()
    tall[1, 17, 0] *= 2000.0
    found = launch((tall, k, v), grad)
    hold(found, (tall, k, v), grad, 0.3)
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1, :, 1], other[1, :, 1])
        assert not torch.equal(one[1, :, 0], other[1, :, 0])


def portable(inputs: Inputs, grad: torch.Tensor, scale: float = 0.3) -> tuple[torch.Tensor, ...]:
    """What the kernels without descriptors make of it, with tiles of the same sizes."""
    from sdx_kernels._triton.attention_bwd_launch import launch_attention_bwd

    q, k, v = inputs
    out, lse = attention(q.float(), k.float(), v.float(), scale=scale)
    ladder = BackwardLadder(SMALL.rows, SMALL.keys, SMALL.queries, ())
    return launch_attention_bwd(
        grad, q, k, v, out.half(), lse, None, scale=scale, ladder=ladder
    )[:3]  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_values_that_are_not_finite_show_where_the_portable_kernels_show_them(value: float) -> None:
    q, k, v = half(1, 40, 50, 1, 16)
    grad = unit_grad((q, k, v))
    for place in range(4):
        tensors = [t.clone() for t in (q, k, v, grad)]
        tensors[place][0, 3, 0, 5] = value
        a, b, c, upstream = tensors
        found = launch((a, b, c), upstream)
        assert any(gradient.isnan().any() for gradient in found)
        for ours, theirs in zip(found, portable((a, b, c), upstream), strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())


def test_keys_that_do_not_exist_weigh_nothing_however_low_the_others_score() -> None:
    q, k, v = half(1, 20, 35, 1, 16)
    # scores near −400: a key with a score of 0 would weigh 2⁵⁷⁷
    inputs = q * 0.1 + 9.0, k * 0.1 - 9.25, v
    grad = unit_grad(inputs)
    rows = zip(
        launch(inputs, grad), autograd(inputs, grad, 0.3), portable(inputs, grad), strict=True
    )
    for ours, truth, theirs in rows:
        # dq is a sum of terms that cancel: the bound is what the same roundings cost elsewhere
        assert largest_error(ours, truth) <= 1.5 * largest_error(theirs, truth)
    # and near 0, a tile's missing keys would have a dS of −delta, which fp16 does not hold
    found = launch((q, k, torch.full_like(v, 1000.0)), torch.full_like(q, 1000.0))
    assert all(gradient.isfinite().all() for gradient in found)
    assert found[0].abs().max() < 1e-2


def test_a_row_that_attended_nothing_gives_nothing() -> None:
    from sdx_kernels._triton.attention_tma_bwd_launch import launch_attention_tma_bwd

    q, k, v = half(1, 20, 20, 1, 16)
    grad = unit_grad((q, k, v))
    out, lse = attention(q.float(), k.float(), v.float(), scale=0.3)
    out[0, 7], lse[0, 0, 7] = 0.0, -math.inf
    found = launch_attention_tma_bwd(grad, q, k, v, out.half(), lse, scale=0.3, ladder=SMALL)
    assert not found[0][0, 7].any()
    rest = [row for row in range(20) if row != 7]
    others = q[:, rest], k, v
    truth = autograd(others, grad[:, rest], 0.3)
    assert_close(found[0][:, rest], truth[0], limit=3e-3)
    assert_close(found[1], truth[1], limit=3e-3)
    assert_close(found[2], truth[2], limit=3e-3)


def test_the_operator_reaches_them_by_name() -> None:
    inputs = half(1, 35, 50, 2, 40)
    grad = unit_grad(inputs)
    before = count("triton-tma-backward")
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    q, k, v = leaves
    found = torch.autograd.grad(memory_efficient_attention(q, k, v, op=DESCRIPTORS), leaves, grad)
    assert count("triton-tma-backward") == before + 1
    hold(found, inputs, grad, 40**-0.5)
    # interpreted, op="triton" keeps the portable ones
    torch.autograd.grad(memory_efficient_attention(q, k, v, op="triton"), leaves, grad)
    assert count("triton-tma-backward") == before + 1


def test_gradients_of_the_log_sum_exp() -> None:
    inputs = half(1, 20, 40, 2, 16)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    before = count("triton-tma-backward")
    q, k, v = leaves
    out, lse = memory_efficient_attention_partial(q, k, v, scale=0.3, op=DESCRIPTORS)
    weight = torch.linspace(-1.0, 1.0, 20)
    found = torch.autograd.grad((out.float().sum() + (lse * weight).sum()), leaves)
    assert count("triton-tma-backward") == before + 1
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    right, right_lse = attention(*exact, scale=0.3)
    truth = torch.autograd.grad(right.sum() + (right_lse * weight.double()).sum(), exact)
    for ours, theirs in zip(found, truth, strict=True):
        assert_close(ours, theirs, limit=4e-3)


def test_what_they_cannot_take_is_refused_in_words() -> None:
    q, k, v = half(1, 9, 11, 1, 16)

    def reasons(*args: Any, **more: Any) -> str:
        return "; ".join(
            BACKWARD.get("triton-tma").reasons(
                attention_inputs(*args, explicit=True, **more).signature
            )
        )

    assert reasons(q, k, v) == ""
    assert "attn_bias is a tensor" in reasons(q, k, v, torch.zeros(9, 11))
    assert "LowerTriangularMask" in reasons(q, k, v, LowerTriangularMask())
    assert "dropout" in reasons(q, k, v, p=0.5)
    assert "float32" in reasons(q.float(), k.float(), v.float())
    assert "multiples of 8" in reasons(q[..., :12], k[..., :12], v)
    wide = half(1, 9, 11, 1, 136)
    assert "> 128" in reasons(*wide)


def test_a_refused_launch_goes_on_with_the_portable_kernels() -> None:
    q, k, v = half(1, 20, 20, 2, 24)
    odd = torch.zeros(1, 20, 2, 25, dtype=torch.float16)[..., :24]
    odd.copy_(k)
    forward = attention_inputs(q, odd, v, explicit=True)
    grad = unit_grad((q, k, v))
    out, lse = attention(q.float(), k.float(), v.float(), scale=forward.scale)
    inputs = BackwardInputs(forward, grad, out.half(), lse)
    before = count("triton-tma-backward"), count("triton-backward")
    found = attention_library.backward(inputs, ("triton-tma", "triton"))
    assert (count("triton-tma-backward"), count("triton-backward")) == (before[0], before[1] + 1)
    hold(found[:3], (q, k, v), grad, forward.scale)
    with pytest.raises(LaunchRefused):
        attention_library.backward(inputs, ("triton-tma",))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_a_card_with_descriptors_gets_them(capability: tuple[int, int]) -> None:
    def chosen(inputs: Inputs, only: tuple[str, ...] | None, **more: Any) -> str:
        """Its name; whoever else would do is told about the choice, not about another kernel."""
        signature = attention_inputs(*inputs, explicit=only is not None, **more).signature
        card = Target("cuda", capability, SHARED_MEMORY[capability], "a card", 100)
        choice = BACKWARD.select(replace(signature, target=card, interpreting=False), only=only)
        assert choice is not None
        others = " ".join(choice.reasons.get("reference", ()))
        assert choice.name == "triton" or "descriptors" in others
        assert choice.name == "triton-tma" or "descriptors" not in others
        return choice.name

    ours = "triton-tma" if capability >= (9, 0) else "triton"
    for only in (None, ("triton", "triton-tma", "triton-wide", "reference")):
        for dtype in (torch.float16, torch.bfloat16):
            inputs = random_inputs(1, 8, 8, 1, 64, dtype=dtype)
            assert chosen(inputs, only) == ours
            assert chosen(inputs, only, attn_bias=LowerTriangularMask()) == "triton"
        assert chosen(random_inputs(1, 8, 8, 1, 64), only) == "triton"
        assert chosen(half(1, 8, 8, 1, 160), only) == "triton"
    assert chosen(half(1, 8, 8, 1, 64), ("triton",)) == "triton"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_the_ladder(capability: tuple[int, int]) -> None:
    for dim in (40, 64, 80, 128):
        for dtype in (torch.float16, torch.bfloat16):
            ladder = ladder_for_tma_bwd(capability, dim, dim, dtype)
            wide_on_12 = capability[0] == 12 and dim > 64
            assert (ladder is None) == (capability < (9, 0) or wide_on_12)
            named = candidates(capability, dim, dim, dtype)
            assert bool(named) == (capability[0] == 9)
            for one in (ladder, *named.values()):
                if one is None:
                    continue
                for kernel in TMA_KERNELS:
                    for step in getattr(one, kernel):
                        assert step.source
                        used = tma_bwd_shared_bytes(kernel, step, dim, dim, 2)
                        assert used <= SHARED_MEMORY[capability]
            assert ladder not in named.values()
    for dims, dtype in (((160, 160), torch.float16), ((20, 64), torch.float16)):
        assert ladder_for_tma_bwd(capability, *dims, dtype) is None
    assert ladder_for_tma_bwd(capability, 64, 64, torch.float32) is None
    assert ladder_for_tma_bwd(capability, 64, 64, torch.float16, 16384) is None
