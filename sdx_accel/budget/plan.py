"""The plan: printed before a run, frozen during it, JSON in and out."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.units import GIB, MIB, about, say_seconds, say_size

__all__ = ["HOST_MEMORY", "Phase", "Plan", "StreamPlan", "copy_speed"]

#: `binding_phase` of a plan whose weights do not fit into the host memory that is allowed
HOST_MEMORY = "host memory"


def copy_speed(n_bytes: int, machine: Machine) -> float:
    """Bytes a second of copies out of `n_bytes` of host memory, of which some may not be pinned."""
    pinnable = machine.pinnable_bytes
    if pinnable is None or n_bytes <= pinnable:
        return machine.link_bytes_per_s
    pinned = pinnable / n_bytes
    return 1 / (pinned / machine.link_bytes_per_s + (1 - pinned) / machine.pageable_bytes_per_s)


@dataclass(frozen=True)
class Phase:
    """One phase of the run; sizes in GiB.

    Args:
        name: `text`, `encode`, `denoise`, `refine` (SDXL's second UNet) or `decode`.
        predicted_peak_gib: most memory the driver will show for this process, context included.
        resident_gib: weights on the card, by component.
        resident_units: how many of a component's units that is, as "kept/all"; of a streamed one
            the units of its cycle, and the ring behind the last component.
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
class StreamPlan:
    """Weights that are copied in while a phase computes; sizes in bytes.

    Args:
        phase: `denoise`, `refine` or `text`.
        components: the models whose units, one after the other, make one cycle.
        resident: indexes into the cycle of what stays on the card for the whole phase.
        slots: (index into the cycle, offset in the ring) of everything else.
        resident_bytes: size of the resident part, weights outside all units included.
        ring_bytes: size of the ring that the rest passes through.
        streamed_bytes: copied in a pass.
        seconds: predicted time of a pass.
        bound_seconds: the larger of computing and copying.
    """

    phase: str
    components: tuple[str, ...]
    resident: tuple[int, ...]
    slots: tuple[tuple[int, int], ...]
    resident_bytes: int
    ring_bytes: int
    streamed_bytes: int
    seconds: float
    bound_seconds: float

    def copy_speed(self, machine: Machine) -> float:
        """Bytes a second of its copies on a machine."""
        return copy_speed(self.resident_bytes + self.streamed_bytes, machine)


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
        moved_gib_per_picture: weights copied to the card for a picture with a new prompt, of what
            is streamed the first pass.
        host_gib: host memory for the weights.
        notes: sentences for the reader.
        streams: phases whose weights pass through a ring.
        text_kv: whether the text is projected to keys and values once, before the denoise.
        seconds_per_step: predicted time of a step, 0 when not predicted.
        advice: what more memory would buy, and what binds.
        margin_gib: of the budget, what stays free for code that the driver loads as the plan runs.
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
    streams: tuple[StreamPlan, ...] = ()
    text_kv: bool = False
    seconds_per_step: float = 0.0
    advice: tuple[str, ...] = ()
    margin_gib: float = 0.0

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

    def stream(self, phase: str) -> StreamPlan | None:
        """How that phase's weights are streamed, or None when all it needs is resident."""
        return next((stream for stream in self.streams if stream.phase == phase), None)

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
        values["advice"] = tuple(values["advice"])
        values["streams"] = tuple(
            StreamPlan(
                **{
                    **stream,
                    "components": tuple(stream["components"]),
                    "resident": tuple(stream["resident"]),
                    "slots": tuple((index, offset) for index, offset in stream["slots"]),
                }
            )
            for stream in values["streams"]
        )
        return cls(**values)

    def shortfall(self) -> str:
        """Why it does not fit and the nearest change that does; empty when it fits."""
        if self.feasible:
            return ""
        if self.binding_phase == HOST_MEMORY:
            allowed = (self.machine.ram_bytes or 0) / GIB
            return (
                f"the weights take {self.host_gib:.2f} GiB of host memory, "
                f"{allowed:.2f} GiB are allowed"
            )
        # with everything else out of the way, the highest phase is the one that does not fit
        highest = max(self.phases, key=lambda phase: phase.predicted_peak_gib)
        takes = highest.predicted_peak_gib
        # both figures are rounded to 0.1 MiB, and what is printed has to be enough
        missing = math.ceil((takes + self.margin_gib - self.budget_gib) * GIB / MIB + 0.1)
        return (
            f"{highest.name} does not fit in {self.budget_gib:.2f} GiB: it takes {takes:.2f} GiB, "
            f"and {self.margin_gib * GIB / MIB:.0f} MiB stay free for code that the driver loads "
            f"later: {missing} MiB short; the smallest budget that works is "
            f"{self.smallest_budget_gib:.2f} GiB"
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
        lines += [f"  {line}" for line in self._speed()]
        if self.feasible:
            seconds = self.moved_gib_per_picture * GIB / self.machine.link_bytes_per_s
            moves = (
                f"{say_size(self.moved_gib_per_picture)} to the card for each new prompt "
                f"({about(seconds)})"
                if seconds
                else "nothing to the card for a new prompt"
            )
            lines.append(f"  moves {moves}; host memory for weights {say_size(self.host_gib)}")
            lines += [f"  {line}" for line in self.advice]
            lines.append(f"  smallest budget that works: {self.smallest_budget_gib:.2f} GiB")
        else:
            lines.append(f"  DOES NOT FIT: {self.shortfall()}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _speed(self) -> list[str]:
        """What streams, how much, how fast, and how near to the bound that is."""
        lines = [self._stream_line(stream) for stream in self.streams]
        if self.seconds_per_step and self.stream("denoise") is None:
            lines.append(f"a step takes {about(self.seconds_per_step)}")
        if self.text_kv:
            lines.append("keys and values of the text are computed once for each new prompt")
        return lines

    def _stream_line(self, stream: StreamPlan) -> str:
        speed = stream.copy_speed(self.machine)
        busy = stream.streamed_bytes / speed / stream.seconds
        what = "pass" if stream.phase == "text" else "step"
        units = len(stream.resident) + len(stream.slots)
        return (
            f"{stream.phase} streams {say_size(stream.streamed_bytes / GIB)} a {what} over "
            f"{speed / 1e9:.0f} GB/s (link busy {busy:.0%}), {len(stream.resident)}/{units} units "
            f"stay, ring {stream.ring_bytes / MIB:.0f} MiB: {say_seconds(stream.seconds)} a {what}"
            f", bound {say_seconds(stream.bound_seconds)}"
        )

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
