"""Which implementation runs, and why each of the others does not.

It knows implementations as data and must not know any one of them, nor any operator's maths.
"""

import collections
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sdx_kernels.checks import Signature
from sdx_kernels.errors import InvalidInputs, UnsupportedInputs

__all__ = ["TOLERANCE", "Again", "Choice", "Impl", "Operator", "count", "launches"]

#: how often each implementation ran in this process, by name
launches: collections.Counter[str] = collections.Counter()

Tolerance = Mapping[torch.dtype, float]

#: does a call again with tensors of equal shapes, strides, dtypes and alignment: query, key, value,
#: the tensor of the mask or bias, the scale (of equal sign) → the output
Again = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor
]

#: largest absolute error of attention against fp64 on unit-normal inputs; about 2 ulp of the dtype
#: at the outputs' size, and what every implementation is held to
TOLERANCE: Tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def count(name: str) -> int:
    """How often the implementation `name` ran in this process."""
    return launches[name]


@dataclass(frozen=True)
class Choice:
    """What runs, and each passed-over candidate's reasons (all of them).

    Attributes:
        settled: False where a better one refused these very tensors, and might run with others.
    """

    name: str
    reasons: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    settled: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Impl:
    """One way to compute an operator; its capabilities are data.

    Attributes:
        name: what callers pass as `op` and reports print.
        priority: automatic selection tries higher ones first; below 0 = only when named.
        reasons: every reason why a signature is refused; empty = supported.
        run: computes the operator for inputs that `reasons` accepts.
        plain: a shorter way from query, key, value and scale to the output, for calls without
            bias, dropout, gradient and conversion of dtypes; None = `run` serves these too.
        bind: as `run`, for calls without dropout, gradient and log-sum-exp; also returns how the
            same is done again with other tensors, where it knows that.
        differentiable: torch's autograd sees through `run`; otherwise the operator wraps it.
        tolerance: largest absolute error per dtype on unit-normal inputs.
        closest: the nearest inputs that would work, for error messages.
    """

    name: str
    priority: int
    reasons: Callable[[Signature], list[str]]
    run: Callable[[Any], Any]
    plain: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor] | None = None
    bind: Callable[[Any], tuple[torch.Tensor, Again | None]] | None = None
    differentiable: bool = False
    tolerance: Tolerance = field(default_factory=dict)
    closest: str = ""


#: for a signature, the names tried first, in this order, and why others are passed over for the
#: first of them
Preference = Callable[[Signature], tuple[tuple[str, ...], str]]


def _no_preference(signature: Signature) -> tuple[tuple[str, ...], str]:
    return (), ""


class Described(Protocol):
    """An operator's inputs, as far as selection and its messages look at them."""

    @property
    def signature(self) -> Signature: ...

    def describe(self) -> list[str]:
        """One line per argument, for error messages."""
        ...


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator's implementations and the rule that orders them."""

    name: str
    implementations: tuple[Impl, ...]
    prefer: Preference = _no_preference

    def names(self) -> list[str]:
        """All implementation names, automatic ones first, by priority."""
        return [impl.name for impl in self.ordered()]

    def ordered(self) -> list[Impl]:
        """Implementations by falling priority."""
        return sorted(self.implementations, key=lambda impl: -impl.priority)

    def get(self, name: str) -> Impl:
        """The implementation of that name.

        Raises:
            InvalidInputs: there is none.
        """
        for impl in self.implementations:
            if impl.name == name:
                return impl
        raise InvalidInputs(f"no implementation named {name!r}; there are: {self.names()}")

    def explain(self, signature: Signature) -> dict[str, list[str]]:
        """Every implementation's reasons for refusing; an empty list = it would work."""
        return {impl.name: impl.reasons(signature) for impl in self.ordered()}

    def select(self, signature: Signature, *, only: tuple[str, ...] | None = None) -> Choice | None:
        """The automatic choice among `only` (default: all automatic ones); None if nothing fits.

        A pure function of its arguments: nothing is timed and nothing random is asked, so that two
        processes on equal machines compute equal bits.
        """
        return _select(self, signature, only)

    def refusal(self, inputs: Described, names: list[str], *, explicit: bool) -> str:
        """The error text: inputs, each candidate with all its reasons, the nearest that works."""
        head = (
            f"Operator `{self.name}` does not support inputs:"
            if explicit
            else f"No operator found for `{self.name}` with inputs:"
        )
        lines = [head, *(f"     {line}" for line in inputs.describe())]
        closest: list[str] = []
        for name in names:
            impl = self.get(name)
            lines.append(f"`{name}` is not supported because:")
            lines += [f"    {reason}" for reason in impl.reasons(inputs.signature)]
            closest += [f"    {name}: {impl.closest}"] if impl.closest else []
        works = [name for name, why in self.explain(inputs.signature).items() if not why]
        if works:
            lines.append(f"These would work as they are: {works} (op=None picks by itself)")
        elif closest:
            lines += ["Nearest inputs that would work:", *closest]
        return "\n".join(lines)

    def require(self, inputs: Described, only: tuple[str, ...] | None) -> Choice:
        """Like `select`, but raises when nothing fits.

        Raises:
            InvalidInputs: the caller named implementations and none of them can.
            UnsupportedInputs: nothing fits at all.
        """
        choice = self.select(inputs.signature, only=only)
        if choice is not None:
            return choice
        explicit = only is not None
        names = list(only) if only is not None else self.names()
        text = self.refusal(inputs, names, explicit=explicit)
        raise InvalidInputs(text) if explicit else UnsupportedInputs(text)


@functools.lru_cache(maxsize=4096)
def _select(
    operator: Operator, signature: Signature, only: tuple[str, ...] | None
) -> Choice | None:
    first, why = operator.prefer(signature)
    candidates = (
        [impl for impl in operator.ordered() if impl.priority >= 0 or impl.name in first]
        if only is None
        else [operator.get(name) for name in only]
    )
    if only is None or len(only) > 1:
        candidates.sort(key=lambda impl: (*first, impl.name).index(impl.name))
    reasons: dict[str, tuple[str, ...]] = {}
    chosen: Impl | None = None
    for impl in candidates:
        refused = impl.reasons(signature)
        if not refused and chosen is None:
            chosen = impl
        elif impl is not chosen:
            reasons[impl.name] = tuple(refused)
    if chosen is None:
        return None
    # what is known of the first name says nothing of the one that runs in its place
    kept = why if chosen.name in first[:1] else f"{chosen.name} has priority"
    for name, refused_by in reasons.items():
        if not refused_by:
            reasons[name] = (kept,)
    return Choice(chosen.name, reasons)
