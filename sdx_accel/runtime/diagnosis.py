"""What is right and wrong with an installation, and the one command that mends each fault.

Pure functions over `Facts`: asks no machine, imports no torch, prints nothing.
"""

from collections.abc import Iterator

from sdx_accel.runtime.facts import Facts
from sdx_accel.runtime.findings import FLOORS, TESTED, Diagnosis, Level, Row, release
from sdx_accel.runtime.gpu_diagnosis import gib, gpu_rows, runs_our_kernels

__all__ = ["diagnose"]


def diagnose(facts: Facts) -> Diagnosis:
    """Judge a machine.

    Args:
        facts: the machine, from `sdx_accel.runtime.gathering.gather` or made up by a test.

    Returns:
        One row for everything looked at. A FAIL is a fault that stops what the machine could
        otherwise do; a WARN works in another way than the user would expect.
    """
    return Diagnosis(
        (
            _python(facts),
            *_packages(facts),
            *_pins(facts),
            *gpu_rows(facts),
            *_orders(facts),
            *_triton(facts),
            *_launcher(facts),
            _memory(facts),
            _kernel_cache(facts),
            *_switches(facts),
        )
    )


def _python(facts: Facts) -> Row:
    version = ".".join(map(str, facts.python))
    own = facts.packages.get("sdx-accel", "not installed, run from its folder")
    where = f"{facts.system} under WSL" if facts.wsl else facts.system
    if facts.python < (3, 11):
        return Row(
            Level.FAIL,
            "Python",
            f"{version} is older than 3.11",
            "make test PYTHON=python3.12 (any Python from 3.11 on)",
        )
    return Row(Level.OK, "Python", f"{version} on {where}; sdx-accel {own}")


def _packages(facts: Facts) -> Iterator[Row]:
    for name in ("torch", "diffusers", "transformers", "accelerate"):
        yield _package(facts, name)
    peft = facts.packages.get("peft")
    yield Row(Level.OK, "peft", peft or "not installed; only LoRA files need it (pip install peft)")


def _package(facts: Facts, name: str) -> Row:
    version = facts.packages.get(name)
    if version is None:
        mend = f"pip install {name}=={TESTED[name]}"
        return Row(Level.FAIL, name, "not installed", mend)
    error = facts.import_errors.get(name)
    if release(version) < release(FLOORS[name]):
        finding = f"{version} is older than {FLOORS[name]}, the oldest that works"
        return Row(Level.FAIL, name, finding, f'pip install "{name}>={FLOORS[name]}"')
    if error is not None:
        if name != "torch" and "torch" in facts.import_errors:
            return Row(Level.WARN, name, f"{version}, waits for torch", "mend torch first")
        finding = f"{version} cannot be imported: {_short(error)}"
        mend = f"pip install --force-reinstall {name}=={version.split('+')[0]}"
        if (culprit := _culprit(facts, error)) is not None:
            mend = culprit
        return Row(Level.FAIL, name, finding, mend)
    details = [version]
    if name == "torch" and facts.torch_cuda is not None:
        cudnn = "" if facts.cudnn is None else f", cuDNN {facts.cudnn}"
        details.append(f"built for CUDA {facts.torch_cuda}{cudnn}")
    elif name == "torch" and facts.torch_hip is not None:
        details.append(f"built for ROCm {facts.torch_hip}")
    elif name == "torch" and facts.system != "Darwin":
        details.append("a build for the CPU")
    if release(version)[:2] > release(TESTED[name])[:2]:
        details.append(f"newer than {TESTED[name]}, the newest tested: what is missing falls back")
    return Row(Level.OK, name, "; ".join(details))


def _culprit(facts: Facts, error: str) -> str | None:
    """The command that mends an import error whose cause is another package's binary."""
    stale = {name for name, other, version in facts.pins if _conflicts(facts, other, version)}
    for name in ("torchvision", "xformers"):
        if name in error and name in facts.packages:
            return f"pip install --force-reinstall {name}" if name in stale else None
    return None


def _conflicts(facts: Facts, other: str, version: str) -> bool:
    installed = facts.packages.get(other)
    return installed is not None and release(installed) != release(version)


def _pins(facts: Facts) -> Iterator[Row]:
    """Binaries built for another torch than the one installed: they load with warnings or not."""
    for name, other, version in facts.pins:
        if name == "torch" or not _conflicts(facts, other, version):
            continue
        finding = (
            f"{facts.packages[name]} was built for {other} {version}, "
            f"installed is {facts.packages[other]}"
        )
        if name == "xformers":
            finding += "; sdx_accel does not need it"
            yield Row(Level.WARN, name, finding, "pip uninstall xformers")
        else:
            yield Row(Level.WARN, name, finding, f"pip install --force-reinstall {name}")


