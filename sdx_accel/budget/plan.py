"""The plan: printed before a run, frozen during it, JSON in and out."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.units import GIB

__all__ = ["Phase", "Plan"]


@dataclass(frozen=True)
class Phase:
    """One phase of the run; sizes in GiB.

    Args:
        name: `text`, `encode`, `denoise`, `refine` (SDXL's second UNet) or `decode`.
        predicted_peak_gib: most memory the driver will show for this process, context included.
        resident_gib: weights on the card, by component.
        resident_units: how many of a component's units that is, as "kept/all".
        activations_gib: what torch reserves besides weights.
        curve_mib: live activations over the phase, sampled, in MiB.
    """

    name: str
    predicted_peak_gib: float
    resident_gib: dict[str, float]
    resident_units: dict[str, str]
    activations_gib: float
    curve_mib: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Plan:
    """Where everything lies in each phase of a job, and what that will cost.

    Args:
        model: where the model came from.
        job: sizes and settings that the plan holds for.
        machine: the record it was made with.
        budget_gib: driver-visible limit, CUDA context included.
        feasible: whether a placement fits.
        smallest_budget_gib: the smallest budget that this job works with.
        binding_phase: the phase that needs it.
        numerics: what decides the bits of the result; equal numerics give equal pictures.
        placement: units on the card, by phase and component.
        phases: predictions, in order of execution.
        moved_gib_per_picture: weights copied to the card for a picture with a new prompt.
        host_gib: host memory for the weights.
        notes: sentences for the reader.
    """

    model: str
    job: dict[str, Any]
    machine: Machine
    budget_gib: float
    feasible: bool
    smallest_budget_gib: float
    binding_phase: str
    numerics: dict[str, Any]
    placement: dict[str, dict[str, int]]
    phases: tuple[Phase, ...]
    moved_gib_per_picture: float
    host_gib: float
    notes: tuple[str, ...] = ()

    @property
    def predicted_peak_gib(self) -> float:
        """The largest of the phases' predictions."""
        return max(phase.predicted_peak_gib for phase in self.phases)

    @property
    def digest(self) -> str:
        """Twelve hex digits that are equal for equal plans."""
        return hashlib.sha256(_canonical(asdict(self)).encode()).hexdigest()[:12]

    def phase(self, name: str) -> Phase | None:
        """The phase of that name, or None when the job has none."""
        return next((phase for phase in self.phases if phase.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values, `digest` and `predicted_peak_gib` included."""
        values: dict[str, Any] = json.loads(_canonical(asdict(self)))
        return {**values, "predicted_peak_gib": self.predicted_peak_gib, "digest": self.digest}

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Inverse of `to_json`."""
        values = json.loads(text)
        derived = ("digest", "predicted_peak_gib")
        values = {key: value for key, value in values.items() if key not in derived}
        values["machine"] = Machine.from_dict(values["machine"])
        values["phases"] = tuple(
            Phase(**{**phase, "curve_mib": tuple(phase["curve_mib"])}) for phase in values["phases"]
        )
        values["notes"] = tuple(values["notes"])
        return cls(**values)

    def shortfall(self) -> str:
        """Why it does not fit and the nearest change that does; empty when it fits."""
        if self.feasible:
            return ""
        missing = round((self.smallest_budget_gib - self.budget_gib) * GIB / (1 << 20))
        return (
            f"{self.binding_phase} does not fit in {self.budget_gib:.2f} GiB: {missing} MiB short; "
            f"the smallest budget that works is {self.smallest_budget_gib:.2f} GiB"
        )

    def explain(self) -> str:
        """The plan as a table for people."""
        job = self.job
        dtypes = ", ".join(f"{k} {v}" for k, v in self.numerics.items() if v not in (None, False))
        lines = [
            f"plan {self.digest}: {self.model}, {job.get('width')} × {job.get('height')} px, "
            f"batch {job.get('batch')}, budget {self.budget_gib:.2f} GiB",
            f"  machine: {self.machine}",
            f"  numerics: {dtypes}",
        ]
        lines += [f"  {line}" for line in self._table()]
        if self.feasible:
            seconds = self.moved_gib_per_picture * GIB / self.machine.link_bytes_per_s
            lines.append(
                f"  moves {self.moved_gib_per_picture:.2f} GiB to the card for each new prompt "
                f"(about {seconds:.2f} s); host memory for weights {self.host_gib:.2f} GiB"
            )
            lines.append(f"  smallest budget that works: {self.smallest_budget_gib:.2f} GiB")
        else:
            lines.append(f"  DOES NOT FIT: {self.shortfall()}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _table(self) -> list[str]:
        rows = [("phase", "on the card", "weights", "activations", "predicted peak")]
        for phase in self.phases:
            where = ", ".join(
                name if units.split("/")[0] == units.split("/")[1] else f"{name} {units}"
                for name, units in phase.resident_units.items()
            )
            rows.append(
                (
                    phase.name,
                    where,
                    f"{sum(phase.resident_gib.values()):.2f}",
                    f"{phase.activations_gib:.2f}",
                    f"{phase.predicted_peak_gib:.2f} GiB",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]


def _canonical(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, ensure_ascii=False)
