"""Findings about accelerators: which there are, whether torch can use them, and what runs there.

Pure functions over `Facts`; part of `diagnosis`.
"""

from collections.abc import Iterator

from sdx_accel.runtime.facts import Facts, GpuFacts
from sdx_accel.runtime.findings import TESTED, Level, Row

__all__ = ["build_covers", "gib", "gpu_rows", "runs_our_kernels"]

# Triton dropped its tensor-core path for older cards in 3.3
OWN_KERNELS_FROM = (8, 0)
# fp16 arithmetic is 1/64 of fp32's rate on sm_61 and absent before; bf16 is emulated before sm_80
HALF_PRECISION_FROM = (7, 0)

OTHER_VENDORS = {
    "amd": "torch's kernels run on AMD cards; the memory budget and our kernels are NVIDIA's only",
    "intel": "torch's kernels run on Intel cards; the memory budget and our kernels are NVIDIA's "
    "only",
    "apple": "torch's kernels run on Apple's GPU (mps); the memory budget and our kernels are "
    "NVIDIA's only",
}


def gib(size_bytes: int | None) -> str:
    """`size_bytes` in GiB for people, or "unknown"."""
    return "unknown" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"


def runs_our_kernels(gpu: GpuFacts) -> bool:
    """Whether a card is new enough for the Triton kernels."""
    return gpu.capability is not None and gpu.capability >= OWN_KERNELS_FROM


