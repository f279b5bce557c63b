"""Weights in units: at most one host blob and one device allocation each.

A unit keeps the very tensor objects of the modules and swaps what they point at, so parameters stay
themselves for optimisers, adapters and hooks. Weights are read-only in inference: leaving the card
is a free drop, coming back is one memcpy.

Only what the driver locks for fast copies is gathered into a blob. The rest (what never moves, and
what the driver refuses) stays where it was loaded: weights that diffusers or transformers have read
from safetensors in the dtype of the file are the file itself, mapped into memory, so they take no
other host memory and the system may drop and read them again. Weights that were cast while loading,
or come from the card, are ordinary memory in either case.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sdx_accel.budget.units import MIB
from sdx_accel.runtime.pinning import Pieces, Pinner

__all__ = [
    "ALIGN",
    "UNIT_BYTES",
    "WeightUnit",
    "split_weights",
    "tensor_bytes",
    "unit_bytes",
    "weight_tensors",
]

# torch's allocator aligns to 512 bytes; kernels chosen by alignment must not change with placement
ALIGN = 512
# small enough to move little too much, large enough that one allocation wastes under 2 %
UNIT_BYTES = 128 * MIB


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN) * ALIGN


def tensor_bytes(tensor: torch.Tensor) -> int:
    """What a tensor takes in a unit, aligned."""
    return _aligned(tensor.numel() * tensor.element_size())


def weight_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers in order of registration, tied ones once."""
    seen: set[int] = set()
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def split_weights(module: torch.nn.Module) -> list[list[tuple[str, torch.Tensor]]]:
    """A module's tensors in groups of about `UNIT_BYTES`; the same split for meta and real ones."""
    groups: list[list[tuple[str, torch.Tensor]]] = []
    size = UNIT_BYTES + 1
    for name, tensor in weight_tensors(module):
        n_bytes = tensor_bytes(tensor)
        if size + n_bytes > UNIT_BYTES:
            groups.append([])
            size = 0
        groups[-1].append((name, tensor))
        size += n_bytes
    return groups


def unit_bytes(group: list[tuple[str, torch.Tensor]]) -> int:
    """Size of the one allocation that holds a group, in bytes."""
    return sum(tensor_bytes(tensor) for _, tensor in group)


