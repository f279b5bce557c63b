"""Binaries are found again without Triton's inspection, and only where Triton would find them."""

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from sdx_kernels._triton import binaries
from sdx_kernels._triton.attention_launch import run_ladder
from sdx_kernels._triton.binaries import _kind, quicken, start
from sdx_kernels.tuning.attention import AttentionConfig

GRID = (3, 1, 1)


class Binary:
    """What a launch returns: started again, it notes the grid and its arguments."""

    def __init__(self, kernel: "Kernel") -> None:
        self.kernel, self.number = kernel, len(kernel.inspected)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def started(*arguments: Any) -> None:
            self.kernel.again.append((grid, *arguments))
            self.kernel.by.append(self.number)

        return started


class Kernel:
    """A jit function with Triton's protocol, which notes what it is asked to inspect."""

    def __init__(self, refusing: int = 0) -> None:
        self.arg_names = ["x", "n", "BLOCK", "FLAG"]
        self.inspected: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []
        self.by: list[int] = []
        self.options: list[dict[str, Any]] = []
        self.refusing = refusing

    def run(self, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        self.inspected.append((grid, *arguments))
        self.options.append(options)
        if self.refusing:
            self.refusing -= 1
            raise OutOfResources(300000, 232448, "shared memory")
        return Binary(self)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.run(
            *arguments, grid=grid, warmup=False, **options
        )


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_compiled", {})
    monkeypatch.setattr(binaries, "_exact", {})


HALVES = torch.zeros(64, 64, dtype=torch.float16)


#: one of every kind that a launch may have, and what lies beside it
ARGUMENTS: dict[str, Any] = {
    **{str(n): n for n in (0, 1, 2, 15, 16, 17, 48, -1, -16, 2**31 - 1, 2**31, 2**31 + 1)},
    **{str(n): n for n in (2**63 - 1, 2**63, 2**63 + 1, -(2**31), -(2**31) - 1, -(2**31) - 16)},
    **{"true": True, "false": False, "none": None, "float": 1.0, "another float": 2.5},
    "fp16": HALVES,
    "fp16 of other sizes": HALVES[:32].clone(),
    "fp16 at 2 bytes": HALVES.flatten()[1:],
    "fp16 at 16 bytes": HALVES.flatten()[8:],
    "bf16": HALVES.bfloat16(),
    "fp32": HALVES.float(),
    "int32": HALVES.int(),
    "int64": HALVES.long(),
    "bytes": HALVES.view(torch.uint8),
}


def specialised(argument: Any) -> object:
    """What Triton itself compiles an argument as."""
    return native_specialize_impl(BaseBackend, argument, False, True, True)


def test_whatever_triton_tells_apart_has_another_key() -> None:
    differing = 0
    for (name, one), (other_name, other) in itertools.combinations(ARGUMENTS.items(), 2):
        if specialised(one) != specialised(other):
            differing += 1
            assert _kind(one) != _kind(other), (name, other_name)
    assert differing > 250


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0", "16"),
        ("16", "48"),
        ("2", "17"),
        ("15", "2147483647"),
        ("-16", "16"),
        ("2147483649", "9223372036854775807"),
        ("float", "another float"),
        ("true", "false"),
        ("fp16", "fp16 of other sizes"),
        ("fp16", "fp16 at 16 bytes"),
    ],
)
def test_what_triton_compiles_alike_has_one_key(one: str, other: str) -> None:
    assert specialised(ARGUMENTS[one]) == specialised(ARGUMENTS[other])
    assert _kind(ARGUMENTS[one]) == _kind(ARGUMENTS[other])


def test_a_binary_is_found_again_with_new_arguments() -> None:
    kernel = Kernel()
    start(kernel, GRID, (HALVES, 48), {"BLOCK": 64, "FLAG": True}, 4, 2, 168)
    other = torch.zeros(8, dtype=torch.float16)
    start(kernel, (5, 2, 1), (other, 32), {"BLOCK": 64, "FLAG": True}, 4, 2, 168)
    assert kernel.inspected == [(GRID, HALVES, 48)]
    ((grid, x, *rest),) = kernel.again
    assert grid == (5, 2, 1)
    assert x is other
    assert rest == [32, 64, True]
    assert kernel.options == [
        {
            "BLOCK": 64,
            "FLAG": True,
            "num_warps": 4,
            "num_stages": 2,
            "maxnreg": 168,
            "enable_fp_fusion": True,
        }
    ]


