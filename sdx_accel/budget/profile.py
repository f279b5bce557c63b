"""What the planner knows of a job: weights in units, activations as allocator events."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from sdx_accel.budget.allocator import Event, reserved_peak, smallest_cap
from sdx_accel.budget.units import MIB

__all__ = [
    "PHASES",
    "Component",
    "JobProfile",
    "PhaseProfile",
    "StreamUnit",
    "Unit",
    "segment_bytes",
]

PHASES = ("text", "encode", "denoise", "refine", "decode")


# several budgets and choices are planned from the same trace, and a replay takes 0.1 s
_reserved_peak = lru_cache(maxsize=64)(reserved_peak)


@lru_cache(maxsize=64)
def _smallest_cap(events: tuple[Event, ...]) -> int:
    return smallest_cap(list(events))


def segment_bytes(n_bytes: int) -> int:
    """What torch reserves for one allocation of `n_bytes` on an empty cache."""
    if n_bytes <= MIB:
        return 2 * MIB if n_bytes else 0
    if n_bytes < 10 * MIB:
        return 20 * MIB
    return -(-n_bytes // (2 * MIB)) * 2 * MIB


@dataclass(frozen=True)
class Unit:
    """Weights that are placed together, in one allocation.

    Args:
        name: path of its first module.
        n_bytes: size of the allocation, tensors aligned to 512 bytes as torch aligns them.
    """

    name: str
    n_bytes: int


@dataclass(frozen=True)
class StreamUnit:
    """Weights that one module's forward needs: a byte range of one chunk of its component.

    Args:
        name: component and module path, `unet.down_blocks.0.resnets.1`.
        component: the model that it belongs to.
        chunk: index into the component's `units`.
        offset: first byte in the chunk.
        n_bytes: length of the range.
        flops: operations of one forward of the module.
    """

    name: str
    component: str
    chunk: int
    offset: int
    n_bytes: int
    flops: float = 0.0


@dataclass(frozen=True)
class Component:
    """One model of the pipeline.

    Args:
        name: its name in the pipeline (`unet`, `vae`, …).
        units: its weights, in execution order.
        phases: the phases whose computation needs all of it.
        stream: what can be copied in just before it runs, in execution order of one forward.
        text_chunks: how many of the last `units` hold only the text's key and value projections.
        kv_bytes: what the projected text of this job takes when it is kept over the steps.
    """

    name: str
    units: tuple[Unit, ...]
    phases: tuple[str, ...]
    stream: tuple[StreamUnit, ...] = ()
    text_chunks: int = 0
    kv_bytes: int = 0

    @property
    def n_bytes(self) -> int:
        """Weights in bytes."""
        return sum(unit.n_bytes for unit in self.units)


@dataclass(frozen=True)
class PhaseProfile:
    """What one phase allocates besides resident weights.

    Args:
        name: one of `PHASES`.
        events: allocations and releases of activations, inputs and library workspaces.
        curve_mib: live activations over the phase, sampled, in MiB.
        carries: components whose weights are part of `events`, because the pipeline casts them
            for this phase and so gives them new storage.
    """

    name: str
    events: tuple[Event, ...]
    curve_mib: tuple[float, ...]
    carries: tuple[str, ...] = ()

    @cached_property
    def reserved_bytes(self) -> int:
        """What torch reserves for it when nothing presses."""
        return _reserved_peak(self.events)

    @cached_property
    def smallest_bytes(self) -> int:
        """The least that torch can serve it from."""
        return _smallest_cap(self.events)


@dataclass(frozen=True)
class JobProfile:
    """One job on one model.

    Args:
        model: where the model came from, for people.
        job: sizes and settings that shaped the profile, JSON-ready.
        numerics: what decides the bits of the result: dtypes, VAE mode, guidance batching.
        components: the models with weights.
        phases: in order of execution.
    """

    model: str
    job: Mapping[str, Any]
    numerics: Mapping[str, Any]
    components: tuple[Component, ...]
    phases: tuple[PhaseProfile, ...]
