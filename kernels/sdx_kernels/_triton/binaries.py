"""Starts kernels that are compiled already, past Triton's inspection of every argument.

It knows Triton's launch protocol, and no kernel. Through Triton's own call an attention launch
takes 84 µs of processor time on the machine of an H200, where the card needs 10; and a decode in
bands starts 190 small kernels, together half as much again as the card computes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sdx_kernels._triton.descriptors import TensorDescriptor

__all__ = ["quicken", "start"]

Grid = tuple[int, int, int]

#: what one process launches is little; a program that sweeps sizes must not grow without end
_MOST = 4096

#: a binary, and the names of the compile-time arguments that it is called with
Known = tuple[Any, tuple[str, ...]]

#: what of a tensor descriptor is no part of its type, but passed at run time
_RUN_TIME = frozenset(("base", "shape", "strides"))

_compiled: dict[tuple[object, ...], Known] = {}

#: the same by the very ints of a launch, which repeat with every step: saves a call for each
_exact: dict[tuple[object, ...], Known] = {}


def _kind(argument: Any) -> object:
    """All of an argument that decides which binary serves it.

    Triton makes 1 and None compile-time, tells multiples of 16 and addresses of whole 16 bytes from
    others, and passes an int in the fewest of 32 and 64 bits that hold it. Arguments that a kernel
    says not to specialise are told apart all the same: more keys then have one binary.

    Raises:
        TypeError: nothing is known of such arguments.
    """
    if isinstance(argument, torch.Tensor):
        return argument.dtype if argument.data_ptr() % 16 == 0 else (argument.dtype,)
    kind = type(argument)
    if kind is int:
        if argument == 1:
            return 1
        size = 0 if -(2**31) <= argument < 2**31 else 2 if argument < 2**63 else 4
        # beyond 1, which is taken
        return 2 + size + (argument % 16 == 0)
    if kind is float or kind is bool or argument is None:
        return kind
    if kind is TensorDescriptor:
        # which fields there are differs between Triton's versions
        held = vars(argument).items()
        return (
            argument.base.dtype,
            *[tuple(v) if type(v) is list else v for name, v in held if name not in _RUN_TIME],
        )
    raise TypeError(kind)


def _launch(
    kernel: Any,
    inspected: Callable[[], Any],
    grid: Grid,
    arguments: Sequence[object],
    options: Mapping[str, object],
) -> Any:
    """Launches a known binary, or as `inspected` does, whose binary is known from then on."""
    values = options.values()
    try:
        fixed = (
            kernel,
            torch.cuda.current_device() if torch.cuda.is_initialized() else -1,
            *options,
            *values,
            # as compile-time arguments, True and 1 are two
            *map(type, values),
        )
        exact = (*fixed, *[one if type(one) is int else _kind(one) for one in arguments])
        known = _exact.get(exact)
        if known is None:
            key = (*fixed, *map(_kind, arguments))
            known = _compiled.get(key)
            if known is not None:
                _keep(_exact, exact, known)
    except TypeError:
        return inspected()
    if known is not None:
        compiled, names = known
        compiled[grid](*arguments, *[options[name] for name in names])
        return compiled
    compiled = inspected()
    names = tuple(kernel.arg_names[len(arguments) :])
    # the interpreter returns nothing, and a default is Triton's to fill in
    if compiled is not None and all(name in options for name in names):
        _keep(_compiled, key, (compiled, names))
    return compiled


def _keep(known: dict[tuple[object, ...], Known], key: tuple[object, ...], value: Known) -> None:
    if len(known) >= _MOST:
        known.clear()
    known[key] = value


def start(
    kernel: Any,
    grid: Grid,
    arguments: Sequence[object],
    constants: Mapping[str, object],
    num_warps: int,
    num_stages: int | None = None,
    maxnreg: int | None = None,
) -> None:
    """Launches a kernel on the current device's current stream.

    Args:
        kernel: the jit function; its compile-time arguments come last.
        grid: programs.
        arguments: tensors, tensor descriptors, ints and floats, in the kernel's order; with any
            other Triton inspects every launch.
        constants: compile-time arguments.
        num_warps: warps of a program.
        num_stages: stages of its loops; default: Triton's.
        maxnreg: most registers of a thread; default: no limit.

    Raises:
        triton.runtime.errors.OutOfResources: the card has too little of something.
    """
    options = {**constants, "num_warps": num_warps, "enable_fp_fusion": True}
    if num_stages is not None:
        options["num_stages"] = num_stages
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    _launch(kernel, lambda: kernel[grid](*arguments, **options), grid, arguments, options)


class _Quick:
    """A jit function's `run` that asks Triton only about what it has not launched before."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.inspect = kernel, kernel.run

    def __call__(self, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        def inspected() -> Any:
            return self.inspect(*arguments, grid=grid, warmup=warmup, **options)

        if warmup or type(grid) is not tuple or len(grid) != 3:
            return inspected()
        return _launch(self.kernel, inspected, grid, arguments, options)


def quicken(kernel: Any) -> None:
    """Lets `kernel[grid](…)` do as `start` does, from now on and wherever it is called.

    Args:
        kernel: the jit function; its compile-time arguments come last and by name.
    """
    if not isinstance(kernel.run, _Quick):
        kernel.run = _Quick(kernel)