BASE: dict[str, Any] = {"x": HALVES, "n": 48, "BLOCK": 64, "FLAG": True, "warps": 4, "stages": 2}


DESCRIPTORS = {
    "fp16": TensorDescriptor(HALVES, [64, 64], [64, 1], [16, 16]),
    "fp16 of other sizes": TensorDescriptor(HALVES, [32, 48], [128, 1], [16, 16]),
    "fp16 of another tensor": TensorDescriptor(HALVES.clone(), [64, 64], [64, 1], [16, 16]),
    "fp16 in other blocks": TensorDescriptor(HALVES, [64, 64], [64, 1], [16, 32]),
    "bf16": TensorDescriptor(HALVES.bfloat16(), [64, 64], [64, 1], [16, 16]),
    "fp16 with NaN outside": TensorDescriptor(HALVES, [64, 64], [64, 1], [16, 16], padding="nan"),
}


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(DESCRIPTORS, 2)])
def test_descriptors_are_told_apart_as_triton_does(one: str, other: str) -> None:
    alike = specialised(DESCRIPTORS[one]) == specialised(DESCRIPTORS[other])
    # what is outside is filled as a field says that the type does not show
    alike = alike and DESCRIPTORS[one].padding == DESCRIPTORS[other].padding
    assert (_kind(DESCRIPTORS[one]) == _kind(DESCRIPTORS[other])) == alike


def test_a_launch_with_other_descriptors_is_found_again() -> None:
    kernel = Kernel()
    for name in ("fp16", "fp16 of other sizes", "fp16 of another tensor", "bf16"):
        start(kernel, GRID, (DESCRIPTORS[name], 48), {"BLOCK": 64, "FLAG": True}, 4)
    assert [arguments[1] for arguments in kernel.inspected] == [
        DESCRIPTORS["fp16"],
        DESCRIPTORS["bf16"],
    ]
    assert [arguments[1] for arguments in kernel.again] == [
        DESCRIPTORS["fp16 of other sizes"],
        DESCRIPTORS["fp16 of another tensor"],
    ]


def test_a_descriptor_of_another_triton_is_known_by_all_that_it_holds() -> None:
    """Triton 3.7 has a field that 3.6 has not: neither is asked for by name."""
    older, newer = (object.__new__(TensorDescriptor) for _ in range(2))
    fields = dict(vars(DESCRIPTORS["fp16"]))
    vars(older).update({k: fields[k] for k in ("base", "shape", "strides", "block_shape")})
    vars(newer).update(fields, rounding="another")
    assert len({_kind(older), _kind(newer), _kind(DESCRIPTORS["fp16"])}) == 3


def test_ints_are_known_by_value_and_by_kind() -> None:
    """Sizes that Triton compiles alike share a binary, and one that it does not has its own."""
    kernel = Kernel()
    for length in (48, 48, 2, 3, 2, 3, 64, 48, 1, 1, True, 7, 1, True):
        start(kernel, GRID, (HALVES, length), {"BLOCK": 64, "FLAG": True}, 4)
    assert [arguments[2] for arguments in kernel.inspected] == [48, 2, 1, True]
    assert [arguments[2] for arguments in kernel.again] == [48, 3, 2, 3, 64, 48, 1, 7, 1, True]
    assert kernel.by == [1, 2, 2, 2, 1, 1, 3, 2, 3, 4]