def build_covers(arch_list: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether a torch build has code that runs on a card.

    Machine code (`sm_86`) runs on the same major version from that minor one on; PTX
    (`compute_80`) is translated for anything newer; an `a` or `f` suffix binds to its own card.

    Args:
        arch_list: what `torch.cuda.get_arch_list()` gives; empty counts as unknown and covers all.
        capability: (major, minor).
    """
    if not arch_list:
        return True
    return any(_runs_on(entry, capability) for entry in arch_list)


def _runs_on(entry: str, capability: tuple[int, int]) -> bool:
    kind, _, number = entry.partition("_")
    digits = number.rstrip("af")
    if not digits.isdigit():
        return False
    built = (int(digits[:-1]), int(digits[-1]))
    if digits != number:
        return built == capability
    if kind == "compute":
        return built <= capability
    return built[0] == capability[0] and built <= capability


def reinstall_torch(facts: Facts, channel: str | None = None) -> str:
    """The command that replaces the torch build by one with CUDA.

    PyPI's torch has CUDA on Linux. Other builds (Windows, an older driver or card) come from an
    index of PyTorch's own, which its selector page prints and which changes over time.
    """
    version = facts.packages.get("torch", TESTED["torch"]).split("+")[0]
    command = f"pip install --force-reinstall torch=={version}"
    if channel is None and facts.system == "Windows":
        channel = "cu130"
    if channel is None:
        return command
    return f"{command} --index-url <the {channel} index named on https://pytorch.org/get-started>"


def gpu_rows(facts: Facts) -> Iterator[Row]:
    """Cards, driver and CUDA, then what runs on each card and why."""
    if not facts.gpus:
        yield _no_gpu(facts)
        return
    if facts.driver is not None:
        newest = (
            "" if facts.driver_cuda is None else ", CUDA up to {}.{}".format(*facts.driver_cuda)
        )
        yield Row(Level.OK, "driver", f"NVIDIA {facts.driver}{newest}")
    for gpu in facts.gpus:
        yield Row(Level.OK, f"GPU {gpu.index}", _describe(gpu))
    nvidia = [gpu for gpu in facts.gpus if gpu.vendor == "nvidia"]
    fault = _cuda_fault(facts) if nvidia else None
    if fault is not None:
        yield fault
        return
    for gpu in facts.gpus:
        yield _what_runs(facts, gpu)


def _describe(gpu: GpuFacts) -> str:
    card = gpu.name
    if gpu.capability is not None:
        card += " (sm_{}{})".format(*gpu.capability)
    if gpu.total_bytes is None:
        return f"{card}, memory unknown"
    return f"{card}, {gib(gpu.total_bytes)}, free {gib(gpu.free_bytes)}"


def _no_gpu(facts: Facts) -> Row:
    if facts.nvidia_on_bus:
        return Row(
            Level.WARN,
            "GPU",
            "an NVIDIA card is in this machine, but no driver answers: everything runs on the CPU",
            "install NVIDIA's driver and restart; in a container, start it with --gpus all",
        )
    return Row(Level.OK, "GPU", "none: everything runs on the CPU, in fp32, with torch's kernels")


def _cuda_fault(facts: Facts) -> Row | None:
    """Why torch cannot use the NVIDIA cards that are there."""
    installed = facts.packages.get("torch")
    if installed is None or "torch" in facts.import_errors:
        return Row(Level.WARN, "CUDA", "cannot be asked for without torch", "mend torch first")
    if facts.torch_cuda is None and facts.torch_hip is None:
        return Row(
            Level.FAIL,
            "CUDA",
            f"torch build is CPU-only ({installed}), and there is an NVIDIA GPU",
            reinstall_torch(facts),
        )
    if facts.cuda_usable:
        return None
    if facts.visible_devices is not None and facts.visible_devices.strip() in ("", "-1"):
        return Row(
            Level.WARN,
            "CUDA",
            f"CUDA_VISIBLE_DEVICES={facts.visible_devices!r} hides every GPU",
            "unset CUDA_VISIBLE_DEVICES",
        )
    wanted = tuple(int(part) for part in (facts.torch_cuda or "0").split(".")[:2])
    if facts.driver_cuda is not None and facts.driver_cuda[0] < wanted[0]:
        finding = "driver {} runs CUDA up to {}.{}, but torch is built for {}".format(
            facts.driver, *facts.driver_cuda, facts.torch_cuda
        )
        # any driver for CUDA 12 runs any build for CUDA 12
        mend = (
            reinstall_torch(facts, "cu126")
            if facts.driver_cuda[0] == 12
            else "update NVIDIA's driver and restart"
        )
        return Row(Level.FAIL, "CUDA", finding, mend)
    return Row(
        Level.FAIL,
        "CUDA",
        f"torch cannot use the GPU: {facts.cuda_error or 'it gives no reason'}",
        "nvidia-smi (if it fails too, restart: the driver was updated under a running system)",
    )


def _what_runs(facts: Facts, gpu: GpuFacts) -> Row:
    subject = f"on GPU {gpu.index}"
    if gpu.vendor != "nvidia":
        return Row(Level.OK, subject, OTHER_VENDORS[gpu.vendor])
    if gpu.capability is None:
        return Row(Level.OK, subject, "torch's kernels: the card does not tell its capability")
    name = "sm_{}{}".format(*gpu.capability)
    if not build_covers(facts.torch_arch_list, gpu.capability):
        return Row(
            Level.FAIL,
            subject,
            f"this torch build has no code for {name} (it has {', '.join(facts.torch_arch_list)})",
            # the CUDA 12 builds carry the oldest cards and, for the newest, PTX
            reinstall_torch(facts, "cu126" if gpu.capability < (7, 5) else "cu130"),
        )
    if gpu.capability < HALF_PRECISION_FROM:
        dtype = f"fp32, because {name} computes fp16 far slower"
    elif gpu.capability < OWN_KERNELS_FROM:
        dtype = f"fp16, because {name} has no bf16 units"
    else:
        dtype = "fp16 (bf16 is as fast)"
    if not runs_our_kernels(gpu):
        kernels = f"torch's kernels, because Triton has no tensor-core path for {name}"
    elif facts.triton_error is not None:
        kernels = f"torch's kernels, because Triton cannot be used ({facts.triton_error})"
    elif gpu.attention is not None:
        kernels = gpu.attention
    else:
        kernels = "our Triton kernels, or torch's where those are faster"
    return Row(Level.OK, subject, f"{kernels}; dtype {dtype}")