@dataclass(eq=False)
class _Slot:
    name: str
    tensor: torch.Tensor
    offset: int
    n_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    # where it was loaded, until it is in the host blob
    home: torch.Tensor | None

    def view(self, blob: torch.Tensor, start: int | None = None) -> torch.Tensor:
        start = self.offset if start is None else start
        flat = blob[start : start + self.n_bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's stride if it covers its elements without gaps, else the contiguous one."""
    return torch.empty_like(tensor, memory_format=torch.preserve_format, device="meta").stride()


def _can_stay(tensor: torch.Tensor) -> bool:
    """Whether a tensor's own memory can be copied from: ordinary, dense and on the host."""
    return (
        tensor.device.type == "cpu"
        and not tensor.is_inference()
        and tensor.stride() == _dense_stride(tensor)
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class WeightUnit:
    """One group of tensors with a host copy and, while loaded, a device copy.

    The host copy is where the tensors were loaded until `pin` gathers them into one blob. Tensors
    that cannot be copied from there (on the card, with gaps) are gathered at once.

    Args:
        name: for reports.
        group: (name, tensor) pairs of one module.
    """

    # a weight that is an inference tensor could never again take part in a gradient
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, name: str, group: list[tuple[str, torch.Tensor]]) -> None:
        self.name = name
        self.n_bytes = unit_bytes(group)
        self._host: torch.Tensor | None = None
        self._device: torch.Tensor | None = None
        self._pinner: Pinner | None = None
        self._slots: list[_Slot] = []
        offset = 0
        for path, tensor in group:
            n_bytes = tensor.numel() * tensor.element_size()
            stride = _dense_stride(tensor)
            self._slots.append(
                _Slot(
                    path, tensor, offset, n_bytes, tensor.dtype, tensor.shape, stride, tensor.data
                )
            )
            offset += _aligned(n_bytes)
        self._offsets = [slot.offset for slot in self._slots]
        if not all(_can_stay(tensor) for _, tensor in group):
            self._gather(torch.empty(self.n_bytes, dtype=torch.uint8))

    def _gather(self, blob: torch.Tensor) -> None:
        """Make `blob` the host copy."""
        for slot in self._slots:
            host = slot.view(blob)
            host.copy_(self._home(slot))
            if self._device is None:
                slot.tensor.data = host
            # one by one, so that the host never holds all of it twice
            slot.home = None
        self._host = blob

    def _home(self, slot: _Slot) -> torch.Tensor:
        if slot.home is not None:
            return slot.home
        assert self._host is not None
        return slot.view(self._host)

    @property
    def loaded(self) -> bool:
        """Whether the device copy exists."""
        return self._device is not None

    @property
    def pinned(self) -> bool:
        """Whether the host copy is one blob whose pages are locked."""
        return self._pinner is not None

    @torch.inference_mode(False)
    @torch.no_grad()
    def pin(self, pinner: Pinner) -> bool:
        """Gather the weights into a blob of locked pages; False if refused, and nothing is moved.

        Not while the tensors point into a ring.
        """
        if self._pinner is None and self.n_bytes:
            blob = self._host
            if blob is None:
                blob = torch.empty(self.n_bytes, dtype=torch.uint8)
            if pinner.lock(blob):
                self._pinner = pinner
                if blob is not self._host:
                    self._gather(blob)
        return self.pinned

    @torch.inference_mode(False)
    @torch.no_grad()
    def load(self, device: torch.device) -> int:
        """Copy to the device on the current stream and point the tensors there; bytes moved."""
        if self._device is not None:
            return 0
        blob = torch.empty(self.n_bytes, dtype=torch.uint8, device=device)
        self._copy_into(blob, 0)
        for slot in self._slots:
            slot.tensor.data = slot.view(blob)
        self._device = blob
        return self.n_bytes

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_range(self, offset: int, n_bytes: int, device: torch.device) -> int:
        """`load` for one range, on a blob of its own that lives until the range points home."""
        blob = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self._copy_into(blob, offset)
        self.point(offset, n_bytes, blob)
        return n_bytes

    def _copy_into(self, blob: torch.Tensor, offset: int) -> None:
        for start, data in self.pieces(offset, blob.numel()):
            blob[start : start + data.numel()].copy_(data, non_blocking=self.pinned)

    @torch.inference_mode(False)
    def drop(self) -> None:
        """Point the tensors at the host copy and let the device copy go; nothing is copied."""
        for slot in self._slots:
            slot.tensor.data = self._home(slot)
        self._device = None

    def find(self, paths: Sequence[str]) -> list[tuple[int, int]]:
        """(offset, bytes) of the tensors below some modules, one range for each tensor."""
        return [
            (slot.offset, _aligned(slot.n_bytes))
            for slot in self._slots
            if any(slot.name.startswith(f"{path}.") for path in paths)
        ]

    def pieces(self, offset: int, n_bytes: int) -> Pieces:
        """`n_bytes` of the host copy from `offset` on, to copy from: one piece once it is a blob.

        Args:
            offset, n_bytes: a range that cuts no tensor.
        """
        if self._host is not None:
            return [(0, self._host[offset : offset + n_bytes])]
        return [
            (slot.offset - offset, _bytes_of(self._home(slot)))
            for slot in self._between(offset, n_bytes)
            if slot.n_bytes
        ]

    def _between(self, offset: int, n_bytes: int) -> list[_Slot]:
        first, last = (bisect_left(self._offsets, n) for n in (offset, offset + n_bytes))
        return self._slots[first:last]

    @torch.inference_mode(False)
    def point(self, offset: int, n_bytes: int, blob: torch.Tensor | None, start: int = 0) -> None:
        """Point the tensors of a range at `blob` from byte `start` on, or home; copies nothing.

        Args:
            offset, n_bytes: a range of the host copy that cuts no tensor.
            blob: uint8, where the bytes of the range are or will be; None for the host copy.
            start: byte of the blob that corresponds to `offset`.
        """
        for slot in self._between(offset, n_bytes):
            if blob is None:
                slot.tensor.data = self._home(slot)
            else:
                slot.tensor.data = slot.view(blob, start + slot.offset - offset)

    def disown(self) -> None:
        """Forget the device copy after someone replaced the tensors' data (a dtype cast)."""
        self._device = None

    def abandon(self) -> None:
        """Leave the tensors on the host copy, which is theirs from now on; nothing is copied."""
        self.drop()
        self._unpin()
        self._slots = []

    @torch.inference_mode(False)
    @torch.no_grad()
    def close(self, device: torch.device | None = None) -> None:
        """Undo: tensors own separate storage again, on `device` or the host."""
        on_host = device is None or device.type == "cpu"
        for slot in self._slots:
            if slot.home is not None and on_host:
                slot.tensor.data = slot.home
            else:
                slot.tensor.data = self._home(slot).to(device or "cpu", copy=True)
        self._device = None
        self._unpin()
        # unit by unit, so that the host never holds all weights twice
        self._slots = []
        self._host = None

    def _unpin(self) -> None:
        if self._pinner is not None and self._host is not None:
            self._pinner.unlock(self._host)
            self._pinner = None
