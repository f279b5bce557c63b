"""Holds a budget on a real card: a cap on torch's allocator, and a reading after each phase."""

from dataclasses import dataclass, field

import torch

from sdx_accel.budget.plan import Plan
from sdx_accel.budget.search import SLACK_BYTES
from sdx_accel.budget.units import GIB, MIB, to_gib
from sdx_accel.runtime.host_memory import HostLimits
from sdx_accel.runtime.probe import Card

__all__ = ["Audit", "Enforcer", "NoEnforcer", "PhaseRecord", "spill_note"]

# beyond predictions' errors: a step whose memory the driver has moved to the host was seen to take
# six times as long
SPILL_FACTOR = 3.0


@dataclass(frozen=True)
class PhaseRecord:
    """What a phase was predicted to need and what it took.

    Args:
        name: the phase.
        predicted_peak_gib: from the plan.
        measured_peak_gib: the most torch reserved in it plus the driver's use outside torch, or
            None where nothing can be measured.
    """

    name: str
    predicted_peak_gib: float
    measured_peak_gib: float | None

    def __str__(self) -> str:
        measured = (
            "not measured"
            if self.measured_peak_gib is None
            else f"measured {self.measured_peak_gib:.2f} GiB"
        )
        return f"{self.name}: predicted {self.predicted_peak_gib:.2f} GiB, {measured}"


@dataclass
class Audit:
    """The newest record of each phase, in order of execution."""

    records: dict[str, PhaseRecord] = field(default_factory=dict)

    def add(self, record: PhaseRecord) -> None:
        """Keep a record in place of the phase's earlier one."""
        self.records[record.name] = record


def spill_note(seconds: float | None, predicted: float, host: HostLimits) -> str | None:
    """A sentence where steps are so slow that the driver may have moved memory to the host.

    Args:
        seconds: a step as measured, None when it was not.
        predicted: a step as planned, 0 when it was not.
        host: only Windows' driver, also below WSL, does such a thing instead of refusing memory.
    """
    if not (host.windows or host.wsl) or not seconds or not predicted:
        return None
    if seconds < SPILL_FACTOR * predicted:
        return None
    return (
        f"steps took {seconds:.3g} s, {predicted:.3g} s were predicted: the driver may have moved "
        "the card's memory to the host; in the NVIDIA Control Panel set CUDA - Sysmem Fallback "
        "Policy to Prefer No Sysmem Fallback, or give a smaller --vram"
    )


class NoEnforcer:
    """Stands in where there is no card: nothing is capped and nothing can be measured."""

    def hold(self, plan: Plan) -> None:
        """Nothing to hold on the CPU."""

    def begin_phase(self) -> None:
        """Nothing to reset."""

    def end_phase(self) -> float | None:
        """No reading."""
        return None

    def free_cache(self) -> None:
        """Nothing is cached."""

    def release(self) -> None:
        """Nothing was changed."""


class Enforcer(NoEnforcer):
    """The cap on one card.

    The cap is the budget minus what the driver holds for this process outside torch (context,
    libraries, kernels; read again after each phase, since kernels load lazily) minus 64 MiB.

    Args:
        card: the card to hold.
    """

    def __init__(self, card: Card) -> None:
        self.card = card
        self._device = card.device
        self._total = torch.cuda.get_device_properties(card.device).total_memory
        reader = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        self._previous = float(reader(card.device)) if reader else 1.0
        self._plan: Plan | None = None

    def hold(self, plan: Plan) -> None:
        """Cap torch's allocator for `plan` from now on."""
        self._plan = plan
        self._cap()

    def _non_torch(self) -> int:
        assert self._plan is not None
        seen = self.card.non_torch_bytes()
        return self._plan.machine.non_torch_bytes if seen is None else seen

    def _cap(self) -> None:
        assert self._plan is not None
        allowed = round(self._plan.budget_gib * GIB) - self._non_torch() - SLACK_BYTES
        # a fraction of zero means "no limit" to some versions of torch
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, max(allowed, MIB) / self._total), self._device
        )

    def begin_phase(self) -> None:
        """Start the phase's peak counter."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def end_phase(self) -> float:
        """Peak driver-visible use since `begin_phase` in GiB; the cap follows code loaded since."""
        peak = torch.cuda.max_memory_reserved(self._device) + self._non_torch()
        self._cap()
        return to_gib(peak)

    def free_cache(self) -> None:
        """Give torch's unused segments back to the driver, so that phases do not fragment."""
        torch.cuda.empty_cache()

    def release(self) -> None:
        """Put back the fraction that was set before."""
        if self._plan is None:
            return
        self._plan = None
        torch.cuda.set_per_process_memory_fraction(self._previous, self._device)
