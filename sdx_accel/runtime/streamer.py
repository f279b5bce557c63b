"""Weights that pass through a ring on the device while a model computes.

What stays lies in one blob and what passes in another, at addresses that never change while a phase
runs: the modules' tensors are pointed there once. The call of each unit is intercepted; all order
between copies and computation is by events, the host never waits and nothing is allocated in the
loop. Knows modules and a `StreamPlan`, not pipelines.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sdx_accel.budget.plan import StreamPlan
from sdx_accel.budget.profile import StreamUnit
from sdx_accel.errors import PlacementError
from sdx_accel.runtime.copies import Copies
from sdx_accel.runtime.pinning import Pieces, Staging
from sdx_accel.runtime.stream_order import CALL, COMPILED, is_compiled
from sdx_accel.runtime.weights import WeightUnit

__all__ = ["Streamer"]


class _Passing:
    """One unit that is streamed: where from, where to, and how far it is."""

    def __init__(
        self,
        component: str,
        module: torch.nn.Module,
        pieces: Pieces,
        pinned: bool,
        target: torch.Tensor,
    ) -> None:
        self.component = component
        self.module = module
        self.pieces = pieces
        self.pinned = pinned
        self.target = target
        # units whose slots share bytes with this one's
        self.overlaps: list[_Passing] = []
        self.copied: Any = None
        self.used: Any = None
        # its copy has been issued, and it has not been computed with yet
        self.ready = False
        # whether `copied` and `used` stand for something that may still have to be waited for
        self.waits = False
        self.marked = False


class Streamer:
    """Runs the units of some models from a ring.

    Args:
        modules: the models by component name, in the order in which they run in a pass.
        units: their weights, on the host.
        order: what can be streamed, the models' units one after the other in that order.
        copies: the device's.
        on_read: called before a model's `state_dict` is read while the ring runs; has to `stop`.
        staging: for weights whose host memory is not locked; None = they are copied as they lie.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        units: Mapping[str, Sequence[WeightUnit]],
        order: Sequence[StreamUnit],
        copies: Copies,
        on_read: Callable[[], None] | None = None,
        staging: Staging | None = None,
    ) -> None:
        self._modules = dict(modules)
        self._units = units
        self._order = list(order)
        self._copies = copies
        self._staging = staging
        self._passing: list[_Passing] = []
        # ready are exactly the units from the next computation to before the next copy, in a circle
        self._next_copy = 0
        self._next_use = 0
        self._last_copied: _Passing | None = None
        self._fork: Any = None
        self._asked = dict.fromkeys(self._modules, 0)
        self._undo: list[Callable[[], None]] = []
        self._blobs: list[torch.Tensor] = []
        self._trainable = False
        self._on_read = on_read or self.stop
        #: passes that have ended, and bytes copied through the ring so far
        self.passes = 0
        self.streamed_bytes = 0

    # a weight that points into an inference tensor could never again take part in a gradient
    @torch.inference_mode(False)
    def start(self, plan: StreamPlan, text_chunks: Mapping[str, int] | None = None) -> int:
        """Copy what stays, point all weights at their places and begin to fill the ring.

        Args:
            plan: what stays, and the slots of the rest.
            text_chunks: by component, how many of its last chunks stay on the host.

        Returns:
            Bytes copied of what stays.

        Raises:
            PlacementError: a model is compiled as a whole, or the plan is not of these weights.
        """
        self._refuse_compiled()
        slots = dict(plan.slots)
        ranges = self._staying(slots, text_chunks or {})
        if sum(size for _, _, size in ranges) > plan.resident_bytes or any(
            offset + self._order[index].n_bytes > plan.ring_bytes for index, offset in plan.slots
        ):
            raise PlacementError(
                "the weights are not those that the plan was made for: call enable_xattn(vram=…) "
                "again"
            )
        self._trainable = any(
            p.requires_grad for m in self._modules.values() for p in m.parameters()
        )
        resident = self._copies.allocate(plan.resident_bytes)
        ring = self._copies.allocate(plan.ring_bytes)
        self._blobs = [resident, ring]
        placed = self._copies.event()
        moved = self._place(ranges, resident, placed)
        self._lay_ring(slots, ring)
        self._copies.wait(placed)
        for name, module in self._modules.items():
            handle = module.register_forward_hook(self._end_of(name))
            self._undo.append(handle.remove)
            reading = module.register_state_dict_pre_hook(lambda *_: self._on_read())
            self._undo.append(reading.remove)
        for number, unit in enumerate(self._passing):
            self._intercept(number, unit)
        self._advance()
        return moved

    def _refuse_compiled(self) -> None:
        ancestors = {name: {""} for name in self._modules}
        for unit in self._order:
            parts = unit.name.split(".")[1:]
            ancestors[unit.component].update(".".join(parts[:i]) for i in range(1, len(parts)))
        for name, module in self._modules.items():
            if any(is_compiled(module.get_submodule(path)) for path in ancestors[name]):
                raise PlacementError(
                    f"{name} is compiled as a whole, and this budget streams its weights block by "
                    "block: compile its blocks (compile_repeated_blocks()), not the whole"
                )

    def _staying(
        self, slots: Mapping[int, int], text_chunks: Mapping[str, int]
    ) -> list[tuple[WeightUnit, int, int]]:
        """(chunk, offset, bytes) of everything between what is streamed."""
        found = []
        for name in self._modules:
            chunks = list(self._units[name])
            for number, chunk in enumerate(chunks[: len(chunks) - text_chunks.get(name, 0)]):
                gone = sorted(
                    (unit.offset, unit.n_bytes)
                    for index, unit in enumerate(self._order)
                    if index in slots and unit.component == name and unit.chunk == number
                )
                start = 0
                for offset, size in [*gone, (chunk.n_bytes, 0)]:
                    if offset > start:
                        found.append((chunk, start, offset - start))
                    start = offset + size
        return found

    def _place(
        self, ranges: Sequence[tuple[WeightUnit, int, int]], blob: torch.Tensor, done: Any
    ) -> int:
        # the blob's memory may have been something else that the device has not finished with
        free = self._copies.event()
        self._copies.mark(free)
        start = 0
        for number, (chunk, offset, size) in enumerate(ranges, 1):
            pieces = chunk.pieces(offset, size)
            # one behind the other, so the last stands for all; staging may wait for any of them
            copied = done if number == len(ranges) else self._copies.event()
            self._copy(blob[start : start + size], pieces, chunk.pinned, [free], copied)
            chunk.point(offset, size, blob, start)
            start += size
        return start

    def _copy(
        self, target: torch.Tensor, pieces: Pieces, pinned: bool, after: Sequence[Any], done: Any
    ) -> None:
        # what the host does beside a graph is no part of it
        if not pinned and self._staging is not None and not self._copies.capturing():
            self._staging.copy(target, pieces, after, done)
            return
        for start, data in pieces:
            self._copies.copy(target[start : start + data.numel()], data, after, done)

    def _lay_ring(self, slots: Mapping[int, int], ring: torch.Tensor) -> None:
        spans = []
        for index, offset in sorted(slots.items()):
            unit = self._order[index]
            chunk = self._units[unit.component][unit.chunk]
            module = self._modules[unit.component].get_submodule(unit.name.split(".", 1)[1])
            chunk.point(unit.offset, unit.n_bytes, ring, offset)
            passing = _Passing(
                unit.component,
                module,
                chunk.pieces(unit.offset, unit.n_bytes),
                chunk.pinned,
                ring[offset : offset + unit.n_bytes],
            )
            passing.copied, passing.used = self._copies.event(), self._copies.event()
            # as `free` above
            self._copies.mark(passing.used)
            passing.marked = True
            spans.append((offset, offset + unit.n_bytes))
            self._passing.append(passing)
        for a, (start, end) in zip(self._passing, spans, strict=True):
            a.overlaps = [
                b
                for b, (first, last) in zip(self._passing, spans, strict=True)
                if b is not a and first < end and start < last
            ]

    def _intercept(self, number: int, unit: _Passing) -> None:
        own = unit.module.__dict__
        original = own.get(CALL)
        inner = original if original is not None else unit.module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            self._need(number)
            try:
                return inner(*args, **kwargs)
            finally:
                self._done(number)

        if hasattr(original, COMPILED):
            setattr(call, COMPILED, getattr(original, COMPILED))
        own[CALL] = call

        def undo() -> None:
            # compiled or compiled again in the meantime: that call knows nothing of ours
            if own.get(CALL) is call:
                del own[CALL]
                if original is not None:
                    own[CALL] = original

        self._undo.append(undo)

    def _end_of(self, name: str) -> Callable[..., None]:
        streamed = any(unit.component == name for unit in self._passing)
        last = name == next(reversed(self._modules))

        def end(module: torch.nn.Module, args: Any, out: Any) -> None:
            if streamed and not self._asked[name]:
                raise PlacementError(
                    f"{name} ran past its weights, which this budget streams block by block: it "
                    "was compiled as a whole; compile its blocks (compile_repeated_blocks())"
                )
            self._asked[name] = 0
            if last:
                self.passes += 1
                # a graph has to end on the stream that it began on
                if self._last_copied is not None and self._copies.capturing():
                    self._copies.wait(self._last_copied.copied)

        return end

    def _need(self, number: int) -> None:
        """Unit `number` is about to compute: its copy is issued and waited for on the device."""
        if self._trainable and torch.is_grad_enabled():
            raise PlacementError(
                "gradients need all weights at once, and this budget streams them: use "
                "torch.no_grad(), or call disable_xattn() first"
            )
        unit = self._passing[number]
        self._asked[unit.component] += 1
        while self._next_use != number:
            # left out of this pass: its slot may be overwritten
            self._passing[self._next_use].ready = False
            self._next_use = (self._next_use + 1) % len(self._passing)
        if not unit.ready:
            self._issue(unit)
            self._next_copy = (number + 1) % len(self._passing)
        if unit.waits:
            self._copies.wait(unit.copied)

    def _done(self, number: int) -> None:
        """Everything that unit `number` computes has been issued: the ring may move on."""
        unit = self._passing[number]
        self._copies.mark(unit.used)
        unit.marked = True
        unit.ready = False
        self._next_use = (number + 1) % len(self._passing)
        self._advance()

    def _advance(self) -> None:
        """Copy ahead, into the next pass as well, as far as no unit is in the way."""
        for _ in self._passing:
            unit = self._passing[self._next_copy]
            if not unit.ready:
                if any(other.ready for other in unit.overlaps):
                    return
                self._issue(unit)
            self._next_copy = (self._next_copy + 1) % len(self._passing)

    def _issue(self, unit: _Passing) -> None:
        after = [other.used for other in (unit, *unit.overlaps) if other.marked]
        if self._fork is not None:
            self._copies.mark(self._fork)
            after.append(self._fork)
            self._fork = None
        self._copy(unit.target, unit.pieces, unit.pinned, after, unit.copied)
        unit.ready = unit.waits = True
        self._last_copied = unit
        self.streamed_bytes += unit.target.numel()

    def reset(self) -> None:
        """After a failure: wait for the device, trust nothing in the ring, fill it again."""
        self._copies.drain()
        for unit in self._passing:
            unit.ready = unit.waits = unit.marked = False
        self._next_copy = self._next_use = 0
        self._asked = dict.fromkeys(self._asked, 0)
        self._fork = None
        self._advance()

    def capture_ready(self) -> None:
        """Right before a graph of whole passes is captured, after a pass that ran eagerly.

        A graph must not wait for anything from before it. Copies inside it fill the ring for the
        next replay, as the last eager pass did for the first. `reset` before running eagerly again.
        """
        self._copies.drain()
        for unit in self._passing:
            unit.waits = unit.marked = False
        self._last_copied = None
        self._fork = self._copies.event()

    def stop(self) -> None:
        """Wait for the device; the models are stock again, their weights on the host."""
        self._copies.drain()
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        # they know each other in a circle, and each knows the ring
        for unit in self._passing:
            unit.overlaps.clear()
        self._passing = []
        self._last_copied = None
        for name in self._modules:
            for chunk in self._units[name]:
                chunk.drop()
        self._blobs = []
