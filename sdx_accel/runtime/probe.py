"""Readings of the real card: driver-visible use and free memory.

Unknown is None, never a sentinel number. Reading NVML starts no CUDA context.
"""

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.units import MIB
from sdx_accel.runtime.calibration import Record, key_of
from sdx_accel.runtime.host_memory import limits, pinnable_bytes
from sdx_kernels import LowerTriangularMask, attend
from sdx_kernels.ops.group_norm import GroupMoments, upsampled_rows

__all__ = ["Card", "open_card", "read_idle_cards", "warm_up"]

# torch's cuBLAS workspace: 32 MiB on Hopper and later, 8 × 1 MiB + 2 × 64 KiB before
BLAS_BYTES_SM90, BLAS_BYTES = 32 * MIB, round(8.125 * MIB)
# code that the driver still loads after `warm_up`: tens of MiB were seen. What looks like more of
# ours is another program's, where the driver does not tell whose it is
LAZY_BYTES = 256 * MIB
# readings of an idle card, by UUID, taken before this process started CUDA
_idle_bytes: dict[str, int] = {}


@lru_cache(maxsize=1)
def _nvml() -> Any:
    """The started NVML module, or None."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # a missing, old or foreign driver raises many kinds; all mean "unknown"
        return None
    return pynvml


def _as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _handles() -> dict[str, Any]:
    nvml = _nvml()
    if nvml is None:
        return {}
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    return {_as_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}


def _used(handle: Any) -> int | None:
    nvml = _nvml()
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return None
    return int(memory.used) if 0 <= memory.used <= memory.total else None


def read_idle_cards() -> None:
    """Remember every card's use, if this process has not started CUDA yet; else do nothing."""
    if torch.cuda.is_initialized():
        return
    for uuid, handle in _handles().items():
        used = _used(handle)
        if used is not None:
            _idle_bytes[uuid] = used


@dataclass
class Card:
    """One CUDA device.

    Args:
        device: torch's name for it.
        uuid: the driver's name for it; None when torch does not tell.
        idle_bytes: its use before this process started CUDA; None when it was too late to read.
        settled_bytes: from `settle`; None before.
    """

    device: torch.device
    uuid: str | None
    idle_bytes: int | None
    settled_bytes: int | None = None

    def process_bytes(self) -> int | None:
        """Driver-visible use of this process, or None when the driver does not tell.

        Per process where NVML knows this process (not in most containers), else the rise over the
        idle reading.
        """
        handle = _handles().get(self.uuid or "")
        told = self._told(handle)
        if told is not None or handle is None:
            return told
        used = _used(handle)
        if used is None or self.idle_bytes is None:
            return None
        return max(0, used - self.idle_bytes)

    def _told(self, handle: Any) -> int | None:
        """This process's use where the driver knows it, else None."""
        nvml = _nvml()
        if nvml is None or handle is None:
            return None
        try:
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory:
                    return int(process.usedGpuMemory)
        except nvml.NVMLError:
            pass
        return None

    def non_torch_bytes(self) -> int | None:
        """Context, libraries and loaded kernels: driver-visible use minus what torch reserves.

        A rise over the idle reading holds what others took since: it counts within `LAZY_BYTES`.
        """
        seen = self.process_bytes()
        if seen is None:
            return None
        outside = max(0, seen - torch.cuda.memory_reserved(self.device))
        if self.settled_bytes is None or self._told(_handles().get(self.uuid or "")) is not None:
            return outside
        # what has been loaded stays loaded: less is another program that has gone
        return min(max(outside, self.settled_bytes), self.settled_bytes + LAZY_BYTES)

    def settle(self) -> None:
        """All libraries are loaded now: from here on this process takes little more."""
        self.settled_bytes = self.non_torch_bytes()

    def is_disturbed(self) -> bool:
        """Whether another program's use since `settle` cannot be told from this process's."""
        now = self.non_torch_bytes()
        if now is None or self.settled_bytes is None:
            return False
        return now >= self.settled_bytes + LAZY_BYTES

    @property
    def key(self) -> str:
        """What a calibration of this card is filed under."""
        return key_of(
            self.uuid or torch.cuda.get_device_properties(self.device).name,
            _driver(),
            torch.__version__,
            str(torch.backends.cudnn.version()),
        )

    def free_bytes(self) -> int:
        """What this process may use at most: the driver's free memory and what is ours already."""
        free, total = torch.cuda.mem_get_info(self.device)
        non_torch = self.non_torch_bytes()
        ours = Machine.generic().non_torch_bytes if non_torch is None else non_torch
        return min(total, free + torch.cuda.memory_reserved(self.device) + ours)

    def machine(self, record: Record | None = None) -> Machine:
        """The card as a planner's record; starts CUDA.

        Args:
            record: its calibration; without one the speeds are the generic ones.
        """
        properties = torch.cuda.get_device_properties(self.device)
        generic, context = Machine.generic(), self.non_torch_bytes()
        source = "measured"
        if context is None and record is not None and record.context_bytes is not None:
            context, source = record.context_bytes, "measured earlier"
        elif context is None:
            context, source = generic.non_torch_bytes, "generic context"
        hopper = (properties.major, properties.minor) >= (9, 0)
        machine = replace(
            generic,
            name=properties.name,
            total_bytes=torch.cuda.mem_get_info(self.device)[1],
            free_bytes=self.free_bytes(),
            non_torch_bytes=context,
            blas_workspace_bytes=BLAS_BYTES_SM90 if hopper else BLAS_BYTES,
            source=source,
            pinnable_bytes=pinnable_bytes(limits()),
        )
        if record is None:
            return machine
        return replace(
            machine,
            link_bytes_per_s=record.loaded_bytes_per_s,
            pageable_bytes_per_s=record.pageable_bytes_per_s,
            flops_per_s=record.flops_per_s,
        )


