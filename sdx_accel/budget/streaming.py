"""Which weights stay on the card and which pass through a ring while a phase computes.

A pass runs the units of a cycle in order. Resident units stay; each other unit is copied into its
own place in the ring before it runs, and the place is free again once it has run. Copies go one
after the other on their own stream, in the order of use and past the end of a pass into the next,
so a pass takes at least max(computing, streamed bytes ÷ link). A ring of S* = K + 2·w_max bytes
reaches that, w_max being the largest streamed unit and K the largest lead that either side gains
on the other in any stretch of the cycle.

The choices that are tried do not depend on the room, which only filters them: more room is never
slower.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import StreamPlan, copy_speed
from sdx_accel.budget.profile import StreamUnit, segment_bytes

__all__ = [
    "ALIGN",
    "best_stream",
    "even_ring",
    "largest_streamed",
    "pick_even",
    "ring_bytes",
    "ring_layout",
    "seconds_of",
    "simulate",
    "smallest_room",
]

# torch's allocator aligns to 512 bytes; kernels that are chosen by alignment must not change
ALIGN = 512
# what a module without products costs: launching its kernels
LEAST_SECONDS = 20e-6
# amounts of streamed bytes that are tried; 1/44 of SDXL's UNet is 0.11 GiB
AMOUNTS = 44
# rings that are tried beside S*, in largest streamed units
RING_UNITS = (2, 3, 5)
# how much faster than calibration saw a card may compute: an H200 takes 42 ms a step of SDXL as one
# CUDA graph where its host launches it in 60 to 97. Of choices that are equal at the speed seen,
# the fastest at this one is taken: simulated from 0.8 to 4 GiB and at 1.3 to 2.3 times the speed
# seen, it is within 1.03 of the best (1.10 without; 2 and 3 are worse than 2.5)
HURRY = 2.5


def seconds_of(units: Sequence[StreamUnit], machine: Machine) -> list[float]:
    """Predicted computing time of each unit."""
    return [max(LEAST_SECONDS, unit.flops / machine.flops_per_s) for unit in units]


def largest_streamed(units: Sequence[StreamUnit]) -> int:
    """Size above which units stay, for which the least memory is needed.

    The ring holds two of the largest streamed unit, so a few large ones (a token embedding, the
    widest convolutions in fp32) may take less when they stay than when they pass.
    """
    sizes = sorted((unit.n_bytes for unit in units), reverse=True)
    larger = accumulate(sizes, initial=0)
    least = min(
        zip(larger, sizes, strict=False), key=lambda each: each[0] + 2 * each[1], default=None
    )
    return 0 if least is None else least[1]


def pick_even(
    units: Sequence[StreamUnit],
    seconds: Sequence[float],
    streamed_bytes: float,
    by: Literal["time", "bytes"],
) -> frozenset[int]:
    """Indexes of about `streamed_bytes` of units to stream, spread evenly over the cycle.

    Args:
        units: the cycle.
        seconds: computing time of each.
        streamed_bytes: how much to stream.
        by: spread over computing time (what a copy hides behind) or over bytes (an even ring).
    """
    largest = largest_streamed(units)
    may = [unit.n_bytes <= largest for unit in units]
    weights = [unit.n_bytes * ok for unit, ok in zip(units, may, strict=True)]
    done = list(accumulate(seconds if by == "time" else weights))
    picked, total = [], 0
    for index, (ok, reached) in enumerate(zip(may, done, strict=True)):
        # half a unit ahead or behind: the sum stays within one unit of what was asked
        due = streamed_bytes * reached / done[-1] if done[-1] else 0.0
        if ok and total + weights[index] / 2 <= due:
            picked.append(index)
            total += weights[index]
    return frozenset(picked)


def ring_bytes(
    units: Sequence[StreamUnit], seconds: Sequence[float], streamed: Collection[int], link: float
) -> int:
    """S*: the ring that reaches max(computing, copying), at most one place for each unit."""
    weights = [unit.n_bytes if i in streamed else 0 for i, unit in enumerate(units)]
    total = sum(weights)
    # what the faster side gains on the slower one; over a whole cycle it loses, so this is finite
    sign = 1 if total <= link * sum(seconds) else -1
    gains = [sign * (w - link * c) for w, c in zip(weights, seconds, strict=True)]
    lead = best = 0.0
    for gain in gains * 2:
        lead = max(0.0, lead + gain)
        best = max(best, lead)
    wanted = -(-int(best) // ALIGN) * ALIGN + 2 * max(weights, default=0)
    return min(wanted, total)


def even_ring(units: Sequence[StreamUnit], streamed: Collection[int], rounds: int) -> int:
    """The smallest ring that a pass fills at most `rounds` times.

    Places are the same in every pass, so a last round that fills a part of the ring wastes the rest
    of it: rings between two numbers of rounds are slower than the smaller of them.
    """
    sizes = [-(-units[i].n_bytes // ALIGN) * ALIGN for i in sorted(streamed)]
    # to 1/4096 of the streamed bytes: twelve trials
    step = max(1, sum(sizes) // (ALIGN * 4096)) * ALIGN

    def fits(ring: int) -> bool:
        filled, used = 1, 0
        for size in sizes:
            used += size
            if used > ring:
                filled, used = filled + 1, size
        return filled <= rounds

    low, high = sum(sizes) // rounds // step, -(-sum(sizes) // step)
    low = max(low, -(-max(sizes, default=0) // step))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * step) else (middle + 1, high)
    return high * step


def ring_layout(
    units: Sequence[StreamUnit], streamed: Collection[int], ring: int
) -> dict[int, int]:
    """Offset in the ring of each streamed unit: one behind the other, from the front when full."""
    offsets, cursor = {}, 0
    for index in sorted(streamed):
        n_bytes = units[index].n_bytes
        if cursor + n_bytes > ring:
            cursor = 0
        offsets[index] = cursor
        cursor += -(-n_bytes // ALIGN) * ALIGN
    return offsets


def _earlier_users(units: Sequence[StreamUnit], layout: Mapping[int, int]) -> dict[int, int]:
    """For each streamed unit the last one before it, cyclically, that its place was used by."""
    order = sorted(layout)
    earlier = {}
    for at, index in enumerate(order):
        start, end = layout[index], layout[index] + units[index].n_bytes
        for back in range(1, len(order) + 1):
            other = order[at - back]
            if layout[other] < end and start < layout[other] + units[other].n_bytes:
                earlier[index] = other
                break
    return earlier


def simulate(
    units: Sequence[StreamUnit],
    seconds: Sequence[float],
    streamed: Collection[int],
    layout: Mapping[int, int],
    link: float,
    passes: int = 4,
) -> float:
    """Seconds that the last of `passes` passes takes.

    A copy begins when the one before it is done and every unit that its place was used by has run;
    a unit runs when the one before it has and its own copy is done.
    """
    earlier = _earlier_users(units, layout)
    copies = [units[i].n_bytes / link if i in streamed else 0.0 for i in range(len(units))]
    ran = [0.0] * len(units)
    computed = copied = begin = 0.0
    for _ in range(passes):
        begin = computed
        for index, (copy, busy) in enumerate(zip(copies, seconds, strict=True)):
            if copy:
                copied = max(copied, ran[earlier[index]]) + copy
                computed = max(computed, copied)
            computed += busy
            ran[index] = computed
    return computed - begin


@dataclass(frozen=True)
class _Choice:
    room_bytes: int
    plan: StreamPlan
    hurried_s: float


@lru_cache(maxsize=32)
def _choices(
    units: tuple[StreamUnit, ...], rest_bytes: int, link: float, flops_per_s: float
) -> tuple[_Choice, ...]:
    """Every choice that is tried, best first; a function of the cycle and the card's two speeds."""
    seconds = [max(LEAST_SECONDS, unit.flops / flops_per_s) for unit in units]
    hurried = [each / HURRY for each in seconds]
    everything = sum(unit.n_bytes for unit in units)
    limit = largest_streamed(units)
    movable = sum(unit.n_bytes for unit in units if unit.n_bytes <= limit)
    tried: set[tuple[frozenset[int], int]] = set()
    for part in range(1, AMOUNTS + 1):
        # spread over time is the faster one, but it cannot stream everything
        ways: tuple[Literal["time", "bytes"], ...] = ("time", "bytes")
        for by in ways if 3 * part > AMOUNTS else ways[:1]:
            streamed = pick_even(units, seconds, movable * part / AMOUNTS, by)
            total = sum(units[i].n_bytes for i in streamed)
            largest = max((units[i].n_bytes for i in streamed), default=1)
            rounds = {-(-total // (count * largest)) for count in RING_UNITS}
            rounds.add(total // max(1, ring_bytes(units, seconds, streamed, link)))
            # a ring that holds all of it saves nothing
            tried |= {(streamed, even_ring(units, streamed, n)) for n in rounds if n > 1}
    found = []
    for streamed, ring in tried:
        layout = ring_layout(units, streamed, ring)
        moved = sum(units[i].n_bytes for i in streamed)
        kept = everything - moved + rest_bytes
        plan = StreamPlan(
            phase="",
            components=tuple(dict.fromkeys(unit.component for unit in units)),
            resident=tuple(i for i in range(len(units)) if i not in streamed),
            slots=tuple(sorted(layout.items())),
            resident_bytes=kept,
            ring_bytes=ring,
            streamed_bytes=moved,
            seconds=round(simulate(units, seconds, streamed, layout, link), 6),
            bound_seconds=round(max(sum(seconds), moved / link), 6),
        )
        fast = round(simulate(units, hurried, streamed, layout, link), 6)
        found.append(_Choice(segment_bytes(kept) + segment_bytes(ring), plan, fast))

    def order(choice: _Choice) -> tuple[Any, ...]:
        plan = choice.plan
        # the last two make the order total, so that equal inputs give equal plans
        return plan.seconds, choice.hurried_s, plan.streamed_bytes, choice.room_bytes, plan.slots

    found.sort(key=order)
    return tuple(found)


def _all(units: Sequence[StreamUnit], machine: Machine, rest_bytes: int) -> tuple[_Choice, ...]:
    link = copy_speed(sum(unit.n_bytes for unit in units) + rest_bytes, machine)
    return _choices(tuple(units), rest_bytes, link, machine.flops_per_s)


def best_stream(
    phase: str,
    units: Sequence[StreamUnit],
    machine: Machine,
    room_bytes: int,
    rest_bytes: int = 0,
) -> StreamPlan | None:
    """The fastest way to run a cycle whose weights have `room_bytes`, or None when none fits.

    Args:
        phase: what the plan is for.
        units: the cycle.
        machine: gives the link and the computing speed.
        room_bytes: what torch may reserve for the resident part and the ring together.
        rest_bytes: weights of these models outside every unit; they stay.
    """
    choices = _all(units, machine, rest_bytes)
    fitting = (choice.plan for choice in choices if choice.room_bytes <= room_bytes)
    best = next(fitting, None)
    return None if best is None else replace(best, phase=phase)


def smallest_room(units: Sequence[StreamUnit], machine: Machine, rest_bytes: int = 0) -> int | None:
    """The least room that `best_stream` finds a way for; None where streaming saves nothing."""
    choices = _all(units, machine, rest_bytes)
    return min((choice.room_bytes for choice in choices), default=None)
