"""Asks the machine, the driver and the installed packages for the facts that `doctor` judges.

Each probe may fail on its own and then leaves None or a sentence; gathering never raises.
"""

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sdx_accel.runtime.facts import Facts, GpuFacts, known_bytes, memory_pair
from sdx_accel.runtime.kernel_cache import locate_kernel_cache

__all__ = ["cgroup_limit", "gather"]

PACKAGES = (
    "sdx-accel", "torch", "triton", "triton-windows", "diffusers", "transformers", "accelerate",
    "peft", "xformers", "torchvision",
)  # fmt: skip
# imported for real: a package that is installed and cannot be imported is what doctor is for
IMPORTED = ("torch", "diffusers", "transformers", "accelerate")


def attempt(probe: Callable[..., Any], *arguments: object) -> tuple[Any, str | None]:
    """`(value, None)`, or `(None, sentence)` when the probe raised or only warned its way out."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            value = probe(*arguments)
        except Exception as error:  # a broken installation raises anything, SystemError included
            text = " ".join(str(error).split()) or "no message"
            return None, f"{type(error).__name__}: {text}"
    return value, " ".join(str(said[0].message).split()) if said and not value else None


def gather() -> Facts:
    """Look at the machine. Imports torch; takes a few seconds; never raises."""
    packages = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    errors = {}
    for name in IMPORTED:
        if name in packages:
            _, error = attempt(importlib.import_module, name)
            if error is not None:
                errors[name] = error
    torch = sys.modules.get("torch") if "torch" not in errors else None
    if torch is None and "torch" not in packages:
        errors["torch"] = "it is not installed"
    total, available = attempt(_ram)[0] or (None, None)
    return Facts(
        python=sys.version_info[:3],
        system=platform.system(),
        wsl="microsoft" in platform.release().lower(),
        packages=packages,
        import_errors=errors,
        pins=tuple(_pins(packages)),
        triton_error=_triton_error(),
        ram_total_bytes=known_bytes(total),
        ram_available_bytes=known_bytes(available),
        ram_limit_bytes=attempt(cgroup_limit)[0],
        kernel_cache=locate_kernel_cache(),
        compiler=_compiler(),
        python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        disabled=os.environ.get("SDX_DISABLE", "") not in ("", "0"),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        nvidia_on_bus=bool(attempt(_nvidia_on_bus)[0]),
        **_torch_facts(torch),
        **(attempt(_nvidia)[0] or _other_gpus(torch)),
    )


def _version(distribution: str) -> str | None:
    return attempt(importlib.metadata.version, distribution)[0]


def _pins(packages: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Exact versions of torch and Triton that installed packages were built against."""
    for name in ("torch", "torchvision", "xformers"):
        if name not in packages:
            continue
        for line in attempt(importlib.metadata.requires, name)[0] or ():
            if found := re.match(r"(torch|triton)\s*\(?==\s*([\w.+]+)", line):
                yield name, found[1], found[2]


def _triton_error() -> str | None:
    """Why Triton cannot be used, from the one module that may ask."""

    def ask() -> tuple[bool, str | None]:
        from sdx_kernels import target

        return target.triton_status()

    answer, error = attempt(ask)
    if answer is None:
        return error
    available, reason = answer
    return None if available else reason or "it cannot be imported"


def _torch_facts(torch: Any) -> dict[str, Any]:
    if torch is None:
        return {}
    usable, complaint = attempt(torch.cuda.is_available)
    if not usable and complaint is None and torch.version.cuda is not None:
        complaint = attempt(torch.cuda.init)[1]
    return {
        "torch_cuda": torch.version.cuda,
        "torch_hip": getattr(torch.version, "hip", None),
        "cudnn": attempt(lambda: str(torch.backends.cudnn.version() or "") or None)[0],
        "torch_arch_list": tuple(attempt(torch.cuda.get_arch_list)[0] or ()),
        "cuda_usable": bool(usable) and torch.version.cuda is not None,
        "cuda_error": complaint,
    }


def _nvidia() -> dict[str, Any]:
    """What the driver says, which needs no CUDA build of torch."""
    import pynvml

    pynvml.nvmlInit()
    try:
        cuda = attempt(pynvml.nvmlSystemGetCudaDriverVersion_v2)[0]
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return {
            "driver": _text(attempt(pynvml.nvmlSystemGetDriverVersion)[0]),
            "driver_cuda": None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
            "gpus": tuple(_nvidia_gpu(pynvml, index, card) for index, card in enumerate(handles)),
        }
    finally:
        pynvml.nvmlShutdown()


