"""Stand-ins for a card's copy stream that bracket what it may do, and plans made by hand.

`Late` copies as late as order allows, `Early` as soon as it is asked. Both check each copy against
the uses of its slot, and overwrite a slot with NaN as soon as its unit is done, so that a missing
dependency fails or shows in the result.
"""

import dataclasses

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import StreamPlan
from sdx_accel.budget.streaming import best_stream
from sdx_accel.runtime import stream_order
from sdx_accel.runtime.copies import HostCopies
from sdx_accel.runtime.weights import unit_bytes


class _Event:
    """Recorded again and again, as a card's: `token` is the newest recording, None before."""

    def __init__(self):
        self.token = None
        self.target = None


class _Queue(HostCopies):
    """A copy stream, first in, first out, that checks the order which it is given."""

    def __init__(self):
        self.allocated = 0
        self.copied = []
        self._waiting = []
        # (slot, token of the mark that ends its use) of all uses
        self._uses = []
        self._in_use = None

    def allocate(self, n_bytes):
        self.allocated += 1
        # NaN in every float format
        return super().allocate(n_bytes).fill_(255)

    def event(self):
        return _Event()

    def copy(self, target, source, after, done):
        assert target.numel() == source.numel()
        known = {event.token for event in after}
        for slot, token in self._uses:
            assert token in known or not _overlap(slot, target), "a slot is overwritten in use"
        assert self._in_use is None or not _overlap(self._in_use, target)
        done.token, done.target = object(), target
        self._waiting.append((target, source, done.token))

    def _run_one(self):
        target, source, _ = self._waiting.pop(0)
        target.copy_(source)
        self.copied.append(source.data_ptr())

    def finish(self, event):
        while event.token in {token for _, _, token in self._waiting}:
            self._run_one()

    def wait(self, event):
        self.finish(event)
        self._in_use = event.target

    def mark(self, event):
        self._uses = [use for use in self._uses if use[1] is not event.token]
        event.token = object()
        if self._in_use is not None:
            self._uses.append((self._in_use, event.token))
            self._in_use.fill_(255)
        self._in_use = None

    def drain(self):
        while self._waiting:
            self._run_one()
        self._uses = []
        self._in_use = None


def _overlap(a, b):
    return a.data_ptr() < b.data_ptr() + b.numel() and b.data_ptr() < a.data_ptr() + a.numel()


class Late(_Queue):
    """Copies only when the computation waits."""


class Early(_Queue):
    """Copies as soon as it is asked to."""

    def copy(self, target, source, after, done):
        super().copy(target, source, after, done)
        while self._waiting:
            self._run_one()


def _units(modules, names):
    """(groups of weights, units that can be streamed) of some models one after the other."""
    found = [stream_order.layout(n, modules[n], *stream_order.order_of(modules[n])) for n in names]
    return [g for f in found for g in f.groups], [u for f in found for u in f.units]


def _stream_plan(modules, phase, resident, ring):
    """A hand-made layout: every `resident`-th unit stays, the others follow each other."""
    kinds = {"denoise": ("controlnet", "unet"), "text": ("text_encoder",)}[phase]
    names = [name for kind in kinds for name in modules if name.startswith(kind)]
    groups, order = _units(modules, names)
    stay = tuple(i for i in range(len(order)) if resident and i % resident == 0)
    gone = [i for i in range(len(order)) if i not in stay]
    total = sum(order[i].n_bytes for i in gone)
    if ring is None:
        # the planner's own, in half of the room that all weights need
        everything = sum(unit_bytes(group) for group in groups)
        rest = everything - sum(unit.n_bytes for unit in order)
        found = best_stream(phase, order, Machine.generic(), everything // 2, rest)
        assert found is not None
        return found
    size = ring * max(order[i].n_bytes for i in gone)
    slots, offset = [], 0
    for i in gone:
        if offset + order[i].n_bytes > size:
            offset = 0
        slots.append((i, offset))
        offset += order[i].n_bytes
    rest = sum(unit_bytes(group) for group in groups) - total
    return StreamPlan(phase, tuple(names), stay, tuple(slots), rest, size, total, 0.0, 0.0)


def streaming(plan, modules, phases, resident, ring):
    """The same plan with the weights of some phases in a ring, and each phase alone."""
    streams = tuple(_stream_plan(modules, phase, resident, ring) for phase in phases)
    mine = {"text": "text_encoder", "denoise": ("controlnet", "unet"), "decode": "vae"}
    placement = {
        phase: {
            name: 0 if phase in phases else n
            for name, n in placed.items()
            if name.startswith(mine.get(phase, ()))
        }
        for phase, placed in plan.placement.items()
    }
    return dataclasses.replace(plan, streams=streams, placement=placement)
