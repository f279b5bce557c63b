"""Plays two operations on a pipeline of ours and on its stock twin, and compares the two.

An order is a pair of operations, the moment at which ours is switched on, and whether a picture is
made between the steps (which is when processors that the host replaced are swapped back).
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn

import sdx_patches

from .operations import OPERATIONS, Subject, build
from .twins import Correspondence

__all__ = ["COUNTS", "Order", "combinations", "play", "steps"]

#: Outcomes of this run's combinations, for the summary line.
COUNTS: Counter[str] = Counter()
#: Outcomes after which the two may be in different states: the host fails half-way where ours goes
#: on, or computes with uninitialised memory (projections fused while their weights are offloaded).
INCOMPARABLE = ("refused by the stock pipeline only", "not repeatable without us")
#: Both sides run the same torch kernels on the CPU, on inputs of other strides at most; but for the
#: autoencoder, whose norms ours sums in another order: 3e-6 of a picture's range (1e-4 is allowed).
ATOL = 1e-5


@dataclass(frozen=True)
class Order:
    """One cell of the matrix.

    Args:
        first, second: names of operations.
        moment: number of steps before `enable_xattn`.
        runs: whether a picture is made after every step, not only at the end.
    """

    first: str
    second: str
    moment: int
    runs: bool

    def __str__(self) -> str:
        done = list(steps(self.first, self.second))
        done.insert(self.moment, "ENABLE")
        return (", run, " if self.runs else ", ").join(done)


@cache
def steps(first: str, second: str) -> tuple[str, ...]:
    """The two operations, each after what it needs."""
    done: list[str] = []
    active: set[str] = set()

    def add(name: str) -> None:
        operation = OPERATIONS[name]
        if operation.needs and operation.needs not in active:
            add(operation.needs)
        done.append(name)
        active.add(name)
        active.discard(operation.undoes)

    add(first)
    add(second)
    return tuple(done)


@cache
def combinations() -> tuple[Order, ...]:
    """Every pair at every moment, alternately with pictures between the steps and without.

    Compiling a model takes seconds: such pairs are played at three moments.
    """
    names = list(OPERATIONS)
    return tuple(
        Order(first, second, moment, (names.index(first) + names.index(second) + moment) % 2 == 0)
        for first in names
        for second in names
        for moment in _moments(steps(first, second))
    )


def _moments(done: tuple[str, ...]) -> tuple[int, ...]:
    last = len(done)
    if not any(OPERATIONS[name].compiles for name in done):
        return tuple(range(last + 1))
    return (0, 1, last) if last == 2 else (0, last - 1, last)


def play(order: Order) -> str:
    """Play one order; returns what became of it, and counts it.

    Raises:
        AssertionError: an output, an error or what is left after `disable_xattn` is not the twin's.
    """
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = _play(order)
    COUNTS[outcome] += 1
    return outcome


def _play(order: Order) -> str:
    backend = _AttentionBackendRegistry._active_backend
    ours, twin = Subject(True, build()), Subject(False, build())
    match = Correspondence()
    _expect_none(match.differences(ours.models, twin.models), "before anything")
    outcome = _steps(order, ours, twin)
    ours.disable_all()
    assert _AttentionBackendRegistry._active_backend is backend
    _expect_none(list(leftovers(ours)), "left on the models after disable_xattn")
    if outcome in INCOMPARABLE:
        return outcome
    _expect_none(match.differences(ours.models, twin.models), "after disable_xattn")
    if outcome == "equal" and not torch.equal(ours.run(), twin.run()):
        raise AssertionError("another picture than the twin's after disable_xattn")
    return outcome


def _steps(order: Order, ours: Subject, twin: Subject) -> str:
    names = steps(order.first, order.second)
    for index in range(len(names) + 1):
        if index == order.moment:
            ours.enable()
        if order.runs or index == len(names):
            outcome = _alike(ours.run, twin.run)
            if outcome != "equal":
                return outcome
            if "compile" not in names:  # a graph is never changed under its user
                waiting = [x.path for x in sdx_patches.layers(ours.pipe) if "since" in x.reason]
                _expect_none(waiting, "not swapped back by a run")
        if index < len(names):
            apply = OPERATIONS[names[index]].apply
            outcome = _alike(lambda: apply(ours), lambda: apply(twin))  # noqa: B023
            if outcome != "equal":
                return outcome
    return "equal"


def _expect_none(found: list[str], when: str) -> None:
    if found:
        raise AssertionError(f"{when}: " + "; ".join(found))


def _alike(ours: Callable[[], Any], twin: Callable[[], Any]) -> str:
    """Whether both return equal tensors (or none), both raise, or only the twin does."""
    expected, refused = _attempt(twin)
    try:
        torch.manual_seed(1)
        got = ours()
    except Exception as error:
        if refused is not None:
            return "refused alike"
        raise AssertionError("ours raised, the twin did not") from error
    if refused is not None:
        return "refused by the stock pipeline only"
    if isinstance(got, torch.Tensor):
        error = (got - expected).abs().max().item()
        if not error <= ATOL:
            if not torch.equal(twin(), expected):
                return "not repeatable without us"
            raise AssertionError(f"outputs differ by {error}")
    return "equal"


def _attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        torch.manual_seed(1)
        return call(), None
    except Exception as error:
        return None, error


def leftovers(subject: Subject) -> Iterator[str]:
    """Attributes, hooks and processors of ours on any model; none after `disable_xattn`."""
    for pipe in (subject.pipe, *subject.others):
        for component, model in pipe.components.items():
            for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
                for name, value in vars(module).items():
                    inside = value.values() if isinstance(value, dict) else (value,)
                    if name.startswith("_sdx") or any(map(_is_ours, inside)):
                        yield f"{component}.{path}.{name}"


def _is_ours(value: Any) -> bool:
    where = getattr(value, "__module__", None) or type(value).__module__
    return isinstance(where, str) and where.startswith("sdx_")
