"""Offsets beyond 32 bits, really read and written: sparse memory, and the last programs alone.

The tensors lie in reserved addresses, of which only the pages that are touched exist; where a
32-bit product would point instead is reserved too, so that a wrong offset reads zeros.
"""

import math
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdx_kernels import KeyPaddingMask, count, memory_efficient_attention
from sdx_kernels.testing import assert_close, random_inputs, reference64

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
pytestmark = pytest.mark.usefixtures("interpreter")

#: two of these are beyond 32 bits
FAR = 2**30

#: the largest step of rows whose tiles are not copied first: 128 of these are just below 2**31
ROW = 2**24 - 512

Strides = tuple[int, ...]


#: Linux's flag, which Python names from 3.13 on: no memory is promised for the addresses
NORESERVE = 0x4000


def sparse(shape: Strides, strides: Strides, dtype: torch.dtype) -> torch.Tensor:
    """Zeros at these strides, in memory that is there only where it is written."""
    span = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    # room on both sides for offsets that have lost their upper bits
    front = 2**31 if span > 2**31 else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, (2 * front + span) * dtype.itemsize, flags=flags)
    # a touched page is 4 KiB then, and not 2 MiB
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    # the tensor keeps the memory
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides, front)


def place(what: torch.Tensor, strides: Strides) -> torch.Tensor:
    """A tensor's values at these strides."""
    return sparse(tuple(what.shape), strides, what.dtype).copy_(what)


@pytest.fixture
def only_last(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """`only_last(n)`: from then on a launch runs the last of n equal parts of its programs.

    Gives how many programs each launch asked for.
    """
    from triton.runtime import interpreter

    builder, asked = interpreter.interpreter_builder, []

    def shorten(parts: int) -> list[int]:
        launch = interpreter.GridExecutor.__call__
        set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx

        def launch_last(self: Any, *arguments: Any, **options: Any) -> None:
            programs, *rest = self.grid
            assert programs % parts == 0
            first = programs - programs // parts
            asked.append(programs)
            self.grid = (programs - first, *rest)
            monkeypatch.setattr(builder, "set_grid_dim", lambda _, *yz: set_dim(programs, *yz))
            monkeypatch.setattr(builder, "set_grid_idx", lambda x, *yz: set_index(first + x, *yz))
            launch(self, *arguments, **options)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_last)
        return asked

    return shorten


def far(rows: int) -> Strides:
    """BMHK strides that no two elements share; three batch items, or heads, are beyond 32 bits."""
    return FAR + 4096, rows, FAR + 65536, 1


def test_the_memory_holds_what_is_put_there() -> None:
    (q, _, _) = random_inputs(3, 270, 270, 3, 16, dtype=torch.float16)
    there = place(q, far(ROW))
    assert there.stride() == far(ROW)
    assert torch.equal(there, q)
    # nothing lies where 32 bits would look
    last = sum((size - 1) * step for size, step in zip(there.shape, there.stride(), strict=True))
    wrapped = (last + 2**31) % 2**32 - 2**31
    assert wrapped != last
    beside = there.as_strided((1,), (1,), there.storage_offset() + wrapped)
    assert beside.item() == 0.0


def inputs_of(rows: int, length: int) -> tuple[Any, Any]:
    near = random_inputs(3, length, length, 3, 16, dtype=torch.float16)
    return near, tuple(place(tensor, far(rows)) for tensor in near)


def masks(kind: str, length: int) -> tuple[Any, Any]:
    """The same mask near and far."""
    generator = torch.Generator().manual_seed(4)
    if kind == "keys":
        exists = torch.rand(3, length, generator=generator) > 0.3
        return KeyPaddingMask(exists), KeyPaddingMask(place(exists, (FAR + 4096, 1)))
    if kind == "bias":
        bias = torch.randn(3, 3, length, length, generator=generator).half()
        strides = FAR + 65536, FAR + 4096 * length, ROW, 1
        return bias, place(bias, strides)
    return None, None


@pytest.mark.parametrize(
    ("rows", "length", "kind"),
    [
        (ROW, 270, "none"),
        (ROW, 270, "keys"),
        (ROW, 270, "bias"),
        # rows so far apart that keys are copied and queries are not
        (FAR, 3, "none"),
    ],
    ids=["rows", "key-mask", "bias", "far-rows"],
)
def test_strides_of_a_billion(
    only_last: Callable[[int], list[int]], rows: int, length: int, kind: str
) -> None:
    near, distant = inputs_of(rows, length)
    mask, distant_mask = masks(kind, length)
    before = count("triton")
    asked = only_last(9)
    out = memory_efficient_attention(*distant, distant_mask, op="triton")
    assert count("triton") == before + 1
    assert len(asked) == 1
    # the last ninth of the programs is the last head of the last item
    assert_close(out[-1:, :, -1:], reference64(*near, mask)[-1:, :, -1:])


def test_gradients_at_strides_of_a_billion(only_last: Callable[[int], list[int]]) -> None:
    length = 270
    near, distant = inputs_of(ROW, length)
    grad = torch.randn(3, length, 3, 16, generator=torch.Generator().manual_seed(5)).half()
    leaves = [tensor.requires_grad_() for tensor in distant]
    truth = [tensor.double().requires_grad_() for tensor in near]
    asked = only_last(9)
    before = count("triton-backward")
    out = memory_efficient_attention(*leaves, op="triton")
    found = torch.autograd.grad(out, leaves, place(grad, far(ROW)))
    assert count("triton-backward") == before + 1
    # forward, row facts, dk with dv, dq
    assert len(asked) == 4
    expected = torch.autograd.grad(reference64(*truth), truth, grad.double())
    for ours, right in zip(found, expected, strict=True):
        largest = right[-1, :, -1].abs().max().item()
        assert_close(ours[-1, :, -1], right[-1, :, -1], limit=5e-3 * max(1.0, largest))


@pytest.mark.parametrize("layout", ["heads inside", "heads outside"])
def test_case_029_65537_heads(
    only_last: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    """2³¹ elements in the query and the output, and a grid that y or z could not hold."""
    heads, queries, keys, dim = 65537, 513, 20, 64
    plain = torch.empty

    def far_empty(*shape: Any, **options: Any) -> torch.Tensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if math.prod(sizes) < 2**24:
            return plain(*shape, **options)
        steps = [math.prod(sizes[index + 1 :]) for index in range(len(sizes))]
        return sparse(tuple(sizes), tuple(steps), options["dtype"])

    def strides(length: int) -> Strides:
        if layout == "heads inside":
            return heads * length * dim, heads * dim, dim, 1
        return heads * length * dim, dim, length * dim, 1

    q, k, v = (
        sparse((1, length, heads, dim), strides(length), torch.float16)
        for length in (queries, keys, keys)
    )
    near = random_inputs(1, queries, keys, 1, dim, dtype=torch.float16)
    for tensor, values in zip((q, k, v), near, strict=True):
        tensor[:, :, -1:] = values
    before = count("triton")
    asked = only_last(heads)
    monkeypatch.setattr(torch, "empty", far_empty)
    out = memory_efficient_attention(q, k, v, op="triton")
    monkeypatch.setattr(torch, "empty", plain)
    assert count("triton") == before + 1
    (programs,) = asked
    assert programs > 65535 * 2
    assert out.shape == (1, queries, heads, dim)
    assert out.numel() > 2**31
    assert_close(out[:, :, -1:], reference64(*near))
    # no other program ran
    assert not out[:, -1:, :-1].any()
