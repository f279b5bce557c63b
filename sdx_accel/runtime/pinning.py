"""Host memory whose pages the driver has locked, so that copies run at the link's speed.

The driver may refuse to lock all that moves (a full machine, WSL, Windows). Then as many blobs are
locked as it grants, and two small buffers through which the rest passes: the host copies into a
buffer and goes on, instead of standing still until the driver has staged the bytes.
Knows bytes; nothing of plans or pipelines.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import torch

from sdx_accel.budget.units import GIB, MIB
from sdx_accel.runtime.copies import Copies

__all__ = ["CudaPinner", "HostPinner", "Pieces", "Pinned", "Pinner", "Staging", "pinner_for"]

#: bytes of a range of weights as they lie in host memory: (offset in the range, uint8 tensor)
Pieces = Sequence[tuple[int, torch.Tensor]]

# a buffer of less is filled so often that the driver's own is as good
LEAST_BUFFER: Final = MIB
_ALIGN: Final = 512


class Pinner(Protocol):
    """Who locks pages."""

    def lock(self, blob: torch.Tensor) -> bool:
        """Lock the pages of a blob; False where that is refused."""

    def unlock(self, blob: torch.Tensor) -> None:
        """Undo `lock`."""


class HostPinner:
    """Stands in where there is no card: nothing has to be locked."""

    def lock(self, blob: torch.Tensor) -> bool:
        """Nothing is refused."""
        return True

    def unlock(self, blob: torch.Tensor) -> None:
        """Nothing was done."""


class CudaPinner:
    """CUDA's driver.

    Args:
        device: the card that copies; another one would be started only for this.
    """

    # for every card, not only for the one that is asked
    _PORTABLE: Final = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, blob: torch.Tensor) -> bool:
        """`cudaHostRegister` takes exactly the bytes asked; torch's own allocator of such memory
        rounds each block up to a power of two."""
        with torch.cuda.device(self._device):
            code = torch.cuda.cudart().cudaHostRegister(
                blob.data_ptr(), blob.numel(), self._PORTABLE
            )
            if int(code) != 0:
                self._forget_error()
        return int(code) == 0

    def unlock(self, blob: torch.Tensor) -> None:
        """Give the pages back."""
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(blob.data_ptr())

    def _forget_error(self) -> None:
        """CUDA keeps the refusal as its last error, and torch raises it after the next launch."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)


def pinner_for(device: torch.device) -> Pinner:
    """The kind that fits a device."""
    return CudaPinner(device) if device.type == "cuda" else HostPinner()


class _Blob(Protocol):
    """What `Pinned` needs of a group of weights."""

    n_bytes: int

    @property
    def pinned(self) -> bool:
        """Whether the blob's pages are locked."""

    def pin(self, pinner: Pinner) -> bool:
        """Lock them; False where that is refused."""


class Pinned:
    """What of some weights is locked, and the buffers for the rest.

    Args:
        pinner: who locks.
    """

    def __init__(self, pinner: Pinner) -> None:
        self._pinner = pinner
        #: locked memory through which the rest passes, in two halves
        self.buffer: torch.Tensor | None = None
        #: bytes that move and that are not locked
        self.refused_bytes = 0

    def lock(self, blobs: Iterable[_Blob], limit: int | None, half: int) -> str | None:
        """Lock blobs in their order, as far as the driver grants it.

        Args:
            blobs: everything that moves; empty ones and locked ones are passed over.
            limit: most bytes to lock, None when that is not known.
            half: bytes of the largest piece that passes while the card computes; 0 = nothing does,
                and no buffers are needed.

        Returns:
            A sentence when more was refused than last time.
        """
        held = [blob for blob in blobs if blob.n_bytes]
        waiting = [blob for blob in held if not blob.pinned]
        total = sum(blob.n_bytes for blob in held)
        more = sum(blob.n_bytes for blob in waiting)
        left = None if limit is None else limit - (total - more)
        if waiting and self.buffer is None and half:
            # before the blobs: a driver that has begun to refuse grants nothing small either
            self.buffer = self._two(half, left)
        if left is not None and self.buffer is not None and more > left:
            left -= self.buffer.numel()
        refused = 0
        for blob in waiting:
            beyond = left is not None and blob.n_bytes > left
            # a driver that has refused once is not asked again for hundreds of them
            if refused or beyond or not blob.pin(self._pinner):
                refused += blob.n_bytes
            elif left is not None:
                left -= blob.n_bytes
        before, self.refused_bytes = self.refused_bytes, refused
        if not refused:
            self.close()
        return self._said(total) if refused > before else None

    def _two(self, half: int, left: int | None) -> torch.Tensor | None:
        half = -(-half // _ALIGN) * _ALIGN
        least = min(LEAST_BUFFER, half)
        while half >= least:
            if left is None or 2 * half <= left:
                buffer = torch.empty(2 * half, dtype=torch.uint8)
                if self._pinner.lock(buffer):
                    return buffer
            half = half // 2 // _ALIGN * _ALIGN
        return None

    def _said(self, total: int) -> str:
        locked = (total - self.refused_bytes) / GIB
        rest = "copies of the rest are slower"
        if self.buffer is not None:
            rest = f"the rest passes through a buffer of {self.buffer.numel() / MIB:.0f} MiB"
        return (
            f"{locked:.2f} of {total / GIB:.2f} GiB of the weights that move could be locked in "
            f"host memory; {rest}"
        )

    def close(self) -> None:
        """Let the buffers go; what was refused is forgotten."""
        if self.buffer is not None:
            self._pinner.unlock(self.buffer)
            self.buffer = None


class Staging:
    """Copies bytes that are not locked through two buffers that are, in turn.

    Args:
        buffer: locked memory.
        copies: of the device.
    """

    def __init__(self, buffer: torch.Tensor, copies: Copies) -> None:
        half = buffer.numel() // 2
        self._halves = (buffer[:half], buffer[half:])
        self._copies = copies
        self._own = (copies.event(), copies.event())
        # what the newest copy out of each half is known by
        self._leaving: list[Any] = [None, None]
        self._turn = 0

    def copy(self, target: torch.Tensor, pieces: Pieces, after: Sequence[Any], done: Any) -> None:
        """As `Copies.copy`, of bytes that lie in pieces.

        The host waits for nothing but the copy before the last to leave its half. Bytes between two
        pieces are whatever was there.
        """
        size, end = self._halves[0].numel(), target.numel()
        for start in range(0, end, size):
            stop, turn = min(start + size, end), self._turn
            self._turn = 1 - turn
            if self._leaving[turn] is not None:
                self._copies.finish(self._leaving[turn])
            half = self._halves[turn][: stop - start]
            for offset, data in pieces:
                first, last = max(offset, start), min(offset + data.numel(), stop)
                if first < last:
                    half[first - start : last - start].copy_(data[first - offset : last - offset])
            event = done if stop == end else self._own[turn]
            # copies run one after the other: what the first waits for, all of them wait for
            self._copies.copy(target[start:stop], half, after, event)
            self._leaving[turn] = event
