"""Readings of the real card: driver-visible use, free memory, link bandwidth.

Unknown is None, never a sentinel number. Reading NVML starts no CUDA context.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.units import GIB, MIB
from sdx_kernels import LowerTriangularMask, attend

__all__ = ["Card", "open_card", "read_idle_cards", "warm_up"]

# torch's cuBLAS workspace: 32 MiB on Hopper and later, 8 × 1 MiB + 2 × 64 KiB before
BLAS_BYTES_SM90, BLAS_BYTES = 32 * MIB, round(8.125 * MIB)
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
    """

    device: torch.device
    uuid: str | None
    idle_bytes: int | None

    def process_bytes(self) -> int | None:
        """Driver-visible use of this process, or None when the driver does not tell.

        Per process where NVML knows this process (not in most containers), else the rise over the
        idle reading.
        """
        nvml, handle = _nvml(), _handles().get(self.uuid or "")
        if nvml is None or handle is None:
            return None
        try:
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory:
                    return int(process.usedGpuMemory)
        except nvml.NVMLError:
            pass
        used = _used(handle)
        if used is None or self.idle_bytes is None:
            return None
        return max(0, used - self.idle_bytes)

    def non_torch_bytes(self) -> int | None:
        """Context, libraries and loaded kernels: driver-visible use minus what torch reserves."""
        seen = self.process_bytes()
        return None if seen is None else max(0, seen - torch.cuda.memory_reserved(self.device))

    def machine(self, *, measure_link: bool = True) -> Machine:
        """The card as a planner's record; starts CUDA."""
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        non_torch = self.non_torch_bytes()
        generic = Machine.generic()
        ours = non_torch if non_torch is not None else generic.non_torch_bytes
        hopper = (properties.major, properties.minor) >= (9, 0)
        return Machine(
            name=properties.name,
            total_bytes=total,
            free_bytes=min(total, free + reserved + ours),
            non_torch_bytes=ours,
            link_bytes_per_s=(
                _link_bytes_per_s(self.device) if measure_link else generic.link_bytes_per_s
            ),
            blas_workspace_bytes=BLAS_BYTES_SM90 if hopper else BLAS_BYTES,
            source="measured" if non_torch is not None else "generic context",
        )


def open_card(device: torch.device) -> Card:
    """The card behind a CUDA device; reads the idle state first when there is still time."""
    read_idle_cards()
    index = device.index if device.index is not None else torch.cuda.current_device()
    device = torch.device("cuda", index)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    name = None if uuid is None else f"GPU-{uuid}"
    return Card(device, name, _idle_bytes.get(name or ""))


def _link_bytes_per_s(device: torch.device) -> float:
    """Pinned host to device copies, best of five of 32 MiB; under 20 ms on PCIe 3.0 ×16."""
    source = torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    best = 0.0
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        best = max(best, source.numel() / (start.elapsed_time(end) / 1e3))
    del target
    torch.cuda.empty_cache()
    # two digits: enough to predict with, and equal from run to run
    return float(f"{best:.1e}") if best < 100 * GIB else best


def warm_up(device: torch.device, dtypes: list[torch.dtype]) -> None:
    """Run one of each kind of library call, so that later readings contain their code.

    cuBLAS, cuDNN and the attention kernels are loaded by the driver at their first use, 60-300 MiB
    in all; a cap computed before that would be too high.
    """
    for dtype in dict.fromkeys(dtypes):
        picture = torch.zeros(1, 64, 64, 64, device=device, dtype=dtype)
        kernel = torch.zeros(64, 64, 3, 3, device=device, dtype=dtype)
        torch.nn.functional.conv2d(picture, kernel, padding=1)
        torch.nn.functional.conv2d(picture, kernel, padding=1, stride=2)
        torch.nn.functional.group_norm(picture, 8)
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
