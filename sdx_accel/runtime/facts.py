"""What a machine and an installation are, as plain data; judges nothing and asks nobody.

Every field has a value that means "unknown", so that tests can describe any machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sdx_accel.runtime.kernel_cache import KernelCache

__all__ = ["Facts", "GpuFacts", "known_bytes", "memory_pair"]

# 16 TiB: more than any machine has, less than every "unlimited" sentinel seen (2**60 and up)
LARGEST_KNOWN_BYTES = 1 << 44


@dataclass(frozen=True)
class GpuFacts:
    """One accelerator as its driver describes it.

    Attributes:
        index: the driver's number of the card.
        vendor: "nvidia", "amd", "intel" or "apple".
        capability: CUDA compute capability, None where there is no such thing.
        total_bytes, free_bytes: None where the driver does not say.
        attention: what the registry picks for SDXL's self-attention and why; None if not asked.
        tuned: which order measured by `bench --tune` is in use, None without one.
        untuned: which one is there and why it is not used, None without one.
    """

    index: int
    name: str
    vendor: str = "nvidia"
    capability: tuple[int, int] | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    attention: str | None = None
    tuned: str | None = None
    untuned: str | None = None


@dataclass(frozen=True)
class Facts:
    """Everything `diagnose` looks at, so that tests can describe any machine.

    Attributes:
        packages: distribution name to installed version; absent means not installed.
        import_errors: package name to the error that importing it raised.
        pins: (distribution, other, version): `distribution` asks for exactly that `other`.
        triton_error: why Triton cannot be used, None if it can.
        torch_arch_list: architectures that the torch build carries code for, such as "sm_90".
        cuda_usable: whether torch itself says that CUDA works.
        cuda_error: what torch answered when asked for CUDA, None if it did not complain.
        driver_cuda: the newest CUDA version that the NVIDIA driver runs.
        nvidia_on_bus: an NVIDIA display device is on the PCI bus, whatever the driver says.
        ram_limit_bytes: the cgroup's memory limit, None without one.
        compiler: path of the C compiler that Triton would use, None without one.
        python_headers: whether Python.h is where Triton's launcher expects it.
    """

    python: tuple[int, int, int] = (3, 11, 0)
    system: str = "Linux"
    wsl: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    import_errors: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[tuple[str, str, str], ...] = ()
    triton_error: str | None = None
    torch_cuda: str | None = None
    torch_hip: str | None = None
    cudnn: str | None = None
    torch_arch_list: tuple[str, ...] = ()
    cuda_usable: bool = False
    cuda_error: str | None = None
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    visible_devices: str | None = None
    nvidia_on_bus: bool = False
    gpus: tuple[GpuFacts, ...] = ()
    ram_total_bytes: int | None = None
    ram_available_bytes: int | None = None
    ram_limit_bytes: int | None = None
    kernel_cache: KernelCache = field(default_factory=lambda: KernelCache(None, "none"))
    compiler: str | None = None
    python_headers: bool = True
    disabled: bool = False


def known_bytes(value: object) -> int | None:
    """`value` as a byte count, or None where it cannot be one.

    Drivers answer "unknown" and "unlimited" with None, 0, -1, infinities and numbers near 2**63.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 < value <= LARGEST_KNOWN_BYTES else None


def memory_pair(total: object, free: object) -> tuple[int | None, int | None]:
    """Total and free bytes, each None where unknown; more free than there is is unknown too."""
    total_bytes = known_bytes(total)
    free_bytes = 0 if free == 0 and total_bytes is not None else known_bytes(free)
    if total_bytes is not None and free_bytes is not None and free_bytes > total_bytes:
        free_bytes = None
    return total_bytes, free_bytes
