"""Dispatch launches what the tuning tables have for its inputs, and nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from sdx_kernels import LowerTriangularMask, count, memory_efficient_attention
from sdx_kernels.ops import attention_bwd_impls, attention_triton_impls
from sdx_kernels.testing import random_inputs

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
pytestmark = pytest.mark.usefixtures("interpreter")

#: a number that no tile of a table has beside its others
WARPS = 16


def other(config: Any) -> Any:
    """The same in a size of its own, as a change of a launcher would make it."""
    name = "rows" if hasattr(config, "rows") else "mix" if hasattr(config, "mix") else ""
    if name:
        return replace(config, **{name: replace(getattr(config, name), num_warps=WARPS)})
    return replace(config, num_warps=WARPS)


def forward(op: str, head_dim: int, bias: Any = None) -> None:
    before = count(op)
    inputs = random_inputs(1, 5, 17, 1, head_dim, dtype=torch.float16)
    memory_efficient_attention(*inputs, bias, op=op)
    assert count(op) == before + 1


#: the function that asks a table, by operator's name
FORWARD = {"triton": "_ladder", "triton-short": "_short_ladder", "triton-tma": "_tma_ladder"}


@pytest.mark.parametrize("op", [*FORWARD, "triton-wide"])
def test_a_forward_outside_the_tables_is_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = FORWARD.get(op, "_wide_ladder")
    real = getattr(attention_triton_impls, name)
    head_dim = 300 if op == "triton-wide" else 40
    forward(op, head_dim)
    monkeypatch.setattr(
        attention_triton_impls, name, lambda s: tuple(other(config) for config in real(s))
    )
    # the remembered way of plain calls has its own; with a log-sum-exp or a mask it is not taken
    with pytest.raises(AssertionError, match="outside the tables"):
        gradient(op, head_dim)


def gradient(op: Any, head_dim: int, bias: Any = None) -> None:
    q, k, v = random_inputs(1, 5, 17, 1, head_dim, dtype=torch.float16)
    q.requires_grad_()
    torch.autograd.grad(memory_efficient_attention(q, k, v, bias, op=op).float().sum(), q)


@pytest.fixture
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The function of backward's that asks a table, and a way to put another in its place."""
    real = getattr(attention_bwd_impls, request.param)
    return real, lambda new: monkeypatch.setattr(attention_bwd_impls, request.param, new)


@pytest.mark.parametrize(
    ("table", "op", "head_dim", "field"),
    [
        ("_ladder", "triton", 40, "rows"),
        ("_ladder", "triton", 40, "keys"),
        ("_ladder", "triton", 40, "queries"),
        ("_tma_ladder", ("triton", "triton-tma"), 40, "rows"),
        ("_tma_ladder", ("triton", "triton-tma"), 40, "keys"),
        ("_tma_ladder", ("triton", "triton-tma"), 40, "queries"),
        ("_wide_ladder", ("triton-wide", "triton-wide"), 300, ""),
    ],
    indirect=["table"],
)
def test_a_backward_outside_the_tables_is_refused(
    table: Any, op: Any, head_dim: int, field: str
) -> None:
    real, put = table

    def changed(signature: Any) -> Any:
        ladder = real(signature)
        if not field:
            return tuple(other(config) for config in ladder)
        return replace(ladder, **{field: tuple(other(c) for c in getattr(ladder, field))})

    gradient(op, head_dim)
    put(changed)
    with pytest.raises(AssertionError, match="outside the tables"):
        gradient(op, head_dim)


def test_a_tile_of_other_inputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a table has for a band is not what it has without one."""
    real = attention_triton_impls._ladder
    forward("triton", 64, LowerTriangularMask())
    monkeypatch.setattr(
        attention_triton_impls, "_ladder", lambda s: real(replace(s, band="", dropout=0.5))
    )
    with pytest.raises(AssertionError, match="outside the tables"):
        forward("triton", 64, LowerTriangularMask())
