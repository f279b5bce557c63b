"""Calls that are settled once: the same bits, and no stale choice."""

import pytest
import torch

from sdx_kernels import attend, count, target
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