@pytest.mark.parametrize(
    "change",
    [
        {"x": ARGUMENTS["fp16 at 2 bytes"]},
        {"x": ARGUMENTS["bf16"]},
        {"n": 47},
        {"n": 1},
        {"n": 2**31},
        {"n": True},
        {"BLOCK": 32},
        {"FLAG": False},
        {"FLAG": 1},
        {"warps": 8},
        {"stages": 3},
        {"stages": None},
        {"registers": 128},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_decides_a_binary_is_inspected_again(change: dict[str, Any]) -> None:
    kernel = Kernel()
    for values in (BASE, {**BASE, **change}):
        constants = {"BLOCK": values["BLOCK"], "FLAG": values["FLAG"]}
        arguments = values["x"], values["n"]
        limit = values.get("registers")
        start(kernel, GRID, arguments, constants, values["warps"], values["stages"], limit)
    assert len(kernel.inspected) == 2
    assert not kernel.again


def test_two_kernels_and_two_cards_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Kernel(), Kernel()
    constants = {"BLOCK": 64, "FLAG": True}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for card in (0, 1, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda card=card: card)
        for kernel in (first, second):
            start(kernel, GRID, (HALVES, 48), constants, 4)
    assert [len(kernel.inspected) for kernel in (first, second)] == [2, 2]
    assert [len(kernel.again) for kernel in (first, second)] == [2, 2]


def test_unknown_arguments_go_tritons_way_every_time() -> None:
    kernel = Kernel()
    for _ in range(2):
        start(kernel, GRID, ((HALVES, HALVES), 48), {"BLOCK": 64, "FLAG": True}, 4)
    assert len(kernel.inspected) == 2


def test_what_is_kept_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_MOST", 3)
    kernel = Kernel()
    for block in range(10):
        start(kernel, GRID, (HALVES, 48), {"BLOCK": block, "FLAG": True}, 4)
        for length in range(2, 12):
            start(kernel, GRID, (HALVES, length), {"BLOCK": block, "FLAG": True}, 4)
    assert 1 <= len(binaries._compiled) <= 3
    assert 1 <= len(binaries._exact) <= 3


def call(kernel: Any, x: Any = HALVES, n: int = 48, grid: Any = GRID, **options: Any) -> Any:
    # compile-time arguments in another order than the kernel's
    return kernel[grid](x, n, **{"FLAG": True, "BLOCK": 64, "num_warps": 4, **options})


def test_a_quick_kernel_keeps_tritons_call() -> None:
    kernel = Kernel()
    quicken(kernel)
    quicken(kernel)
    first = call(kernel)
    other = torch.zeros(8, dtype=torch.float16)
    assert call(kernel, other, 32, (5, 1, 1)) is first
    assert kernel.inspected == [(GRID, HALVES, 48)]
    ((grid, x, *rest),) = kernel.again
    assert (grid, rest) == ((5, 1, 1), [32, 64, True])
    assert x is other
    call(kernel, num_stages=3)
    # what is no plain launch is not looked at
    call(kernel, grid=(3,))
    kernel.run(HALVES, 48, grid=GRID, warmup=True, BLOCK=64, FLAG=True, num_warps=4)
    kernel[GRID](HALVES, 48, BLOCK=64, num_warps=4)
    kernel[GRID](HALVES, 48, BLOCK=64, num_warps=4)
    assert len(kernel.inspected) == 6
    assert len(kernel.again) == 1


def test_a_jit_function_of_triton_is_quickened() -> None:
    def body(x: Any, n: Any, BLOCK: Any, FLAG: Any) -> None:
        pass

    kernel, asked = JITFunction(body), Kernel()
    kernel.run = asked.run
    quicken(kernel)
    for _ in range(3):
        call(kernel)
    assert len(asked.inspected) == 1
    assert len(asked.again) == 2
    assert asked.again[0][1:] == (HALVES, 48, 64, True)


def test_a_refused_launch_walks_the_ladder_and_is_not_kept() -> None:
    kernel = Kernel(refusing=2)
    quicken(kernel)
    steps = tuple(AttentionConfig(rows, 16, 4, 1, "test") for rows in (128, 64, 32))
    for _ in range(2):
        run_ladder(("a test", id(kernel)), steps, lambda step: call(kernel, BLOCK=step.block_m))
    assert [options["BLOCK"] for options in kernel.options] == [128, 64, 32]
    assert [arguments[3] for arguments in kernel.again] == [32]


def test_every_attention_kernel_of_dispatch_is_quick() -> None:
    # a process that does not interpret, as a GPU's does not
    code = """
from sdx_kernels._triton import aot
from sdx_kernels._triton.attention_launchers import KERNELS
from sdx_kernels._triton.binaries import _Quick
attention = [family for family in aot.FAMILIES if family != "group-norm"]
found = {launch.source.fn for card in (86, 90) for launch in aot.launches(card, attention)}
assert len(found) >= 16, len(found)
assert found == set(KERNELS), found ^ set(KERNELS)
assert all(isinstance(kernel.run, _Quick) for kernel in found)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
