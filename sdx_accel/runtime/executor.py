"""Carries a plan out: moves whole units of weights at phase borders, and nothing in between.

Knows modules and devices, not pipelines' call sequences: whoever sees a phase begin says so with
`enter`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sdx_accel.budget.plan import Plan
from sdx_accel.runtime.enforce import Audit, NoEnforcer, PhaseRecord
from sdx_accel.runtime.weights import WeightUnit, split_weights

__all__ = ["Executor"]


class Executor:
    """The weights of a pipeline, held to a plan.

    Args:
        modules: the models by component name.
        device: where they compute.
        enforcer: holds the cap and reads the card.
        moves: False leaves every weight where it is (the CPU, where there is nothing to hold).
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        device: torch.device,
        enforcer: NoEnforcer,
        *,
        moves: bool = True,
    ) -> None:
        self.modules = dict(modules)
        self.device = device
        self.enforcer = enforcer
        self.audit = Audit()
        self.phase: str | None = None
        self.moved_bytes = 0
        self.plan: Plan | None = None
        self._moves = moves
        self._origin = {name: _device_of(module) for name, module in self.modules.items()}
        self._units: dict[str, list[WeightUnit]] = {}
        self._cast: set[str] = set()
        # rises when someone may have changed the weights: plans made before do not hold
        self.generation = 0
        self.casting = False
        # while adapters are put on or taken off, with all weights on the host
        self.adapting = False
        # whether the VAE works in bands of rows because the plan says so
        self.banded = False
        # told of each call of a held model (name, module, args, kwargs) before its phase is entered
        self.on_call: list[Callable[[str, torch.nn.Module, Any, Any], None]] = []
        # gives a plan that spares so many more bytes in that phase, or None
        self.replan: Callable[[str, int], Plan | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Executor":
        """A copied model is not held: its copy of this reference must not copy all weights."""
        return self

    def hold(self, plan: Plan) -> None:
        """Follow `plan` from the next phase on; takes the weights to the host the first time."""
        changed = plan != self.plan
        if changed:
            self.plan, self.phase = plan, None
        self.take()
        if changed:
            # a smaller budget holds from now on, not from the next phase on
            always = _resident_in_every_phase(plan)
            for name, units in self._units.items():
                if name not in self._cast:
                    for unit in units[always.get(name, 0) :]:
                        unit.drop()
            self.enforcer.free_cache()
        self.enforcer.hold(plan)

    def take(self) -> None:
        """Own the weights: every unit gets its host copy, and the card is free of them."""
        if not self._moves:
            return
        for name, module in self.modules.items():
            if name not in self._units:
                self._units[name] = [
                    WeightUnit(f"{name}[{i}]", group)
                    for i, group in enumerate(split_weights(module))
                ]
        self._pin()
        self.enforcer.free_cache()

    def _pin(self) -> None:
        """Pin what the plan moves; where pages cannot be locked the copies are merely slower."""
        if self.device.type != "cuda" or self.plan is None:
            return
        always = _resident_in_every_phase(self.plan)
        for name, units in self._units.items():
            for unit in units[always.get(name, 0) :]:
                if not unit.pin():
                    return

    def enter(self, phase: str) -> None:
        """A phase begins: close the books of the last one and put the weights in place."""
        if phase == self.phase or self.plan is None:
            return
        self._end_phase()
        if not self._units:
            self.take()
        wanted = self._wanted(phase)
        for name, units in self._units.items():
            if name in self._cast:
                continue
            for unit in units[wanted.get(name, 0) :]:
                unit.drop()
        self.enforcer.free_cache()
        for name, units in self._units.items():
            if name not in self._cast:
                self._load(units[: wanted.get(name, 0)])
        self.enforcer.begin_phase()
        self.phase = phase

    def _wanted(self, phase: str) -> Mapping[str, int]:
        assert self.plan is not None
        if phase in self.plan.placement:
            return self.plan.placement[phase]
        # a phase outside the job (a decode by hand, say): whatever it uses is loaded by `ensure`
        return {}

    def _load(self, units: list[WeightUnit]) -> None:
        for unit in units:
            self.moved_bytes += unit.load(self.device)

    def ensure(self, name: str) -> None:
        """A component is about to compute: all of it is on the device, or gets there."""
        if name not in self._cast:
            self._load(self._units.get(name, []))

    def cast(self, name: str, dtype: torch.dtype) -> None:
        """Give a component another dtype on the device; the host copy keeps the original."""
        units = self._units.get(name, [])
        self._load(units)
        self.casting = True
        try:
            torch.nn.Module.to(self.modules[name], dtype=dtype)
        finally:
            self.casting = False
        for unit in units:
            unit.disown()
        if units:
            self._cast.add(name)

    def uncast(self, name: str) -> None:
        """Undo `cast`: the tensors are the host copy's again, bit for bit."""
        if name in self._cast:
            self._cast.discard(name)
            for unit in self._units[name]:
                unit.drop()

    def make_room(self, name: str) -> None:
        """Move everything but `name` out, after the card refused memory in a phase."""
        for other, units in self._units.items():
            if other != name:
                for unit in units:
                    unit.drop()
        self.enforcer.free_cache()

    def finish(self) -> None:
        """The picture is done: close the last phase's books; weights stay for the next picture."""
        self._end_phase()
        self.phase = None

    def _end_phase(self) -> None:
        if self.phase is None or self.plan is None:
            return
        planned = self.plan.phase(self.phase)
        measured = self.enforcer.end_phase()
        if planned is not None:
            self.audit.add(PhaseRecord(planned.name, planned.predicted_peak_gib, measured))

    def dissolve(self) -> None:
        """All weights to the host, each tensor with storage of its own; taken again when needed."""
        if not self._units:
            return
        for name, units in self._units.items():
            self.uncast(name)
            for unit in units:
                unit.close()
        self._units = {}
        self.phase = None
        self.enforcer.free_cache()

    def bring_home(self) -> None:
        """`dissolve`, because adapters are about to change the weights: plans are outdated."""
        self.dissolve()
        self.phase = None
        self.generation += 1

    def abandon(self) -> None:
        """The pipeline is gone: lift the cap and leave the weights on the host, uncopied."""
        self.enforcer.release()
        for name, units in self._units.items():
            self.uncast(name)
            for unit in units:
                unit.abandon()
        self._units = {}
        self.plan = None
        self.enforcer.free_cache()

    def release(self) -> None:
        """Give the weights back to the devices they came from, and lift the cap."""
        self.finish()
        self.enforcer.release()
        for name, units in self._units.items():
            self.uncast(name)
            for unit in units:
                unit.close(self._origin[name])
        self._units = {}
        self.plan = None
        self.enforcer.free_cache()


def _device_of(module: torch.nn.Module) -> torch.device:
    first = next(iter(module.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def _resident_in_every_phase(plan: Plan) -> dict[str, int]:
    names = {name for resident in plan.placement.values() for name in resident}
    return {
        name: min(resident.get(name, 0) for resident in plan.placement.values()) for name in names
    }
