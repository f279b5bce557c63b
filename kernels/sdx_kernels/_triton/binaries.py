"""Starts kernels that are compiled already, past Triton's inspection of every argument.

It knows Triton's launch protocol, and no kernel. A decode in bands starts 190 small kernels; through
Triton's own call each takes 80 µs of processor time on the machine of an H200, together half as much
again as the card computes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["start"]

#: what one process launches is little; a program that sweeps sizes must not grow without end
_MOST = 4096

_compiled: dict[tuple[object, ...], Any] = {}


def _kind(argument: object) -> object:
    """All of an argument that decides which binary serves it."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        # Triton specialises 1 and multiples of 16, and passes what needs them as 64 bits
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31, argument < 2**63
    return type(argument)


def start(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[object],
    constants: Mapping[str, object],
    num_warps: int,
) -> None:
    """Launches a kernel on the current device's current stream.

    Args:
        kernel: the jit function; its compile-time arguments come last.
        grid: programs.
        arguments: tensors, ints and floats, in the kernel's order.
        constants: compile-time arguments, in the kernel's order.
        num_warps: warps of a program.
    """
    key = (
        kernel,
        torch.cuda.current_device() if torch.cuda.is_available() else -1,
        num_warps,
        *constants.values(),
        *map(_kind, arguments),
    )
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*arguments, *constants.values())
        return
    compiled = kernel[grid](*arguments, **constants, num_warps=num_warps)
    # the interpreter returns nothing
    if compiled is not None:
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = compiled
