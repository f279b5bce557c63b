"""Chooses where each unit of weights lies in each phase; deterministic, monotone in the budget.

Side models (text encoders, VAE, a refiner) either stay on the card for the whole picture or are
there only for their own phases. The denoiser is whole while it runs; in the other phases a prefix
of its units stays and the rest comes back before the next denoise. Among the placements that fit,
the one that moves the fewest bytes wins: bits never depend on it.
"""

from collections.abc import Iterator, Mapping
from itertools import product

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Phase, Plan
from sdx_accel.budget.profile import Component, JobProfile, PhaseProfile
from sdx_accel.budget.units import MIB, ceil_gib, to_gib

__all__ = ["SLACK_BYTES", "make_plan"]

# what the cap leaves for code that the driver loads lazily after the warm pass
SLACK_BYTES = 64 * MIB
# persistent small tensors (embeddings, latents, schedules): two 2 MiB segments and one of 20 MiB;
# another segment of 24 MiB that a UNet step on an H200 holds above the modelled ones
PERSISTENT_BYTES = 48 * MIB
# room above the modelled minimum of a phase that runs under allocator pressure
PRESSURE_SHARE, PRESSURE_BYTES = 0.02, 32 * MIB

# the denoiser moves for every picture, a text encoder only for a new prompt: at equal bytes the
# denoiser stays
DENOISER_WEIGHT = 1.1

Placement = dict[str, dict[str, int]]


def segment_bytes(n_bytes: int) -> int:
    """What torch reserves for one allocation of `n_bytes` on an empty cache."""
    if n_bytes <= MIB:
        return 2 * MIB if n_bytes else 0
    if n_bytes < 10 * MIB:
        return 20 * MIB
    return -(-n_bytes // (2 * MIB)) * 2 * MIB


def _weights(component: Component, n_units: int | None = None) -> int:
    units = component.units if n_units is None else component.units[:n_units]
    return sum(segment_bytes(unit.n_bytes) for unit in units)


def _need(phase: PhaseProfile) -> int:
    """Reserved bytes to plan for: without pressure in the step loop, with some elsewhere."""
    if phase.name in ("denoise", "refine"):
        return phase.reserved_bytes
    return min(
        phase.reserved_bytes,
        round(phase.smallest_bytes * (1 + PRESSURE_SHARE)) + PRESSURE_BYTES,
    )


def _base(machine: Machine) -> int:
    return segment_bytes(machine.blas_workspace_bytes) + PERSISTENT_BYTES


def _required(profile: JobProfile, phase: PhaseProfile) -> int:
    return sum(
        _weights(c)
        for c in profile.components
        if phase.name in c.phases and c.name not in phase.carries
    )


def _smallest_bytes(profile: JobProfile, machine: Machine) -> tuple[int, str]:
    """Smallest budget with everything out that a phase does not need, and the phase that binds."""
    outside = machine.non_torch_bytes + SLACK_BYTES + _base(machine)
    return max((outside + _required(profile, p) + _need(p), p.name) for p in profile.phases)


def _candidates(profile: JobProfile, limit: int) -> Iterator[tuple[float, int, Placement]]:
    """Placements within `limit` bytes of torch memory: cost, bytes moved a picture, placement."""
    denoiser = [c for c in profile.components if c.phases == ("denoise",)]
    sides = [c for c in profile.components if c.phases != ("denoise",)]
    for stay in product((True, False), repeat=len(sides)):
        placement: Placement = {
            p.name: {
                c.name: len(c.units)
                for c, always in zip(sides, stay, strict=True)
                if (always or p.name in c.phases) and c.name not in p.carries
            }
            for p in profile.phases
        }
        room = {
            p.name: limit
            - _need(p)
            - sum(_weights(c) for c in sides if c.name in placement[p.name])
            for p in profile.phases
        }
        away = [c for c, always in zip(sides, stay, strict=True) if not always]
        moved = sum(c.n_bytes for c in away)
        cost = sum(c.n_bytes * (DENOISER_WEIGHT if "refine" in c.phases else 1.0) for c in away)
        if "denoise" in room:
            room["denoise"] -= sum(_weights(c) for c in denoiser)
        if min(room.values()) < 0:
            continue
        spare = min((n for name, n in room.items() if name != "denoise"), default=0)
        for component in denoiser:
            kept = 0
            while kept < len(component.units):
                size = segment_bytes(component.units[kept].n_bytes)
                if size > spare:
                    break
                spare -= size
                kept += 1
            rest = sum(u.n_bytes for u in component.units[kept:])
            moved, cost = moved + rest, cost + rest * DENOISER_WEIGHT
            for phase in placement:
                placement[phase][component.name] = (
                    len(component.units) if phase == "denoise" else kept
                )
        yield cost, moved, placement


def make_plan(
    profile: JobProfile,
    machine: Machine,
    budget_bytes: int,
    *,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Place a job within a budget.

    Args:
        profile: the job's weights and activations.
        machine: the card.
        budget_bytes: driver-visible limit, CUDA context included.
        notes: sentences for the reader of the plan.

    Returns:
        A frozen `Plan`; `feasible` is False when no placement fits, and then `phases` shows what
        each phase would need with everything else moved out.
    """
    base = _base(machine)
    limit = budget_bytes - machine.non_torch_bytes - SLACK_BYTES - base
    best = min(_candidates(profile, limit), key=lambda found: found[0], default=None)
    if best is None:
        moved = sum(c.n_bytes for c in profile.components)
        placement: Placement = {
            p.name: {
                c.name: len(c.units)
                for c in profile.components
                if p.name in c.phases and c.name not in p.carries
            }
            for p in profile.phases
        }
    else:
        _, moved, placement = best
    smallest, binding = _smallest_bytes(profile, machine)
    return Plan(
        model=profile.model,
        job=dict(profile.job),
        machine=machine,
        budget_gib=to_gib(budget_bytes),
        feasible=best is not None,
        smallest_budget_gib=ceil_gib(smallest),
        binding_phase=binding,
        numerics=dict(profile.numerics),
        placement=placement,
        phases=tuple(
            _phase(profile, p, placement[p.name], machine, limit if best else None)
            for p in profile.phases
        ),
        moved_gib_per_picture=to_gib(moved),
        host_gib=to_gib(sum(c.n_bytes for c in profile.components)),
        notes=notes,
    )


def _phase(
    profile: JobProfile,
    phase: PhaseProfile,
    resident: Mapping[str, int],
    machine: Machine,
    limit: int | None,
) -> Phase:
    by_name = {c.name: c for c in profile.components}
    weights = {name: _weights(by_name[name], n) for name, n in resident.items() if n}
    activations = _need(phase)
    if limit is not None:
        activations = min(phase.reserved_bytes, limit - sum(weights.values()))
    peak = machine.non_torch_bytes + _base(machine) + sum(weights.values()) + activations
    return Phase(
        name=phase.name,
        predicted_peak_gib=to_gib(peak),
        resident_gib={name: to_gib(n) for name, n in weights.items()},
        resident_units={n: f"{k}/{len(by_name[n].units)}" for n, k in resident.items() if k},
        activations_gib=to_gib(activations),
        curve_mib=phase.curve_mib,
    )
