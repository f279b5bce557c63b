"""Launches that are compiled are started again without Triton's inspection of their arguments."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from sdx_kernels._triton import attention_short, attention_tma
from sdx_kernels._triton.attention_launch import LOG2E
from sdx_kernels.testing import random_inputs
from sdx_kernels.tuning.attention_short import ladder_for_short
from sdx_kernels.tuning.attention_tma import ladder_for_tma


class Recorder:
    """A jit function that notes its launches, and gives a binary that notes its own."""

    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names = arg_names
        self.inspected: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        names = self.arg_names

        def first(*args: Any, **options: Any) -> "Binary":
            self.inspected.append((grid, *args, *(options[name] for name in names[len(args) :])))
            return Binary(self)

        return first


class Binary:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.recorder.again.append((grid, *args))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder(attention_short.attention_short_kernel.arg_names)
    monkeypatch.setattr(attention_short, "attention_short_kernel", found)
    monkeypatch.setattr(attention_short, "_bound", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the CPU's index
    return found


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
    ladder = ladder_for_short((9, 0), q.shape[3], v.shape[3], q.dtype, k.shape[1])
    return attention_short.plain_attention_short(q, k, v, scale=scale, ladder=ladder)


def test_the_second_launch_has_the_same_arguments_with_new_tensors(recorder: Recorder) -> None:
    first = random_inputs(2, 130, 77, 3, 64, dtype=torch.float16)
    plain(*first)
    other = random_inputs(2, 130, 77, 3, 64, dtype=torch.float16, seed=1)
    out = plain(*other, scale=0.25)
    assert out.shape == (2, 130, 3, 64)
    assert len(recorder.inspected) == 1
    (before,), (again,) = recorder.inspected, recorder.again
    assert len(again) == len(before)
    q, k, v = other
    changing = (q, k, v, q, q, out, out)
    assert all(a is b for a, b in zip(again[1:8], changing, strict=True))
    assert again[8] == 0.25 * LOG2E
    assert again[0] == before[0]
    assert again[9:] == before[9:]


@pytest.mark.parametrize("change", ["strides", "alignment", "dtype", "length"])
def test_what_decides_a_binary_is_looked_at_again(recorder: Recorder, change: str) -> None:
    q, k, v = random_inputs(2, 130, 77, 3, 64, dtype=torch.float16)
    plain(q, k, v)
    if change == "strides":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif change == "alignment":
        q = torch.cat([q.flatten()[:1], q.flatten()])[1:].view(q.shape)
        assert q.data_ptr() % 16
    elif change == "dtype":
        q, k, v = (t.bfloat16() for t in (q, k, v))
    else:
        k, v = k[:, :76], v[:, :76]
    plain(q, k, v)
    assert len(recorder.inspected) == 2
    assert not recorder.again


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder(attention_tma.attention_tma_kernel.arg_names)
    monkeypatch.setattr(attention_tma, "attention_tma_kernel", found)
    monkeypatch.setattr(attention_tma, "_bound", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return found


def plain_tma(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float = 0.5
) -> torch.Tensor:
    ladder = ladder_for_tma((9, 0), q.shape[3], v.shape[3], q.dtype, k.shape[1])
    return attention_tma.plain_attention_tma(q, k, v, scale=scale, ladder=ladder)


def test_descriptors_are_made_for_the_new_tensors(descriptors: Recorder) -> None:
    plain_tma(*random_inputs(2, 130, 128, 3, 64, dtype=torch.bfloat16))
    other = random_inputs(2, 130, 128, 3, 64, dtype=torch.bfloat16, seed=1)
    out = plain_tma(*other, scale=0.25)
    (before,), (again,) = descriptors.inspected, descriptors.again
    assert len(again) == len(before)
    changing = zip(again[1:5], (*other, out), before[1:5], strict=True)
    for descriptor, tensor, earlier in changing:
        assert descriptor.base is tensor
        assert descriptor.block_shape == earlier.block_shape
    assert again[5:8] == (None, None, 0.25 * LOG2E)
    assert again[0] == before[0]
    assert again[8:] == before[8:]


def test_a_scale_of_another_sign_is_another_binary(descriptors: Recorder) -> None:
    inputs = random_inputs(2, 130, 128, 3, 64, dtype=torch.bfloat16)
    plain_tma(*inputs)
    plain_tma(*inputs, scale=-0.5)
    assert len(descriptors.inspected) == 2
    assert not descriptors.again
