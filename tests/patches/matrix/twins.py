"""Compares two pipelines that were built alike, object by object, in lockstep.

It knows Python and torch objects; it must not know what a patch is. Two pipelines correspond when
the same walk meets equal values, equal types, and the same objects again at the same places: so a
processor, hook or configuration that was swapped for an equal one is a difference.
"""

import enum
import functools
import inspect
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Correspondence"]

_VALUES = (
    bool, int, float, complex, str, bytes, type(None), type, enum.Enum, range, slice,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    types.ModuleType, inspect.Signature,
)  # fmt: skip
#: State of compilers and locks differs from run to run: only its type is compared.
_TYPE_ONLY = (
    RemovableHandle, torch.Generator, type(threading.Lock()), type(threading.RLock()),
    weakref.WeakKeyDictionary, weakref.WeakValueDictionary, types.CodeType,
)  # fmt: skip
#: Most attributes: equal ones need no place in the queue.
_PLAIN = (bool, int, float, str)
#: What torch.compile notes on objects that it has met: addresses, and which were traced when.
_COMPILER_NAMES = ("_torchdynamo", "_dynamo")
_ORDERED = ("_modules", "_parameters", "_buffers")
_MOST = 20


class Correspondence:
    """Which object of one pipeline is which of the other; grows with every comparison.

    Compare twice, before and after some operations: an object that was there before must then
    still be matched with its old partner.
    """

    def __init__(self) -> None:
        self._partner: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self._alive: list[Any] = []  # ids stay unique as long as nothing is freed

    def differences(self, ours: Any, twin: Any) -> list[str]:
        """Paths at which the two differ, with what was found there; at most a few."""
        found: list[str] = []
        visited: set[tuple[int, int]] = set()
        todo = deque([("", ours, twin)])
        while todo and len(found) < _MOST:
            path, a, b = todo.popleft()
            if a is b:
                continue
            if type(a) is not type(b):
                found.append(f"{path}: {_named(a)} is not {_named(b)}")
                continue
            if isinstance(a, _VALUES):
                if a != b:
                    found.append(f"{path}: {str(a)[:60]!r} is not {str(b)[:60]!r}")
                continue
            if isinstance(a, types.BuiltinFunctionType):
                if a.__qualname__ != b.__qualname__:
                    found.append(f"{path}: {a.__qualname__} is not {b.__qualname__}")
                continue
            if isinstance(a, types.MethodType):  # made anew at each access
                todo.append((path + ".__self__", a.__self__, b.__self__))
                todo.append((path + ".__func__", a.__func__, b.__func__))
                continue
            if isinstance(a, weakref.ref):
                todo.append((path + "()", a(), b()))
                continue
            if not self._match(a, b):
                found.append(f"{path}: another {_named(a)} than before, or than elsewhere")
                continue
            if (id(a), id(b)) in visited or isinstance(a, _TYPE_ONLY) or _compiler(a):
                continue
            visited.add((id(a), id(b)))
            if isinstance(a, torch.Tensor) and not _equal(a, b):
                found.append(f"{path}: tensors differ, {_described(a)} and {_described(b)}")
            if path.rpartition(".")[2] in _ORDERED and list(a) != list(b):
                found.append(f"{path}: the order of keys differs, {list(a)} and {list(b)}")
            for step, inside, other in _inside(a, b):
                if step == "!":
                    found.append(f"{path}: {str(inside)[:80]} and {str(other)[:80]}")
                elif inside is not other and not (type(inside) in _PLAIN and inside == other):
                    todo.append((path + step, inside, other))
        return found

    def _match(self, a: Any, b: Any) -> bool:
        mine, other = self._partner
        if id(a) not in mine and id(b) not in other:
            mine[id(a)], other[id(b)] = b, a
            self._alive += [a, b]
        return mine.get(id(a)) is b and other.get(id(b)) is a


def _inside(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Parts of two objects of one type; a step that starts with "!" is a difference."""
    if isinstance(a, dict):
        if a or b:
            yield from _entries(a, b)
    elif isinstance(a, list | tuple | deque):
        if len(a) != len(b):
            yield "!", f"{len(a)} entries {a}", f"{len(b)} entries {b}"
        yield from ((f"[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=False)))
    elif isinstance(a, set | frozenset):
        plain = all(isinstance(x, str) for x in (*a, *b))
        if len(a) != len(b) or (plain and a != b):
            yield "!", a, b
    elif isinstance(a, functools.partial):
        yield from ((".func", a.func, b.func), (".args", a.args, b.args))
        yield ".keywords", a.keywords, b.keywords
    elif isinstance(a, types.FunctionType):
        if a.__code__ is not b.__code__:
            yield "!", a, b
        yield ".__defaults__", a.__defaults__, b.__defaults__
        for i, (x, y) in enumerate(zip(a.__closure__ or (), b.__closure__ or (), strict=False)):
            yield f".closure[{i}]", *(_contents(cell) for cell in (x, y))
    for name in _slots(type(a)):
        yield f".{name}", getattr(a, name, None), getattr(b, name, None)
    if hasattr(a, "__dict__"):
        yield from _named_parts(vars(a), vars(b), ".")


def _entries(a: dict[Any, Any], b: dict[Any, Any]) -> Iterator[tuple[str, Any, Any]]:
    if all(isinstance(key, str) for key in (*a, *b)):
        yield from _named_parts(a, b, "/")
        return
    if len(a) != len(b):
        yield "!", a, b
    for i, (x, y) in enumerate(zip(a.items(), b.items(), strict=False)):
        # numbers of hooks and addresses of weights differ between any two models
        if not (isinstance(x[0], int) and isinstance(y[0], int)):
            yield f"[key {i}]", x[0], y[0]
        yield f"[entry {i}]", x[1], y[1]


def _named_parts(a: dict[str, Any], b: dict[str, Any], mark: str) -> Iterator[tuple[str, Any, Any]]:
    names = {name for name in a.keys() | b.keys() if not name.startswith(_COMPILER_NAMES)}
    if a.keys() & names != b.keys() & names:
        yield "!", f"only in ours {sorted(a.keys() - b.keys())}", sorted(b.keys() - a.keys())
    for name, value in a.items():
        if name in b and name in names:
            yield mark + name, value, b[name]


@functools.cache
def _slots(cls: type) -> tuple[str, ...]:
    if cls.__module__.partition(".")[0] in ("torch", "builtins", "collections"):
        return ()
    names = (vars(base).get("__slots__", ()) for base in cls.__mro__)
    flat = [n for part in names for n in ((part,) if isinstance(part, str) else part)]
    return tuple(n for n in flat if n not in ("__dict__", "__weakref__"))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _compiler(value: Any) -> bool:
    where = getattr(value, "__module__", None) or type(value).__module__
    dynamo = isinstance(where, str) and where.startswith(("torch._dynamo", "torch._guards"))
    return dynamo and not isinstance(value, nn.Module)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = (a.shape, a.dtype, a.device, a.requires_grad, a.stride()) == (
        b.shape, b.dtype, b.device, b.requires_grad, b.stride(),
    )  # fmt: skip
    if not same or a.is_meta:
        return same
    if a.dtype.is_floating_point and a.element_size() == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)  # torch cannot compare 8-bit floats
    return torch.equal(a, b)


def _named(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _described(value: torch.Tensor) -> str:
    return f"{tuple(value.shape)} {value.dtype} on {value.device}"
