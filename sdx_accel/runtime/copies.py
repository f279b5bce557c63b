"""Copies of weights beside the computation: a stream of their own, ordered by events only.

Knows bytes, streams and events; nothing of models or plans. Copies run in the order in which they
are asked for.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sdx_accel.budget.units import MIB

__all__ = ["Copies", "CudaCopies", "HostCopies", "copies_for"]


class Copies(Protocol):
    """What a `Streamer` needs of a device. Events are made once and recorded again and again."""

    def allocate(self, n_bytes: int) -> torch.Tensor:
        """One uint8 blob on the device."""

    def event(self) -> Any:
        """An event that `copy` or `mark` can record; waiting for one never recorded returns."""

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any], done: Any
    ) -> None:
        """Copy bytes once all events of `after` have passed, then record `done`."""

    def mark(self, event: Any) -> None:
        """Record `event` once everything computed so far is finished."""

    def wait(self, event: Any) -> None:
        """Nothing that is computed from now on runs before `event`."""

    def finish(self, event: Any) -> None:
        """The host waits for `event`, which has been recorded."""

    def capturing(self) -> bool:
        """Whether calls are being recorded into a graph instead of being run."""

    def drain(self) -> None:
        """The host waits until all copies and computations are finished."""


class HostCopies:
    """Stands in where there is no card: a copy is finished when it returns."""

    def allocate(self, n_bytes: int) -> torch.Tensor:
        """One uint8 blob in host memory."""
        return torch.empty(n_bytes, dtype=torch.uint8)

    def event(self) -> Any:
        """Nothing to wait for."""

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any], done: Any
    ) -> None:
        """Copy at once."""
        target.copy_(source)

    def mark(self, event: Any) -> None:
        """Nothing runs in the background."""

    def wait(self, event: Any) -> None:
        """Nothing runs in the background."""

    def finish(self, event: Any) -> None:
        """Nothing runs in the background."""

    def capturing(self) -> bool:
        """There are no graphs."""
        return False

    def drain(self) -> None:
        """Nothing runs in the background."""


class CudaCopies:
    """Copies on a stream beside the current one.

    Args:
        device: the card.
        throttle_bytes_per_s: hold copies down to this speed, to measure what a slower link would
            give; None for the link as it is.
    """

    def __init__(self, device: torch.device, throttle_bytes_per_s: float | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # clock cycles that a copied byte has to be followed by
        self._idle_cycles = 0.0
        if throttle_bytes_per_s is not None:
            per_byte, per_cycle = _link_and_clock(device)
            self._idle_cycles = max(0.0, 1 / throttle_bytes_per_s - per_byte) / per_cycle

    def allocate(self, n_bytes: int) -> torch.Tensor:
        """One uint8 blob on the card, of the current stream's pool."""
        return torch.empty(n_bytes, dtype=torch.uint8, device=self._device)

    def event(self) -> Any:
        """An event without timing."""
        return torch.cuda.Event()

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any], done: Any
    ) -> None:
        """Copy on the copy stream; the host stands still unless `source` is locked memory."""
        for event in after:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            if self._idle_cycles:
                torch.cuda._sleep(round(source.numel() * self._idle_cycles))
            done.record(self._stream)

    def mark(self, event: Any) -> None:
        """Record on the current stream."""
        event.record(torch.cuda.current_stream(self._device))

    def wait(self, event: Any) -> None:
        """Let the current stream wait; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self, event: Any) -> None:
        """Let the host wait."""
        event.synchronize()

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def drain(self) -> None:
        """Wait for both streams."""
        self._stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()


def copies_for(device: torch.device) -> Copies:
    """The kind that fits a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


def _link_and_clock(device: torch.device) -> tuple[float, float]:
    """(seconds a copied byte, seconds a cycle of `torch.cuda._sleep`)."""
    size, cycles = 64 * MIB, 20_000_000
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)

    def seconds(work: Any) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()
        start.record()
        for _ in range(3):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 3e3

    copying = seconds(lambda: target.copy_(source, non_blocking=True))
    return copying / size, seconds(lambda: torch.cuda._sleep(cycles)) / cycles
