"""Which modules' weights can be copied in just before they run, in what order, and where they lie.

One rule for modules without weights (the planner's) and live ones (the executor's), so that a plan
made without a GPU fits the weights that it is carried out on. Moves nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sdx_accel.budget.profile import StreamUnit
from sdx_accel.budget.units import MIB
from sdx_accel.runtime.weights import UNIT_BYTES, split_weights, tensor_bytes, weight_tensors

__all__ = [
    "CALL",
    "COMPILED",
    "STREAM_BYTES",
    "Layout",
    "Order",
    "UnitTrace",
    "is_compiled",
    "layout",
    "order_of",
    "remember",
    "stream_modules",
]

# SDXL's UNet falls into 105 units of at most 93.8 MiB, each called once a forward; at 64 MiB it
# would be 420, and the host would be busier issuing copies than launching kernels
STREAM_BYTES = 96 * MIB

#: the member by which an instance's call is intercepted: outside anything that is compiled inside
#: the module, and left out of copies and pickles by `Module.__getstate__`
CALL = "_compiled_call_impl"

# what torch.compile leaves on the calls that it makes, by which others know compiled parts
COMPILED = "_torchdynamo_orig_callable"

#: paths of the units in order of execution with the operations of a forward
Order = tuple[tuple[str, float], ...]

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)
# live modules, with what their weights were last planned by: order and the text's projections
_planned: "WeakKeyDictionary[torch.nn.Module, tuple[Order, tuple[str, ...]]]" = WeakKeyDictionary()


def remember(module: torch.nn.Module, order: Order, text: Sequence[str]) -> None:
    """Keep what a live module was planned by, for whoever holds it to that plan."""
    _planned[module] = order, tuple(text)


def order_of(module: torch.nn.Module) -> tuple[Order, tuple[str, ...]]:
    """What `remember` was last told of a module; empty when it was never planned."""
    return _planned.get(module, ((), ()))


def stream_modules(root: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The units of a model, in order of registration: paths and modules.

    Top-down the first modules that weigh at most `STREAM_BYTES` and are called as such, and single
    layers of any weight. A layer with adapters is one layer; nobody sees calls inside a compiled
    part, which is one unit or none.
    """
    found: list[tuple[str, torch.nn.Module]] = []

    def walk(prefix: str, module: torch.nn.Module) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            n_bytes = sum(tensor_bytes(tensor) for _, tensor in weight_tensors(child))
            if not n_bytes:
                continue
            if _is_called(child) and (n_bytes <= STREAM_BYTES or _is_layer(child)):
                found.append((path, child))
            elif not is_compiled(child):
                walk(f"{path}.", child)

    walk("", root)
    return found


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module as a whole was given to torch.compile, by either of its forms."""
    return hasattr(module, "_orig_mod") or hasattr(module.__dict__.get(CALL), COMPILED)


def _is_called(module: torch.nn.Module) -> bool:
    # some attention processors are modules that define __call__ and no forward
    return (
        not isinstance(module, _CONTAINERS) and type(module).forward is not torch.nn.Module.forward
    )


def _is_layer(module: torch.nn.Module) -> bool:
    return not any(module.children()) or type(module).__module__.startswith("peft.tuners")


class UnitTrace:
    """Notes in which order the units of some models run, and what each computes.

    Args:
        roots: the models by component name.
    """

    def __init__(self, roots: Mapping[str, torch.nn.Module]) -> None:
        self._roots = dict(roots)
        self._calls: Counter[str] = Counter()
        self._seen: dict[str, list[str]] = {name: [] for name in roots}
        self._flops: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._now: tuple[str, str] | None = None

    def count(self, flops: float) -> None:
        """Operations that were just done: by the unit that runs, or behind the one before.

        Attention whose layers are units by themselves, as in Flux, is computed between two of them.
        """
        if self._now is not None:
            self._flops[self._now] += flops

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch calls of the models until the block ends."""
        watched: list[torch.nn.Module] = []
        try:
            for name, root in self._roots.items():
                watched.append(root)
                self._wrap(root, self._begin_root(name))
                for path, module in stream_modules(root):
                    watched.append(module)
                    self._wrap(module, self._run_unit(name, path))
            yield
        finally:
            for module in watched:
                module.__dict__.pop(CALL, None)

    @staticmethod
    def _wrap(module: torch.nn.Module, around: Callable[..., Any]) -> None:
        inner = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            return around(inner, args, kwargs)

        module.__dict__[CALL] = call

    def _begin_root(self, name: str) -> Callable[..., Any]:
        def around(inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self._calls[name] += 1
            self._now = None
            try:
                return inner(*args, **kwargs)
            finally:
                self._now = None

        return around

    def _run_unit(self, name: str, path: str) -> Callable[..., Any]:
        def around(inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            # later calls of a model repeat the first
            if self._calls[name] != 1:
                return inner(*args, **kwargs)
            self._seen[name].append(path)
            self._now = name, path
            return inner(*args, **kwargs)

        return around

    def orders(self) -> dict[str, Order]:
        """By model, the units that ran exactly once in its first call, in that order."""
        found = {}
        for name, paths in self._seen.items():
            times = Counter(paths)
            once = [path for path in paths if times[path] == 1]
            found[name] = tuple((path, self._flops[name, path]) for path in once)
        return found


@dataclass(frozen=True)
class Layout:
    """How a model's weights are grouped.

    Args:
        groups: (name, tensor) pairs of each chunk; a chunk has one host blob.
        units: the byte ranges that can be streamed, in order of execution.
        text_chunks: how many of the last groups hold only the text's projections.
    """

    groups: list[list[tuple[str, torch.Tensor]]]
    units: tuple[StreamUnit, ...] = ()
    text_chunks: int = 0


def layout(
    component: str, module: torch.nn.Module, order: Order = (), text: Sequence[str] = ()
) -> Layout:
    """Group a model's weights in order of execution, so that each unit is one range of bytes.

    Args:
        component: the model's name.
        module: with weights or without; adapters may be on.
        order: of a twin's units; what this module does not have is left out, and without an order
            the groups are those of `split_weights`.
        text: paths of the text's projections, which get chunks of their own at the end.
    """
    if not order:
        return Layout(split_weights(module))
    tensors = dict(weight_tensors(module))
    projections = frozenset(text)
    apart = {name for name in tensors if _lies_in(name, projections)}
    units = {
        path: {n: t for n, t in _below(path, unit) if n not in apart}
        for path, unit in stream_modules(module)
    }
    # a tensor that goes by two names has to stay: who reads it, and when, is not known
    names = Counter(id(tensor) for tensor in _every_name(module))
    streamed = {
        path: list(units[path].items())
        for path, _ in order
        if units.get(path) and all(names[id(tensor)] == 1 for tensor in units[path].values())
    }
    placed = {name for held in streamed.values() for name, _ in held}
    rest = [[(n, t)] for n, t in tensors.items() if n not in placed and n not in apart]
    last = [[(n, tensors[n])] for n in tensors if n in apart]
    groups, places = _pack([*streamed.values()])
    others, _ = _pack(rest)
    texts, _ = _pack(last)
    flops = dict(order)
    found = tuple(
        StreamUnit(
            f"{component}.{path}", component, chunk, offset, _size(streamed[path]), flops[path]
        )
        for path, (chunk, offset) in zip(streamed, places, strict=True)
    )
    return Layout([*groups, *others, *texts], found, len(texts))


def _below(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weight_tensors(module):
        yield f"{path}.{name}", tensor


def _every_name(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for named in (module.named_parameters, module.named_buffers):
        for _, tensor in named(remove_duplicate=False):
            yield tensor


def _lies_in(name: str, paths: frozenset[str]) -> bool:
    while name:
        name = name.rpartition(".")[0]
        if name in paths:
            return True
    return False


def _size(group: Sequence[tuple[str, torch.Tensor]]) -> int:
    return sum(tensor_bytes(tensor) for _, tensor in group)


def _pack(
    parts: Sequence[list[tuple[str, torch.Tensor]]],
) -> tuple[list[list[tuple[str, torch.Tensor]]], list[tuple[int, int]]]:
    """(chunks of whole parts of at most `UNIT_BYTES` where parts allow it, each part's place)."""
    groups: list[list[tuple[str, torch.Tensor]]] = []
    places = []
    size = UNIT_BYTES + 1
    for part in parts:
        n_bytes = _size(part)
        if size + n_bytes > UNIT_BYTES:
            groups.append([])
            size = 0
        places.append((len(groups) - 1, size))
        groups[-1] += part
        size += n_bytes
    return groups, places
