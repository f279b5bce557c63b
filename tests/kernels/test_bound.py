"""Launches that are compiled are started again without anything but tensors being looked at."""

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from sdx_kernels import KeyPaddingMask, LowerTriangularMask, attend, target
from sdx_kernels._triton import attention_fwd, attention_short, attention_tma
from sdx_kernels._triton.attention_launch import LOG2E
from sdx_kernels.ops import attention_memo
from sdx_kernels.target import Target
from sdx_kernels.testing import random_inputs

KERNELS = {
    "triton": (attention_fwd, "attention_fwd_kernel"),
    "triton-short": (attention_short, "attention_short_kernel"),
    "triton-tma": (attention_tma, "attention_tma_kernel"),
}


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
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """Kernels that note and compute nothing, on a card that has them all."""
    # it quickens kernels when it is first imported, and these are not to be
    importlib.import_module("sdx_kernels._triton.attention_launchers")
    found = {}
    for name, (module, kernel) in KERNELS.items():
        found[name] = Recorder(getattr(module, kernel).arg_names)
        monkeypatch.setattr(module, kernel, found[name])
    card = Target("cuda", (9, 0), 232448, "a card", 132)
    monkeypatch.setattr(target, "of", lambda device: card)
    # the interpreter has no bfloat16, and here nothing computes
    monkeypatch.setattr(target, "interpreting", lambda: False)
    monkeypatch.setattr(attention_memo, "_known", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the CPU's index
    return found


def inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
    return tuple(random_inputs(2, 130, 77, 3, 64, dtype=torch.float16, seed=seed))


def masks(seed: int = 0) -> dict[str, Any]:
    numbers = torch.rand(2, 3, 130, 77, generator=torch.Generator().manual_seed(seed))
    keys = torch.rand(2, 77, generator=torch.Generator().manual_seed(seed)) > 0.3
    return {
        "none": None,
        "causal": LowerTriangularMask(),
        "keys": KeyPaddingMask(keys),
        "keys of all": KeyPaddingMask(keys[:1]),
        "bias": numbers.half(),
        "bias of heads": numbers[:1, :, :1].half(),
        "bool": numbers > 0.3,
    }


def served(op: str, name: str) -> bool:
    return (name == "none") if op == "triton-tma" else (op == "triton" or name != "causal")


CALLS = [(op, name) for op in KERNELS for name in masks() if served(op, name)]


def comparable(argument: Any) -> Any:
    """A tensor's address, size and dtype: what a kernel gets of it."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr(), argument.dtype
    if isinstance(argument, attention_tma.TensorDescriptor):
        return argument.base.data_ptr(), argument.shape, argument.strides, argument.block_shape
    return argument


@torch.no_grad()
@pytest.mark.parametrize(("op", "name"), CALLS)
def test_a_launch_again_gets_what_a_first_launch_would(
    op: str, name: str, recorders: dict[str, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, written = recorders[op], torch.empty(2, 130, 3, 64, dtype=torch.float16)
    # one output for all, so that whole launches can be compared
    monkeypatch.setattr(torch, "empty", lambda *a, **k: written)
    attend(*inputs(), masks()[name], op=op)
    attend(*inputs(), masks()[name], op=op)
    # the first launch of a settled call is the last that is inspected
    assert (len(recorder.inspected), len(recorder.again)) == (2, 0)
    others, mask = inputs(1), masks(1)[name]
    out, choice = attend(*others, mask, scale=0.25, op=op)
    assert choice.name == op
    assert out is written
    assert (len(recorder.inspected), len(recorder.again)) == (2, 1)
    attention_memo._known.clear()
    attend(*others, mask, scale=0.25, op=op)
    assert len(recorder.inspected) == 3
    again, first = ([*map(comparable, call)] for call in (recorder.again[0], recorder.inspected[2]))
    assert again == first
    assert (0.25 if name.startswith("bias") or name == "bool" else 0.25 * LOG2E) in again


CHANGES = ["strides", "alignment", "dtype", "length", "sign", "negated", "mask's strides"]


@torch.no_grad()
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_a_launch_is_looked_at_again(
    change: str, op: str, recorders: dict[str, Recorder]
) -> None:
    recorder, (q, k, v), scale = recorders[op], inputs(), 0.5
    mask = None if op == "triton-tma" else masks()["bias"]
    if change == "mask's strides" and mask is None:
        return
    for _ in range(3):
        attend(q, k, v, mask, scale=scale, op=op)
    assert (len(recorder.inspected), len(recorder.again)) == (2, 1)
    if change == "strides":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif change == "alignment":
        q = torch.cat([q.flatten()[:8], q.flatten()])[8 if op == "triton-tma" else 1 :]
        q = q[: 2 * 130 * 3 * 64].view(2, 130, 3, 64)
    elif change == "dtype":
        q, k, v = (t.bfloat16() for t in (q, k, v))
    elif change == "length":
        k, v = k[:, :76], v[:, :76]
        mask = None if mask is None else mask[..., :76]
    elif change == "sign":
        scale = -scale
    elif change == "negated":
        q = torch._neg_view(q)
    else:
        assert mask is not None
        mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    if change == "alignment" and op == "triton-tma":
        # descriptors take whole 16 bytes only, which these are
        attend(q, k, v, mask, scale=scale, op=op)
        assert (len(recorder.inspected), len(recorder.again)) == (2, 2)
        return
    for calls in (3, 4):
        attend(q, k, v, mask, scale=scale, op=op)
        assert (len(recorder.inspected), len(recorder.again)) == (calls, 1)
        if change in ("strides", "sign", "mask's strides"):
            # the call is settled; only its launch was new
            break


@torch.no_grad()
def test_launches_of_one_call_do_not_grow_without_end(
    recorders: dict[str, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_memo, "_MOST", 3)
    _, k, v = inputs()
    for room in range(8):
        wide = torch.zeros(2, 130, 3, 64 + 8 * room, dtype=torch.float16)[..., :64]
        attend(wide, k, v, op="triton")
    (known,) = attention_memo._known.values()
    assert 1 <= len(known.again) <= 3


@torch.no_grad()
def test_another_current_card_is_never_handed_a_binary(
    recorders: dict[str, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        attend(*inputs(), op="triton")
    assert len(recorders["triton"].again) == 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    attend(*inputs(), op="triton")
    assert len(recorders["triton"].again) == 1


@torch.no_grad()
@pytest.mark.parametrize("settled", [False, True])
def test_tensors_that_a_descriptor_cannot_hold_demote_no_others(
    settled: bool, recorders: dict[str, Recorder]
) -> None:
    good = random_inputs(1, 1024, 1024, 1, 64, dtype=torch.bfloat16)
    odd = torch.cat([good[0].flatten()[:1], good[0].flatten()])[1:].view(good[0].shape)
    assert odd.data_ptr() % 16
    if settled:
        assert attend(*good)[1].name == "triton-tma"
    for _ in range(2):
        assert attend(odd, *good[1:])[1].name != "triton-tma"
        assert attend(*good)[1].name == "triton-tma"


@torch.no_grad()
@pytest.mark.parametrize("op", KERNELS)
def test_a_subclass_of_tensor_is_not_handed_on(op: str, recorders: dict[str, Recorder]) -> None:
    class Mine(torch.Tensor):
        pass

    tensors = [tensor.as_subclass(Mine) for tensor in inputs()]
    assert {type(attend(*tensors, op=op)[0]) for _ in range(4)} == {torch.Tensor}
    assert recorders[op].again


@torch.no_grad()
@pytest.mark.parametrize("op", KERNELS)
def test_a_strided_tensor_is_copied_once_a_call(
    op: str, recorders: dict[str, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    real = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t: copies.append(1) or real(t))
    _, k, v = inputs()
    strided = torch.zeros(2, 130, 3, 128, dtype=torch.float16)[..., ::2]
    for calls in (1, 2, 3):
        attend(strided, k, v, op=op)
        assert len(copies) == calls
