"""The plans of one held pipeline: of what was asked, what is free now, what earlier runs took.

Knows when a plan has to be made again; carries none out.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Plan
from sdx_accel.budget.units import GIB, VramRequest
from sdx_accel.runtime.descriptions import ModelDescription
from sdx_accel.runtime.enforce import PhaseRecord
from sdx_accel.runtime.foreign import FreeMemory
from sdx_accel.runtime.history import History, cell_of, digest_of, plan_with_peaks
from sdx_accel.runtime.host_memory import limits, resolve_ram
from sdx_accel.runtime.phase_calls import Job
from sdx_accel.runtime.planning import plan_job
from sdx_accel.runtime.stream_order import Order, order_of, remember

__all__ = ["Place", "Planner", "Terms"]

_log = logging.getLogger("sdx_accel")
# by component: the order of its units, and the text's projections that lie apart
_Layouts = dict[str, tuple[Order, tuple[str, ...]]]


@dataclass(frozen=True)
class Terms:
    """What `enable_xattn` was asked for.

    Args:
        vram: the budget as asked.
        quality: "exact" or "near".
        ram: host memory that the weights may take; None is no limit.
        learn: whether plans use, and runs keep, what phases took beyond their predictions.
        fused: whether fused kernels serve, so that the VAE works in bands of rows by itself.
    """

    vram: VramRequest
    quality: str = "exact"
    ram: VramRequest | None = None
    learn: bool = True
    fused: bool = True


@dataclass(frozen=True)
class Place:
    """Where plans are for.

    Args:
        machine: the card, as it was when the terms were accepted.
        key: what its calibration is filed under; empty where there is no card.
        free_now: reads what this process could use at most, or None.
        disturbed: tells whether readings hold other programs' use, or None.
        notes: sentences to print with every plan.
    """

    machine: Machine
    key: str = ""
    free_now: Callable[[], int] | None = None
    disturbed: Callable[[], bool] | None = None
    notes: tuple[str, ...] = ()

    def as_now(self) -> "Place":
        """The same place with the memory that is free now."""
        if self.free_now is None:
            return self
        return replace(self, machine=replace(self.machine, free_bytes=self.free_now()))


class Planner:
    """Plans jobs of one model, each once as long as nothing changes.

    Args:
        terms: the budget as asked, and what goes with it.
        place: where the plans are for.
        description: the model.
        modules: its live parts, whose weights are counted as they are.

    Raises:
        RefusedError: an amount of host memory that cannot be resolved.
    """

    def __init__(
        self,
        terms: Terms,
        place: Place,
        description: ModelDescription,
        modules: Mapping[str, torch.nn.Module],
    ) -> None:
        self.terms, self.place = terms, place
        self.description, self.modules = description, modules
        ram_note = None
        self._ram: int | None = None
        if terms.ram is not None:
            self._ram, ram_note = resolve_ram(terms.ram, limits())
        self._notes = (*place.notes, ram_note) if ram_note else place.notes
        self._plans: dict[tuple[Job, int | None], tuple[Plan, _Layouts]] = {}
        self._history = History() if terms.learn and place.key else None
        # more bytes for a phase, since memory was refused in it
        self._floors: dict[str, int] = {}
        self._learned: dict[str, PhaseRecord] = {}
        self._memory = FreeMemory()
        self._first = self._usable()
        # other than the terms came to at first, because of other programs; None = the same
        self._budget: int | None = None

    def plan(self, job: Job, quality: str | None = None) -> Plan:
        """The plan of a job, feasible or not.

        Args:
            job: sizes and settings.
            quality: instead of the terms'; such a plan is not kept.
        """
        if quality is not None:
            return self._make(job, quality)
        known = self._plans.get((job, self._budget))
        if known is None:
            plan = self._make(job, self.terms.quality)
            layouts = {name: order_of(module) for name, module in self.modules.items()}
            self._plans[job, self._budget] = plan, layouts
            return plan
        plan, layouts = known
        # who holds this plan splits the weights as it was made for, not as the last one was
        for name, (order, text) in layouts.items():
            remember(self.modules[name], order, text)
        return plan

    def _make(self, job: Job, quality: str) -> Plan:
        machine, request = self.place.machine, self.terms.vram
        notes = self._notes
        if self._budget is not None:
            budget = self._budget / GIB
            machine = replace(machine, free_bytes=self._budget)
            request = VramRequest("absolute", budget)
            notes = (*notes, f"{budget:.2f} GiB can be held beside other programs now")

        def make(card: Machine, peaks: Mapping[str, int]) -> Plan:
            return plan_job(
                self.description,
                job,
                self._dtypes(),
                card,
                request,
                quality,
                self.modules,
                notes,
                floors={
                    phase: peaks.get(phase, 0) + self._floors.get(phase, 0)
                    for phase in {*peaks, *self._floors}
                },
                ram=self._ram,
                fused=self.terms.fused,
            )

        return plan_with_peaks(make, machine, self._peaks(job, quality))

    def _dtypes(self) -> dict[str, str]:
        return {
            name: str(next(p.dtype for p in module.parameters() if p.is_floating_point()))[6:]
            for name, module in self.modules.items()
        }

    def _cell(self, job: Job, quality: str) -> str:
        return cell_of(self.place.key, self.description, job, self._dtypes(), quality)

    def _peaks(self, job: Job, quality: str) -> dict[str, int]:
        return {} if self._history is None else self._history.peaks(self._cell(job, quality))

    def describe(self, description: ModelDescription) -> None:
        """The model has changed: adapters came or went, or weights were cast."""
        self.description = description
        self._plans.clear()

    def look(self) -> None:
        """Read what other programs leave, before a picture; says so when it changes a plan."""
        usable = self._usable()
        budget = None if usable == self._first else usable
        if budget == self._budget:
            return
        self._budget = budget
        if usable is not None:
            _log.info(
                "free memory has changed: %.2f GiB can be held beside other programs", usable / GIB
            )

    def _usable(self) -> int | None:
        if self.place.free_now is None:
            return None
        free = self.place.free_now()
        asked, _ = self.terms.vram.resolve(self.place.machine.total_bytes, free)
        return self._memory.usable(asked, free)

    def spare(self, job: Job, phase: str, more: int) -> Plan:
        """Another plan after memory was refused: it leaves so many more bytes to a phase.

        Where that plan does not fit, it is returned all the same and the bytes are forgotten.
        """
        before = dict(self._floors), dict(self._plans)
        self._floors[phase] = self._floors.get(phase, 0) + more
        self._plans.clear()
        plan = self.plan(job)
        if not plan.feasible:
            self._floors, self._plans = before
        return plan

    def learn(self, job: Job, held: Plan, records: Iterable[PhaseRecord]) -> None:
        """Keep what phases took beyond their predictions; later plans leave room for it.

        Args:
            job: the job that ran.
            held: its plan.
            records: the newest one of each phase; those that were learned from do not count again.
        """
        if self._history is None:
            return
        quality = self.terms.quality
        fresh = [r for r in records if self._learned.get(r.name) is not r]
        self._learned.update({record.name: record for record in fresh})
        if held.machine.history != digest_of(self._peaks(job, quality)):
            # learned figures were left out, so the predictions have not got them in
            return
        if self.place.disturbed is not None and self.place.disturbed():
            return
        cell, grown = self._cell(job, quality), False
        for record in fresh:
            if record.measured_peak_gib is not None:
                predicted = round(record.predicted_peak_gib * GIB)
                measured = round(record.measured_peak_gib * GIB)
                grown |= self._history.learn(cell, record.name, predicted, measured)
        if grown:
            self._plans.clear()
