"""Device facts, asked once and cached; the only file that asks.

It knows what a device is and whether Triton can be imported, nothing of operators.
"""

import functools
import importlib
import logging
import os
from dataclasses import dataclass

import torch

__all__ = ["Target", "has_descriptors", "interpreting", "of", "triton_status"]

_log = logging.getLogger("sdx_kernels")


@dataclass(frozen=True)
class Target:
    """What dispatch may know about a device.

    Attributes:
        kind: `"cuda"` (NVIDIA), `"rocm"`, or torch's device type (`"cpu"`, `"mps"`, …).
        capability: NVIDIA compute capability, e.g. `(8, 6)`; None elsewhere.
        shared_memory_bytes: shared memory one block may opt in to; 0 where it does not apply.
        name: the name that the driver gives, or torch's device type.
        multiprocessors: number of multiprocessors; 0 where it does not apply.
    """

    kind: str
    capability: tuple[int, int] | None = None
    shared_memory_bytes: int = 0
    name: str = ""
    multiprocessors: int = 0


@functools.lru_cache(maxsize=64)
def _facts(device_type: str, index: int) -> Target:
    if device_type != "cuda":
        return Target(kind=device_type, name=device_type)
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Target("rocm", None, 0, properties.name, properties.multi_processor_count)
    # 49,152 is what every CUDA device grants without opting in
    shared = getattr(properties, "shared_memory_per_block_optin", 49152)
    return Target(
        "cuda",
        (properties.major, properties.minor),
        shared,
        properties.name,
        properties.multi_processor_count,
    )


def of(device: torch.device) -> Target:
    """Facts of a device, cached for the life of the process."""
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    return _facts(device.type, index)


#: the answer, once asked
_status: list[tuple[bool, str | None]] = []


def triton_status() -> tuple[bool, str | None]:
    """Whether Triton imports here, and if not, why; says so once a process, at INFO.

    A broken installation raises OSError (a missing library) or RuntimeError (a version check) as
    readily as ImportError, and none of them may stop a program that torch's kernels can serve.
    """
    if not _status:
        _status.append(_import_triton())
    return _status[0]


# the mark of `torch.compiler.assume_constant_result`, whose own call would import all of Dynamo:
# without it a process whose first attention is compiled would have the import in its graph
triton_status._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _import_triton() -> tuple[bool, str | None]:
    try:
        importlib.import_module("triton")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = f"Triton cannot be imported here ({type(error).__name__}: {error})"
        _log.info("%s: torch's own attention kernels are used instead", reason)
        return False, reason
    return True, None


#: the answer, once asked
_descriptors: list[bool] = []


def has_descriptors() -> bool:
    """Whether this Triton has tensor descriptors: 3.4 and newer do, torch 2.7 comes with 3.3."""
    if not _descriptors:
        try:
            importlib.import_module("triton.tools.tensor_descriptor")
        except ImportError:
            _descriptors.append(False)
        else:
            _descriptors.append(True)
    return _descriptors[0]


# as `triton_status`
has_descriptors._dynamo_marked_constant = True  # type: ignore[attr-defined]


def interpreting() -> bool:
    """True when Triton would interpret kernels on the CPU instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes", "y"}