def _nvidia_gpu(nvml: Any, index: int, card: Any) -> GpuFacts:
    memory = attempt(nvml.nvmlDeviceGetMemoryInfo, card)[0]
    total, free = memory_pair(getattr(memory, "total", None), getattr(memory, "free", None))
    capability = attempt(nvml.nvmlDeviceGetCudaComputeCapability, card)[0]
    name = _text(attempt(nvml.nvmlDeviceGetName, card)[0]) or "NVIDIA GPU"
    return GpuFacts(
        index=index,
        name=name,
        capability=None if capability is None else tuple(capability),
        total_bytes=total,
        free_bytes=free,
        attention=_attention(capability, name),
        **(attempt(_tuned, name, capability)[0] or {}),
    )


def _attention(capability: tuple[int, int] | None, card: str) -> str | None:
    """What the registry picks, in its own words."""
    if capability is None:
        return None
    from sdx_accel.runtime.warm import what_runs

    return attempt(what_runs, tuple(capability), card)[0]


def _tuned(card: str, capability: tuple[int, int] | None) -> dict[str, str]:
    """The order that `bench --tune` left for a card: which is in use, or why it is not."""
    if capability is None:
        return {}
    from sdx_kernels.tuning.measured_order import measured

    found = measured(card, *capability)
    if found.path is None:
        return {}
    if found.ignored:
        return {"untuned": f"{found.path} is ignored: {found.ignored}"}
    count = len(found.entries)
    return {"tuned": f"{found.path} (digest {found.digest}, {count} changes to the shipped order)"}


def _other_gpus(torch: Any) -> dict[str, Any]:
    """AMD, Intel and Apple, as torch names them."""
    if torch is None:
        return {}
    found: list[GpuFacts] = []
    if getattr(torch.version, "hip", None) and attempt(torch.cuda.is_available)[0]:
        for index in range(torch.cuda.device_count()):
            free, total = attempt(torch.cuda.mem_get_info, index)[0] or (0, 0)
            name = attempt(torch.cuda.get_device_name, index)[0] or "AMD GPU"
            total_bytes, free_bytes = memory_pair(total, free)
            found.append(GpuFacts(index, name, "amd", None, total_bytes, free_bytes))
    if attempt(lambda: torch.xpu.is_available())[0]:
        found.append(GpuFacts(0, "Intel GPU", "intel"))
    if attempt(lambda: torch.backends.mps.is_available())[0]:
        found.append(GpuFacts(0, "Apple GPU", "apple"))
    return {"gpus": tuple(found)}


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _ram() -> tuple[int, int]:
    psutil = importlib.import_module("psutil")  # accelerate depends on it
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def cgroup_limit(root: Path = Path("/"), membership: str | None = None) -> int | None:
    """The tightest memory limit in bytes of the control groups this process is in, or None.

    Args:
        root: where `sys/fs/cgroup` is found.
        membership: the text of `/proc/self/cgroup`, read when not given.
    """
    if membership is None:
        membership = (root / "proc/self/cgroup").read_text()
    base = root / "sys/fs/cgroup"
    files = [base / "memory.max", base / "memory/memory.limit_in_bytes"]
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        version_2 = controllers == ""
        folder = base if version_2 else base / "memory"
        for part in Path(path).parts[1:]:
            folder = folder / part
            files.append(folder / ("memory.max" if version_2 else "memory.limit_in_bytes"))
    limits = [attempt(_number_in, file)[0] for file in files]
    known = [limit for limit in map(known_bytes, limits) if limit is not None]
    return min(known, default=None)


def _number_in(file: Path) -> int:
    return int(file.read_text())


def _compiler() -> str | None:
    """Triton's own order: CC as it is, then gcc, then clang."""
    if named := os.environ.get("CC"):
        return shutil.which(named)
    return shutil.which("gcc") or shutil.which("clang")


def _nvidia_on_bus() -> bool:
    """A display controller (class 0x03....) of vendor 0x10de in Linux's device tree."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        kind = (device / "class").read_text().strip()
        if kind.startswith("0x03") and (device / "vendor").read_text().strip() == "0x10de":
            return True
    return False
