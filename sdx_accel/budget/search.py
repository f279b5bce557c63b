"""Chooses where each unit of weights lies in each phase; deterministic, monotone in the budget.

While the denoiser fits as a whole it is whole while it runs. Side models (text encoders, VAE, a
refiner) then either stay on the card for the whole picture or are there only for their own phases;
in the other phases a prefix of the denoiser's units stays and the rest comes back before the next
denoise. Among the placements that fit, the one that moves the fewest bytes wins.

Where it does not fit, each phase stands alone: everything that it does not need is out, and if its
own models do not fit either, they are streamed (`streaming`). Such a placement moves at least what
any of the first kind moves and is at least as slow, so it is only taken when there is none of them.

Weights that project the prompt to keys and values can be left out of the denoise when the results
are kept; that costs their load for each new prompt. Bits never depend on any of this.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import HOST_MEMORY, Phase, Plan, StreamPlan
from sdx_accel.budget.profile import Component, JobProfile, PhaseProfile, StreamUnit, segment_bytes
from sdx_accel.budget.streaming import best_stream, seconds_of, smallest_room
from sdx_accel.budget.units import GIB, MIB, ceil_gib, to_gib

__all__ = ["SLACK_BYTES", "make_plan"]

# what the cap leaves for code that the driver loads lazily after the warm pass
SLACK_BYTES = 64 * MIB
# persistent small tensors (embeddings, latents, schedules): two 2 MiB segments and one of 20 MiB;
# another segment of 24 MiB that a UNet step on an H200 holds above the modelled ones
PERSISTENT_BYTES = 48 * MIB
# room above the modelled minimum of a phase that runs under allocator pressure
PRESSURE_SHARE, PRESSURE_BYTES = 0.02, 32 * MIB
# a decode in bands of rows under a cap that does not press: that share of what its trace reserves,
# more. On an H200 (fp16, torch 2.11) all weights resident took 106 and 110 MiB above the prediction
# at 1024², 84 and 61 below it at 512² and 1536². The cause is not known; one workspace of 16 to
# 128 MiB that is not modelled moves the 1276 MiB of 1024² by -230 to +128. Where the cap presses,
# torch gives cached segments back
LOOSE_SHARE, LOOSE_BYTES = 0.10, 128 * MIB
# kept keys and values are tensors of 0.1 to 1 MiB: a third more covers what their 2 MiB segments
# leave over at any batch
KEPT_TEXT_SHARE = 4 / 3
# a prompt that changes in mid-run projects layer by layer: the largest pair of SDXL weighs 10 MiB;
# where a step leaves that much of its segments free, the weights lie there
MISS_BYTES = 20 * MIB

# the denoiser moves for every picture, a text encoder only for a new prompt: at equal bytes the
# denoiser stays; whole numbers, so that equal costs compare equal
DENOISER_WEIGHT, SIDE_WEIGHT = 11, 10

Placement = dict[str, dict[str, int]]


@dataclass(frozen=True)
class _Candidate:
    """A placement in short: the torch memory that it needs, and what it costs.

    Args:
        need: bytes of the phase that needs most.
        cost: what it copies for a picture, weighted.
        moved: the same in bytes.
        stay: which side models stay on the card for the whole picture.
        kept: units of the denoiser that do.
        text_kv: whether the text's projections are left out of the denoise.
    """

    need: int
    cost: int
    moved: int
    stay: tuple[bool, ...]
    kept: int
    text_kv: bool


@dataclass(frozen=True)
class _Found:
    """A placement, and the bytes that it copies for a picture."""

    moved: int
    placement: Placement
    streams: tuple[StreamPlan, ...] = ()
    text_kv: bool = False


def _weights(component: Component, n_units: int | None = None) -> int:
    units = component.units if n_units is None else component.units[:n_units]
    return sum(segment_bytes(unit.n_bytes) for unit in units)


def _whole(component: Component, phase: str, text_kv: bool) -> int:
    """How many units a phase needs of a component that is resident in it."""
    left_out = component.text_chunks if text_kv and phase == "denoise" else 0
    return len(component.units) - left_out


def _need(phase: PhaseProfile) -> int:
    """Reserved bytes to plan for: without pressure in the step loop, with some elsewhere."""
    if phase.name in ("denoise", "refine"):
        return phase.reserved_bytes
    return min(
        phase.reserved_bytes,
        round(phase.smallest_bytes * (1 + PRESSURE_SHARE)) + PRESSURE_BYTES,
    )


def _loose(profile: JobProfile, phase: PhaseProfile) -> int:
    """Bytes that a phase may take above its own segments where they are not given back."""
    if phase.name != "decode" or not profile.job.get("bands"):
        return 0
    return min(round(phase.reserved_bytes * LOOSE_SHARE), LOOSE_BYTES)


def _extra(profile: JobProfile, floors: Mapping[str, int], text_kv: bool) -> dict[str, int]:
    """Bytes that each phase takes beside its weights and what its own trace shows."""
    # what is kept of a prompt stays between pictures, so every phase carries it
    kept = sum(c.kv_bytes for c in profile.components) if text_kv else 0
    kept = -(-round(kept * KEPT_TEXT_SHARE) // (2 * MIB)) * 2 * MIB
    return {
        p.name: floors.get(p.name, 0) + kept + (_miss(p) if kept and p.name == "denoise" else 0)
        for p in profile.phases
    }


def _miss(phase: PhaseProfile) -> int:
    """What the weights of one layer's projections take above a step's own segments."""
    free = phase.reserved_bytes - round(max(phase.curve_mib, default=0) * MIB)
    return max(0, MISS_BYTES - free)


def _base(machine: Machine) -> int:
    return segment_bytes(machine.blas_workspace_bytes) + PERSISTENT_BYTES


def _parts(profile: JobProfile, phase: PhaseProfile) -> list[Component]:
    """The models whose weights a phase needs; in a streamed phase they run in this order."""
    parts = [c for c in profile.components if phase.name in c.phases]
    # ControlNets run before the UNet, whatever the order in which they were described
    parts.sort(key=lambda c: c.name == "unet")
    return [c for c in parts if c.name not in phase.carries]


def _cycle(parts: list[Component], text_kv: bool) -> tuple[list[Component], list[Component]]:
    """What can be streamed of the models of a phase, and what cannot."""
    # projections that lie in chunks of their own are in no unit: they have to be out
    streamed = [c for c in parts if c.stream and (text_kv or not c.text_chunks)]
    return streamed, [c for c in parts if c not in streamed]


def _units(cycle: list[Component]) -> tuple[StreamUnit, ...]:
    return tuple(unit for component in cycle for unit in component.stream)


def _rest(component: Component) -> int:
    """Bytes of a streamed component outside its units and its text projections."""
    chunks = component.units[: len(component.units) - component.text_chunks]
    return sum(u.n_bytes for u in chunks) - sum(u.n_bytes for u in component.stream)


def _sides(profile: JobProfile) -> tuple[list[Component], list[Component]]:
    """The denoiser with what runs beside it, and the models of other phases."""
    denoiser = [c for c in profile.components if c.phases == ("denoise",)]
    return denoiser, [c for c in profile.components if c.phases != ("denoise",)]


def _candidates(
    profile: JobProfile, limit: int, extra: Mapping[str, int], text_kv: bool
) -> Iterator[_Candidate]:
    """Placements within `limit` bytes of torch memory with a denoiser that is whole as it runs."""
    denoiser, sides = _sides(profile)
    whole = [c.units[: _whole(c, "denoise", text_kv)] for c in denoiser]
    text = [c.units[_whole(c, "denoise", text_kv) :] for c in denoiser]
    text_bytes = sum(unit.n_bytes for units in text for unit in units)
    order = [unit for units in whole for unit in units]
    for stay in product((True, False), repeat=len(sides)):
        always = {c.name for c, kept in zip(sides, stay, strict=True) if kept}
        away = [c for c in sides if c.name not in always]
        needs = {
            p.name: _need(p)
            + extra[p.name]
            + sum(_weights(c) for c in sides if _is_in(c, p, c.name in always))
            for p in profile.phases
        }
        if "denoise" in needs:
            needs["denoise"] += sum(segment_bytes(unit.n_bytes) for unit in order)
        elsewhere = max((n for name, n in needs.items() if name != "denoise"), default=limit)
        moved = sum(c.n_bytes for c in away) + text_bytes + sum(unit.n_bytes for unit in order)
        cost = sum(
            c.n_bytes * (DENOISER_WEIGHT if "refine" in c.phases else SIDE_WEIGHT) for c in away
        )
        # text is as dear as the rest of the denoiser, or it would be kept where that saves nothing
        cost += (moved - sum(c.n_bytes for c in away)) * DENOISER_WEIGHT
        for kept in range(len(order) + 1):
            need = max(needs.get("denoise", 0), elsewhere)
            if need > limit:
                break
            yield _Candidate(need, cost, moved, stay, kept, text_kv)
            if kept < len(order):
                elsewhere += segment_bytes(order[kept].n_bytes)
                moved -= order[kept].n_bytes
                cost -= order[kept].n_bytes * DENOISER_WEIGHT


def _is_in(side: Component, phase: PhaseProfile, always: bool) -> bool:
    return (always or phase.name in side.phases) and side.name not in phase.carries


def _placed(profile: JobProfile, candidate: _Candidate) -> _Found:
    denoiser, sides = _sides(profile)
    placement: Placement = {
        p.name: {
            c.name: len(c.units)
            for c, always in zip(sides, candidate.stay, strict=True)
            if _is_in(c, p, always)
        }
        for p in profile.phases
    }
    left = candidate.kept
    for component in denoiser:
        whole = _whole(component, "denoise", candidate.text_kv)
        kept, left = min(left, whole), max(left - whole, 0)
        for phase in placement:
            placement[phase][component.name] = whole if phase == "denoise" else kept
    return _Found(candidate.moved, placement, text_kv=candidate.text_kv)


def _least(profile: JobProfile, phase: PhaseProfile, machine: Machine, text_kv: bool) -> int:
    """The least that torch reserves for the weights of a phase, everything else being out."""
    parts = _parts(profile, phase)
    least = sum(_weights(c, _whole(c, phase.name, text_kv)) for c in parts)
    cycle, fixed = _cycle(parts, text_kv)
    room = smallest_room(_units(cycle), machine, sum(map(_rest, cycle)))
    return least if room is None else min(least, room + sum(_weights(c) for c in fixed))


def _alone(
    profile: JobProfile, machine: Machine, room: Mapping[str, int], text_kv: bool
) -> _Found | None:
    """Each phase with only what it needs, streamed where that does not fit into its room."""
    placement: Placement = {}
    streams: list[StreamPlan] = []
    moved = sum(c.n_bytes for c in profile.components)
    for phase in profile.phases:
        parts = _parts(profile, phase)
        placement[phase.name] = {c.name: _whole(c, phase.name, text_kv) for c in parts}
        if sum(_weights(c, placement[phase.name][c.name]) for c in parts) <= room[phase.name]:
            continue
        cycle, fixed = _cycle(parts, text_kv)
        stream = best_stream(
            phase.name,
            _units(cycle),
            machine,
            room[phase.name] - sum(_weights(c) for c in fixed),
            sum(map(_rest, cycle)),
        )
        if stream is None:
            return None
        placement[phase.name].update(dict.fromkeys(stream.components, 0))
        streams.append(stream)
        if phase.name == "text" and profile.job.get("guided"):
            # the encoders run once more, for the negative prompt
            moved += stream.streamed_bytes
    return _Found(moved, placement, tuple(streams), text_kv)


def _smallest(
    profile: JobProfile, machine: Machine, floors: Mapping[str, int]
) -> tuple[int, str, bool]:
    """Smallest budget, the phase that needs it, and whether it takes the kept text."""
    outside = machine.non_torch_bytes + SLACK_BYTES + _base(machine)
    found = []
    for text_kv in _text_choices(profile):
        extra = _extra(profile, floors, text_kv)
        most = max(
            (outside + _least(profile, p, machine, text_kv) + _need(p) + extra[p.name], p.name)
            for p in profile.phases
        )
        found.append((*most, text_kv))
    return min(found, key=lambda each: each[0])


def _text_choices(profile: JobProfile) -> tuple[bool, ...]:
    return (False, True) if any(c.text_chunks for c in profile.components) else (False,)


def _best(
    profile: JobProfile, machine: Machine, limit: int, floors: Mapping[str, int]
) -> _Found | None:
    choices = [(kept, _extra(profile, floors, kept)) for kept in _text_choices(profile)]
    whole = [c for kept, extra in choices for c in _candidates(profile, limit, extra, kept)]
    # From the least memory upwards, and on only to what moves no more: the cheapest of all would
    # move up to 0.1 GiB more for a new prompt at some larger budgets than at smaller ones.
    # The first of equals: text is kept only where that moves fewer bytes.
    whole.sort(key=lambda c: (c.need, c.cost, c.moved))
    best: _Candidate | None = None
    for candidate in whole:
        if best is None or (candidate.cost < best.cost and candidate.moved <= best.moved):
            best = candidate
    if best is not None:
        return _placed(profile, best)
    for kept, extra in choices:
        room = {p.name: limit - _need(p) - extra[p.name] for p in profile.phases}
        alone = _alone(profile, machine, room, kept)
        if alone is not None:
            return alone
    return None


def make_plan(
    profile: JobProfile,
    machine: Machine,
    budget_bytes: int,
    *,
    notes: tuple[str, ...] = (),
    floors: Mapping[str, int] | None = None,
    ram: int | None = None,
) -> Plan:
    """Place a job within a budget.

    Args:
        profile: the job's weights and activations.
        machine: the card.
        budget_bytes: driver-visible limit, CUDA context included.
        notes: sentences for the reader of the plan.
        floors: bytes by phase that it was seen to take above its prediction.
        ram: most bytes of host memory that the weights may take; the machine's by default.

    Returns:
        A frozen `Plan`; `feasible` is False when no placement fits, and then `phases` shows what
        each phase would need with everything else moved out and as much as possible streamed.
    """
    floors = floors or {}
    if ram is not None:
        machine = replace(machine, ram_bytes=ram)
    limit = budget_bytes - machine.non_torch_bytes - SLACK_BYTES - _base(machine)
    best = _best(profile, machine, limit, floors)
    smallest, binding, kept = _smallest(profile, machine, floors)
    host = sum(c.n_bytes for c in profile.components)
    fits_host = machine.ram_bytes is None or host <= machine.ram_bytes
    shown = best
    if shown is None:
        room = {p.name: _least(profile, p, machine, kept) for p in profile.phases}
        shown = _alone(profile, machine, room, kept)
        assert shown is not None
    extra = _extra(profile, floors, shown.text_kv)
    return Plan(
        model=profile.model,
        job=dict(profile.job),
        machine=machine,
        budget_gib=to_gib(budget_bytes),
        feasible=best is not None and fits_host,
        smallest_budget_gib=ceil_gib(smallest),
        binding_phase=binding if fits_host else HOST_MEMORY,
        numerics=dict(profile.numerics),
        placement=shown.placement,
        phases=tuple(
            _phase(profile, p, shown, machine, extra[p.name], limit if best else None)
            for p in profile.phases
        ),
        moved_gib_per_picture=to_gib(shown.moved),
        host_gib=to_gib(host),
        notes=(*notes, *_link_notes(shown, machine)),
        streams=shown.streams,
        text_kv=shown.text_kv,
        seconds_per_step=_seconds_per_step(profile, machine, shown),
        margin_gib=to_gib(SLACK_BYTES),
    )


def _seconds_per_step(profile: JobProfile, machine: Machine, found: _Found) -> float:
    """Predicted time of a step of the denoiser; 0 where its units are not known."""
    # two predictions that do not share a call are two passes
    passes = 2 if profile.numerics.get("guidance") == "in turn" else 1
    streamed = next((s.seconds for s in found.streams if s.phase == "denoise"), None)
    if streamed is not None:
        return passes * streamed
    models = [c for c in profile.components if "denoise" in c.phases]
    if not all(c.stream for c in models):
        return 0.0
    return round(passes * sum(seconds_of(_units(models), machine)), 6)


def _link_notes(found: _Found, machine: Machine) -> tuple[str, ...]:
    slow = any(s.copy_speed(machine) < machine.link_bytes_per_s for s in found.streams)
    pinnable = (machine.pinnable_bytes or 0) / GIB
    return (
        (
            f"only {pinnable:.2f} GiB of host memory can be pinned: the other copies run at "
            f"{machine.pageable_bytes_per_s / 1e9:.0f} GB/s",
        )
        if slow
        else ()
    )


def _phase(
    profile: JobProfile,
    phase: PhaseProfile,
    found: _Found,
    machine: Machine,
    extra: int,
    limit: int | None,
) -> Phase:
    by_name = {c.name: c for c in profile.components}
    kept = {name: n for name, n in found.placement[phase.name].items() if n}
    weights = {name: _weights(by_name[name], n) for name, n in kept.items()}
    units = {name: f"{n}/{len(by_name[name].units)}" for name, n in kept.items()}
    stream = next((s for s in found.streams if s.phase == phase.name), None)
    if stream is not None:
        _show_stream(stream, by_name, weights, units)
    activations = _need(phase) + extra
    if limit is not None:
        free = phase.reserved_bytes + _loose(profile, phase)
        activations = min(free + extra, limit - sum(weights.values()))
    peak = machine.non_torch_bytes + _base(machine) + sum(weights.values()) + activations
    return Phase(
        name=phase.name,
        predicted_peak_gib=to_gib(peak),
        resident_gib={name: to_gib(n) for name, n in weights.items()},
        resident_units=units,
        activations_gib=to_gib(activations),
        curve_mib=phase.curve_mib,
    )


def _show_stream(
    stream: StreamPlan,
    by_name: Mapping[str, Component],
    weights: dict[str, int],
    units: dict[str, str],
) -> None:
    """Adds a streamed phase's two allocations, the resident one by component, and what stays."""
    cycle = [by_name[name] for name in stream.components]
    all_units = _units(cycle)
    kept = [all_units[i] for i in stream.resident]
    for component in cycle:
        own = [unit for unit in kept if unit.component == component.name]
        weights[component.name] = sum(unit.n_bytes for unit in own) + _rest(component)
        units[component.name] = f"{len(own)}/{len(component.stream)}"
    last = cycle[-1].name
    weights[last] += segment_bytes(stream.resident_bytes) - stream.resident_bytes
    weights[f"{last} ring"] = segment_bytes(stream.ring_bytes)
    units[last] += f" + ring {stream.ring_bytes / MIB:.0f} MiB"