def _orders(facts: Facts) -> Iterator[Row]:
    """Whether the order of attention's implementations was measured on each card."""
    if not facts.cuda_usable:
        return
    for gpu in facts.gpus:
        if gpu.vendor != "nvidia" or not runs_our_kernels(gpu):
            continue
        subject = f"order, GPU {gpu.index}"
        if gpu.untuned is not None:
            mend = "sdx-accel bench --tune (and unset SDX_TUNING, if it is off)"
            yield Row(Level.WARN, subject, gpu.untuned, mend)
        elif gpu.tuned is not None:
            yield Row(Level.OK, subject, f"measured here: {gpu.tuned}")
        else:
            finding = "as shipped; `sdx-accel bench --tune` (90 s) measures this card's own"
            yield Row(Level.OK, subject, finding)


def _triton(facts: Facts) -> Iterator[Row]:
    if facts.system == "Darwin":
        return
    distribution = "triton-windows" if facts.system == "Windows" else "triton"
    version = facts.packages.get(distribution)
    useful = _can_run_ours(facts)
    wanted = next(
        (pin for name, other, pin in facts.pins if (name, other) == ("torch", "triton")), None
    )
    exact = f"pip install {distribution}=={wanted}" if wanted and distribution == "triton" else None
    install = exact or f'pip install "{distribution}>={FLOORS["triton"]}"'
    if version is None:
        if useful:
            finding = "not installed: torch's kernels run instead of ours, with the same results"
            yield Row(Level.WARN, "Triton", finding, install)
        else:
            yield Row(Level.OK, "Triton", "not installed, and nothing here would use it")
    elif release(version) < release(FLOORS["triton"]):
        finding = f"{version} is older than {FLOORS['triton']}, the oldest that works"
        yield Row(Level.FAIL, "Triton", finding, install)
    elif facts.triton_error is not None:
        finding = f"{version} cannot be used: {_short(facts.triton_error)}"
        yield Row(
            Level.FAIL if useful else Level.WARN,
            "Triton",
            finding,
            f"pip install --force-reinstall {distribution}=={wanted or version}",
        )
    elif wanted is not None and release(wanted) != release(version):
        torch = facts.packages.get("torch")
        finding = f"{version}, but torch {torch} asks for {wanted}"
        yield Row(Level.WARN, "Triton", finding, install)
    elif release(version)[:2] > release(TESTED["triton"])[:2]:
        finding = f"{version}, newer than {TESTED['triton']}, the newest tested"
        yield Row(Level.OK, "Triton", finding + ": a kernel that fails falls back to torch's")
    else:
        yield Row(Level.OK, "Triton", version)


def _can_run_ours(facts: Facts) -> bool:
    return any(gpu.vendor == "nvidia" and runs_our_kernels(gpu) for gpu in facts.gpus)


def _launcher(facts: Facts) -> Iterator[Row]:
    """Triton compiles a small C file for every kernel; its Windows build brings a compiler."""
    if facts.system != "Linux" or not _can_run_ours(facts) or "triton" not in facts.packages:
        return
    if facts.compiler is None:
        finding = "none found, and Triton needs one to compile kernels"
        yield Row(Level.FAIL, "C compiler", finding, "sudo apt install gcc (or your system's)")
    else:
        yield Row(Level.OK, "C compiler", facts.compiler)
    if not facts.python_headers:
        short = "{}.{}".format(*facts.python)
        finding = f"Python.h of Python {short} is missing, and Triton needs it to compile kernels"
        mend = f"sudo apt install python{short}-dev (or your system's)"
        yield Row(Level.FAIL, "C headers", finding, mend)


def _memory(facts: Facts) -> Row:
    finding = f"{gib(facts.ram_total_bytes)}, available {gib(facts.ram_available_bytes)}"
    limit, total = facts.ram_limit_bytes, facts.ram_total_bytes
    if limit is not None and (total is None or limit < total):
        finding += f"; this container may use {gib(limit)}"
    if facts.wsl:
        # seen: 0.75 to 2 GB, whatever the machine has (microsoft/WSL#8447)
        finding += "; WSL pins only 1 to 2 GiB of it, so streaming is slower than on Linux"
    return Row(Level.OK, "RAM", finding)


def _kernel_cache(facts: Facts) -> Row:
    cache = facts.kernel_cache
    if not cache.problems:
        return Row(Level.OK, "kernel cache", str(cache))
    level = Level.FAIL if cache.path is None and _can_run_ours(facts) else Level.WARN
    mend = "export TRITON_CACHE_DIR=/a/folder/that/you/can/write"
    return Row(level, "kernel cache", str(cache), mend)


def _switches(facts: Facts) -> Iterator[Row]:
    if facts.disabled:
        finding = "set: enable_xattn() changes nothing, torch's kernels run everywhere"
        yield Row(Level.WARN, "SDX_DISABLE", finding, "unset SDX_DISABLE")


def _short(error: str) -> str:
    """The first 200 characters: import errors of binaries go on for pages."""
    return error if len(error) <= 200 else error[:199] + "…"