def _driver() -> str:
    nvml = _nvml()
    if nvml is None:
        return "unknown"
    try:
        return _as_text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return "unknown"


def open_card(device: torch.device) -> Card:
    """The card behind a CUDA device; reads the idle state first when there is still time."""
    read_idle_cards()
    index = device.index if device.index is not None else torch.cuda.current_device()
    device = torch.device("cuda", index)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    name = None if uuid is None else f"GPU-{uuid}"
    return Card(device, name, _idle_bytes.get(name or ""))


def _warm_decode(picture: torch.Tensor, kernel: torch.Tensor) -> None:
    """The kernels of a decode in bands: what convolutions write, its norm, and upsampled rows."""
    height, width = picture.shape[2:]
    last = picture.contiguous(memory_format=torch.channels_last)
    moments = GroupMoments(last, [height * width])
    for residual in (None, last):
        moments.store(0, last, bias=kernel[:, 0, 0, 0], residual=residual)
    moments.settle(8, picture[0, :, 0, 0], picture[0, :, 0, 0])
    rows = moments.normalized(last, -1, height + 1, silu=True)
    torch.nn.functional.conv2d(rows, kernel, padding=(0, 1))
    upsampled_rows(last, -1, 2 * height + 1)


def warm_up(device: torch.device, dtypes: list[torch.dtype]) -> None:
    """Run one of each kind of library call, so that later readings contain their code.

    cuBLAS, cuDNN and the attention kernels are loaded by the driver at their first use, 60-300 MiB
    in all; a cap computed before that would be too high.
    """
    # torch makes its streams, 32 of each priority, when the first one is asked for, as a ring of
    # weights or a calibration does: 72 MiB on an H200, more than a cap's margin
    torch.cuda.Stream(device)
    for dtype in dict.fromkeys(dtypes):
        picture = torch.zeros(1, 64, 64, 64, device=device, dtype=dtype)
        kernel = torch.zeros(64, 64, 3, 3, device=device, dtype=dtype)
        torch.nn.functional.conv2d(picture, kernel, padding=1)
        torch.nn.functional.conv2d(picture, kernel, padding=1, stride=2)
        torch.nn.functional.group_norm(picture, 8)
        _warm_decode(picture, kernel)
        rows = torch.zeros(256, 256, device=device, dtype=dtype)
        torch.nn.functional.linear(rows, rows, rows[0])
        torch.nn.functional.gelu(torch.nn.functional.layer_norm(rows, (256,)))
        for width in (64, 512):
            heads = torch.zeros(1, 2, 256, width, device=device, dtype=dtype)
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        # a causal mask takes our own kernel where the card can run it
        rows = torch.zeros(1, 32, 2, 64, device=device, dtype=dtype)
        attend(rows, rows, rows, LowerTriangularMask())
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
