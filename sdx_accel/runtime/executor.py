"""Carries a plan out: moves whole units of weights at phase borders, and streams in between.

Knows modules and devices, not pipelines' call sequences: whoever sees a phase begin says so with
`enter`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sdx_accel.budget.plan import Plan, StreamPlan
from sdx_accel.budget.profile import StreamUnit
from sdx_accel.runtime.copies import Copies, copies_for
from sdx_accel.runtime.enforce import Audit, NoEnforcer, PhaseRecord
from sdx_accel.runtime.pinning import Pinned, Pinner, Staging, pinner_for
from sdx_accel.runtime.stream_order import layout, order_of
from sdx_accel.runtime.streamer import Streamer
from sdx_accel.runtime.weights import WeightUnit

if TYPE_CHECKING:
    from sdx_accel.runtime.recovery import Retry

__all__ = ["Executor"]

_log = logging.getLogger("sdx_accel")


@dataclass(frozen=True)
class _Split:
    """How a component's weights were grouped, and by which order and projections of the text."""

    key: tuple[tuple[str, ...], tuple[str, ...]]
    stream: tuple[StreamUnit, ...]
    text_chunks: int


class Executor:
    """The weights of a pipeline, held to a plan.

    Args:
        modules: the models by component name.
        device: where they compute.
        enforcer: holds the cap and reads the card.
        moves: False leaves every weight where it is (the CPU, where there is nothing to hold).
        copies: how bytes reach the device while it computes; None = as fits the device.
        pinner: locks host memory; None = as fits the device.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        device: torch.device,
        enforcer: NoEnforcer,
        *,
        moves: bool = True,
        copies: Copies | None = None,
        pinner: Pinner | None = None,
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
        self._splits: dict[str, _Split] = {}
        self.copies = copies
        # runs while the weights of a phase pass through a ring
        self.streamer: Streamer | None = None
        self._streamed: tuple[str, ...] = ()
        self._pinned = Pinned(pinner_for(device) if pinner is None else pinner)
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
        # refused calls of the newest picture that were repeated
        self.retries: list[Retry] = []
        # gives a plan that spares so many more bytes in that phase, or None
        self.replan: Callable[[str, int], Plan | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Executor":
        """A copied model is not held: its copy of this reference must not copy all weights."""
        return self

    def hold(self, plan: Plan) -> None:
        """Follow `plan` from the next phase on; takes the weights to the host the first time."""
        changed = plan != self.plan
        if changed:
            self._stop_stream()
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
            order, text = order_of(module)
            key = tuple(path for path, _ in order), text
            if name in self._units and self._splits[name].key != key:
                # planned by another grouping since: adapters, or a text that may now be kept
                self._stop_stream()
                self._close(name)
            if name not in self._units:
                found = layout(name, module, order, text)
                self._splits[name] = _Split(key, found.units, found.text_chunks)
                self._units[name] = [
                    WeightUnit(f"{name}[{i}]", group) for i, group in enumerate(found.groups)
                ]
        self._pin()
        self.enforcer.free_cache()

    @property
    def unpinned_bytes(self) -> int:
        """Host memory that moves and that the driver refused to lock."""
        return self._pinned.refused_bytes

    def _pin(self) -> None:
        """Lock what the plan moves, what is streamed first; the rest goes through small buffers."""
        if self.plan is None or self.streamer is not None:
            return
        always = _resident_in_every_phase(self.plan)
        first = [name for stream in self.plan.streams for name in stream.components]
        moving = {name: self._units[name] for name in first}
        moving.update({n: u[always.get(n, 0) :] for n, u in self._units.items() if n not in first})
        passing = [
            unit.n_bytes
            for stream in self.plan.streams
            for name in stream.components
            for unit in self._splits[name].stream
        ]
        said = self._pinned.lock(
            [unit for units in moving.values() for unit in units],
            self.plan.machine.pinnable_bytes,
            max(passing, default=0),
        )
        if said:
            _log.warning("%s", said)

    def enter(self, phase: str) -> None:
        """A phase begins: close the books of the last one and put the weights in place."""
        if phase == self.phase or self.plan is None:
            return
        self._end_phase()
        self._stop_stream()
        # a failure below leaves no phase, so that entering again begins anew
        self.phase = None
        if not self._units:
            self.take()
        wanted = self._wanted(phase)
        stream = self.plan.stream(phase) if self._units else None
        self._drop_all_but(wanted)
        for name, units in self._units.items():
            if name not in self._cast:
                self._load(units[: wanted.get(name, 0)])
        if stream is not None:
            self._start_stream(stream)
        self.enforcer.begin_phase()
        self.phase = phase

    def leave(self, phase: str) -> None:
        """Between two phases: what `phase` does not keep is out already, and nothing is in yet.

        Args:
            phase: the next one.
        """
        self.finish()
        if self.plan is not None:
            self._drop_all_but(self._wanted(phase))

    def _drop_all_but(self, wanted: Mapping[str, int]) -> None:
        for name, units in self._units.items():
            if name not in self._cast:
                for unit in units[wanted.get(name, 0) :]:
                    unit.drop()
        self.enforcer.free_cache()

    def _start_stream(self, stream: StreamPlan) -> None:
        if self.copies is None:
            self.copies = copies_for(self.device)
        buffer = self._pinned.buffer
        streamer = Streamer(
            {name: self.modules[name] for name in stream.components},
            self._units,
            [unit for name in stream.components for unit in self._splits[name].stream],
            self.copies,
            self._leave_phase,
            None if buffer is None else Staging(buffer, self.copies),
        )
        kept = self.plan is not None and self.plan.text_kv
        text = {name: self._splits[name].text_chunks for name in stream.components if kept}
        try:
            self.moved_bytes += streamer.start(stream, text)
        except BaseException:
            streamer.stop()
            raise
        self.streamer, self._streamed = streamer, stream.components

    def _stop_stream(self) -> None:
        if self.streamer is not None:
            self.streamer.stop()
            self.moved_bytes += self.streamer.streamed_bytes
            self.streamer, self._streamed = None, ()

    def _leave_phase(self) -> None:
        """Someone reads the weights: all of them are on the host until the next call."""
        self._stop_stream()
        self.phase = None

    def _wanted(self, phase: str) -> Mapping[str, int]:
        assert self.plan is not None
        if phase in self.plan.placement:
            placed = self.plan.placement[phase]
            stream = self.plan.stream(phase)
            away = () if stream is None else stream.components
            return {name: n for name, n in placed.items() if name not in away}
        # a phase outside the job (a decode by hand, say): whatever it uses is loaded by `ensure`
        return {}

    def _load(self, units: list[WeightUnit]) -> None:
        for unit in units:
            self.moved_bytes += unit.load(self.device)

    def ensure(self, name: str) -> None:
        """A component is about to compute: all of it is on the device, or gets there."""
        if name not in self._cast and name not in self._streamed:
            self._load(self._used(name))

    def _used(self, name: str) -> list[WeightUnit]:
        """A component's units without those that kept keys and values stand for."""
        units = self._units.get(name, [])
        kept = self.plan is not None and self.plan.text_kv and name in self._splits
        return units[: len(units) - self._splits[name].text_chunks] if kept else units

    def stream_units(self, name: str) -> tuple[StreamUnit, ...]:
        """What of a component can be streamed, as its weights are grouped now."""
        split = self._splits.get(name)
        return () if split is None else split.stream

    @contextmanager
    def kv_weights(self, component: str, paths: Sequence[str]) -> Iterator[None]:
        """Have some layers of the text's projections on the device for the length of a block.

        Args:
            component: the denoiser's name.
            paths: of the layers. Those that are on the device already stay as they are.
        """
        split = self._splits.get(component)
        units = self._units.get(component, [])
        apart = units[len(units) - split.text_chunks :] if split is not None else []
        ranges = [
            (unit, offset, n_bytes)
            for unit in apart
            if not unit.loaded
            for offset, n_bytes in unit.find(paths)
        ]
        try:
            for unit, offset, n_bytes in ranges:
                self.moved_bytes += unit.load_range(offset, n_bytes, self.device)
            yield
        finally:
            for unit, offset, n_bytes in ranges:
                unit.point(offset, n_bytes, None)

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
        if name not in self._streamed:
            self._stop_stream()
        for other, units in self._units.items():
            if other != name and other not in self._cast:
                for unit in units:
                    unit.drop()
        self.enforcer.free_cache()

    def finish(self) -> None:
        """The picture is done: close the last phase's books; weights stay for the next picture.

        But not in a ring: between calls anybody may read them.
        """
        self._end_phase()
        self._stop_stream()
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
        self._stop_stream()
        for name in list(self._units):
            self._close(name)
        self._pinned.close()
        self.phase = None
        self.enforcer.free_cache()

    def _close(self, name: str) -> None:
        self.uncast(name)
        for unit in self._units.pop(name):
            unit.close()

    def bring_home(self) -> None:
        """`dissolve`, because adapters are about to change the weights: plans are outdated."""
        self.dissolve()
        self.phase = None
        self.generation += 1

    def abandon(self) -> None:
        """The pipeline is gone: lift the cap and leave the weights on the host, uncopied."""
        self._stop_stream()
        self.enforcer.release()
        for name, units in self._units.items():
            self.uncast(name)
            for unit in units:
                unit.abandon()
        self._pinned.close()
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
        self._pinned.close()
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
