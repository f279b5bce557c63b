"""Calls that are settled once: the same bits, and no stale choice."""

import pytest
import torch

from sdx_kernels import (
    KeyPaddingMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    attend,
    count,
    target,
)
from sdx_kernels.bias import (
    BlockDiagonalMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
)
from sdx_kernels.ops import attention_memo
from sdx_kernels.target import Target
from sdx_kernels.testing import random_inputs


@pytest.fixture(autouse=True)
def empty_memo(monkeypatch):
    monkeypatch.setattr(attention_memo, "_known", {})


def _known():
    return len(attention_memo._known)


@torch.no_grad()
def test_the_second_call_gives_the_same_bits_and_counts():
    inputs = random_inputs(2, 33, 77, 3, 40)
    first, choice = attend(*inputs)
    before = count(choice.name)
    second, again = attend(*inputs)
    assert torch.equal(first, second)
    assert again == choice
    assert count(choice.name) == before + 1
    assert _known() == 1


@torch.no_grad()
def test_new_values_strides_and_scales_are_used():
    inputs = random_inputs(1, 16, 16, 2, 8)
    attend(*inputs)
    other = tuple(
        t.transpose(1, 2).contiguous().transpose(1, 2)
        for t in random_inputs(1, 16, 16, 2, 8, seed=7)
    )
    for scale in (None, 0.0, -0.3):
        remembered = attend(*other, scale=scale)[0]
        attention_memo._known.clear()
        assert torch.equal(remembered, attend(*other, scale=scale)[0])


@torch.no_grad()
def test_conversions_are_never_remembered():
    query, key, value = random_inputs(1, 8, 8, 1, 16)
    for _ in range(2):
        out, _ = attend(query, key.half(), value.half())
        assert out.dtype == torch.float32
    assert _known() == 0


def test_gradients_take_the_long_way():
    inputs = random_inputs(1, 8, 8, 1, 16)
    with torch.no_grad():
        attend(*inputs)
    inputs[0].requires_grad_()
    attend(*inputs)[0].sum().backward()
    assert inputs[0].grad is not None


@torch.no_grad()
def test_autocast_takes_the_long_way():
    inputs = random_inputs(1, 8, 8, 1, 16)
    attend(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(*inputs)[0].dtype == torch.bfloat16


@torch.no_grad()
def test_another_device_reading_makes_a_new_choice(monkeypatch):
    inputs = random_inputs(1, 8, 8, 1, 16)
    attend(*inputs)
    seen = []
    select = attention_memo.remember
    monkeypatch.setattr(
        "sdx_kernels.ops.attention.remember", lambda *a: (seen.append(a), select(*a))
    )
    attend(*inputs)
    assert not seen
    monkeypatch.setattr(target, "of", lambda device: Target("cpu", name="another"))
    attend(*inputs)
    assert seen


@torch.no_grad()
def test_the_off_switch_is_seen_at_once(monkeypatch):
    inputs = random_inputs(1, 8, 8, 1, 16)
    attend(*inputs)
    monkeypatch.setenv("SDX_DISABLE", "1")
    attend(*inputs)
    assert _known() == 2


@torch.no_grad()
def test_it_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(attention_memo, "_MOST", 4)
    for length in range(1, 12):
        attend(*random_inputs(1, length, 8, 1, 16))
    assert _known() <= 4


def masks(seed=0):
    """Masks of 9 queries and 21 keys whose choice is remembered, other ones for another seed."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(2, 2, 9, 21, generator=generator)
    return {
        "causal": LowerTriangularMask(),
        "causal from the end": LowerTriangularFromBottomRightMask(),
        "keys": KeyPaddingMask(numbers[:, 0, 0] > 0.3),
        "keys of all": KeyPaddingMask(numbers[:1, 0, 0] > 0.3),
        "float": numbers,
        "of heads": numbers[:1, :, :1],
        "bool": numbers > 0.3,
    }


@torch.no_grad()
@pytest.mark.parametrize("op", [None, "triton", "reference"])
@pytest.mark.parametrize("name", masks())
def test_masked_calls_are_settled_once_too(name, op, interpreter):
    inputs = random_inputs(2, 9, 21, 2, 16)
    attend(*inputs, masks()[name], op=op)
    assert _known() == 1
    others = random_inputs(2, 9, 21, 2, 16, seed=5)
    mask = masks(seed=5)[name]
    (known,) = attention_memo._known.values()
    before = count(known.choice.name)
    found, choice = attend(*others, mask, scale=0.3, op=op)
    assert count(choice.name) == before + 1
    assert _known() == 1
    attention_memo._known.clear()
    expected, again = attend(*others, mask, scale=0.3, op=op)
    assert torch.equal(found, expected)
    assert choice == again


@torch.no_grad()
def test_each_mask_has_a_choice_of_its_own():
    inputs = random_inputs(2, 9, 21, 2, 16)
    alone = {name: attend(*inputs, mask)[0] for name, mask in masks().items()}
    alone["none"] = attend(*inputs)[0]
    for name, mask in (*masks().items(), ("none", None)):
        assert torch.equal(attend(*inputs, mask)[0], alone[name])
    assert _known() == len(alone) == 8
    # the dtype of a bias decides too
    attend(*inputs, masks()["float"].double())
    assert _known() == 9


@torch.no_grad()
def test_masks_with_numbers_of_their_own_take_the_long_way():
    class Mine(LowerTriangularMask):
        pass

    inputs = random_inputs(1, 9, 21, 2, 16)
    for mask in (
        LocalAttentionFromBottomRightMask(3, 3),
        LowerTriangularFromBottomRightLocalAttentionMask(9),
        LowerTriangularMask().add_bias(torch.ones(9, 21)),
        BlockDiagonalMask.from_seqlens((3, 6), (7, 14)),
        Mine(),
        torch.ones(9, 21),
    ):
        attend(*inputs, mask)
    assert _known() == 0


def test_a_bias_that_wants_a_gradient_takes_the_long_way(interpreter):
    inputs = random_inputs(1, 8, 8, 1, 16)
    bias = torch.zeros(1, 1, 8, 8)
    attend(*inputs, bias, op="triton")
    assert _known() == 1
    bias.requires_grad_()
    attend(*inputs, bias, op="triton")[0].sum().backward()
    assert bias.grad is not None


@torch.no_grad()
def test_what_a_mask_is_checked_for_is_checked_every_time():
    inputs = random_inputs(2, 9, 21, 2, 16)
    for mask in masks().values():
        attend(*inputs, mask)
    for wrong in (KeyPaddingMask(torch.ones(2, 20) > 0), torch.ones(1, 2, 9, 20)):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"does not fit|cannot be broadcast"):
                attend(*inputs, wrong)
