"""What the launchers of all attention kernels share: arguments in kernels' terms, and ladders.

It knows strides, bounds and refused launches, and must not know any one kernel's arguments.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import triton

from sdx_kernels import target
from sdx_kernels.bias import Band
from sdx_kernels.checks import Dropout
from sdx_kernels.errors import LaunchRefused
from sdx_kernels.registry import Again

__all__ = [
    "LN2",
    "LOG2E",
    "Bound",
    "Unaligned",
    "band_bounds",
    "dropout_draw",
    "mask_bytes",
    "reach",
    "run_ladder",
    "say_first_use",
    "watch_launches",
]

Config = TypeVar("Config")

_log = logging.getLogger("sdx_kernels")

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

#: first step of a ladder that launched, by what decides it; saves refused attempts
_steps: dict[tuple[object, ...], int] = {}


def reach(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    """The tensor, or a dense copy where a tile of 128 steps would overrun 32-bit offsets.

    A BMHK tensor (dims 1) is copied heads first, since 128 rows of 65,537 heads of 256 channels
    are too far apart in any other order.
    """
    far = any(tensor.shape[dim] > 1 and tensor.stride(dim) * 128 >= 2**31 for dim in dims)
    if not far:
        return tensor
    heads_first = tensor.dim() == 4 and dims == (1,)
    return (
        tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if heads_first
        else (tensor.contiguous())
    )


def band_bounds(band: Band | None, longest: int) -> tuple[int, int, int]:
    """(left, right, from_end) for a kernel; bounds beyond `longest` = Mq + Mk mean nothing.

    A bound that does not exist is 0 here: which ones do is a compile-time argument.
    """
    if band is None:
        return 0, 0, 0
    left, right = (
        0 if bound is None else max(-longest, min(longest, bound))
        for bound in (band.left, band.right)
    )
    return left, right, int(band.from_end)


def mask_bytes(mask: torch.Tensor) -> torch.Tensor:
    """A bool mask as the bytes that kernels read; a float bias as it is."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def dropout_draw(dropout: Dropout | None) -> tuple[int, float]:
    """(threshold, 1 / (1 − p)) for a kernel: the int32 of the same bits as floor(p · 2³²)."""
    if dropout is None:
        return 0, 1.0
    threshold = int(dropout.p * 2**32)
    # always an int32, so that no p needs a compilation of its own
    return threshold - 2**32 if threshold >= 2**31 else threshold, 1.0 / (1.0 - dropout.p)


@functools.lru_cache(maxsize=1)
def say_first_use() -> None:
    """Once a process: the seconds that follow are the compiler's, not the picture's."""
    _log.info(
        "compiling attention kernels (first use on this card; `sdx-accel doctor --warm` does it "
        "ahead) …"
    )


class Bound:
    """A launch that is compiled: again with other tensors of equal shapes, strides and alignment.

    Triton finds a launch's binary by inspecting every argument: a call takes 84 µs of processor
    time so, and 27 with the binary at hand (H200 machine, `kernels/bench/bench_dispatch.py`).

    Args:
        compiled: what the first launch returned.
        kernel: the jit function.
        grid: programs.
        fixed: its arguments after the ones that change with each call.
        constants: its compile-time arguments.
    """

    def __init__(
        self,
        compiled: Any,
        kernel: Any,
        grid: tuple[int, int, int],
        fixed: Sequence[object],
        constants: Mapping[str, object],
    ) -> None:
        self._start = compiled[grid]
        names = kernel.arg_names[len(kernel.arg_names) - len(constants) :]
        self._fixed = (*fixed, *(constants[name] for name in names))

    def __call__(self, *changing: object) -> None:
        """Launches with these first arguments on the current device's current stream."""
        self._start(*changing, *self._fixed)

    def with_masks(
        self, shape: torch.Size, biased: bool, *, unused: int = 0, after: tuple[float, ...] = ()
    ) -> Again:
        """The launch of a kernel by pointers, as a way to do it again.

        Args:
            shape: of the output.
            biased: a mask is added to scores, which stay in natural units; else it parts keys.
            unused: how many pointers lie between the masks and the output.
            after: what follows the scale.
        """

        def again(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            scale: float,
        ) -> torch.Tensor:
            # and not new_empty, which would hand a subclass of Tensor on
            out = torch.empty(shape, dtype=query.dtype, device=query.device)
            masked = query if mask is None else mask_bytes(mask)
            masks = (masked, query) if biased else (query, masked)
            factor = scale if biased else scale * LOG2E
            # what a kernel was compiled without is any pointer
            self(query, key, value, *masks, *(query,) * unused, out, out, factor, *after)
            return out

        return again


class Unaligned(LaunchRefused):
    """Strides or addresses that a tensor descriptor cannot hold."""

    of_tensors = True

    def __init__(self) -> None:
        super().__init__("a stride or address is no multiple of 16 bytes")


#: told of every launch before it is made, where a test wants to know
_watcher: Callable[[tuple[object, ...], Any], None] | None = None


def watch_launches(watcher: Callable[[tuple[object, ...], Any], None] | None) -> None:
    """Lets a test see each launch's key and configuration, and refuse it by an exception.

    The tests hold every launch against the tuning tables so; None ends it.
    """
    global _watcher
    _watcher = watcher


def run_ladder(
    key: tuple[object, ...], ladder: tuple[Config, ...], launch: Callable[[Config], None]
) -> None:
    """Launches the first step that the driver accepts and remembers it.

    Args:
        key: what decides whether a step can launch: kernel, device facts, dtypes, dims, kinds and
            the ladder itself.
        ladder: launch configurations, best first.
        launch: launches one of them.

    Raises:
        LaunchRefused: the driver has too few resources for every configuration.
    """
    if key not in _steps and not target.interpreting():
        say_first_use()
    refusal: Exception | None = None
    for step in range(_steps.get(key, 0), len(ladder)):
        if _watcher is not None:
            _watcher(key, ladder[step])
        try:
            launch(ladder[step])
        except triton.runtime.errors.OutOfResources as error:
            refusal = error
        else:
            _steps[key] = step
            return
    _steps[key] = len(ladder)
    raise LaunchRefused(f"no launch configuration of the attention kernel fits: {refusal}")
