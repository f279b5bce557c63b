"""Streaming as arithmetic: what stays, what passes through the ring, and how long a pass takes."""

import json
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import pytest

from sdx_accel.budget import streaming
from sdx_accel.budget.advice import advice
from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Plan, StreamPlan
from sdx_accel.budget.profile import Component, JobProfile, PhaseProfile, StreamUnit, Unit
from sdx_accel.budget.search import make_plan
from sdx_accel.budget.streaming import (
    best_stream,
    even_ring,
    largest_streamed,
    pick_even,
    ring_bytes,
    ring_layout,
    seconds_of,
    simulate,
    smallest_room,
)
from sdx_accel.budget.units import GIB, MIB
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.profiler import Job, profile_job

GENERIC = Machine.generic()
# an H200 whose UNet step takes 57 ms
H200 = replace(GENERIC, link_bytes_per_s=50e9, flops_per_s=237e12)
# (operations a second, link): computing binds, both bind, the link binds, a slow card
SPEEDS = [(25e12, 25e9), (237e12, 50e9), (237e12, 12e9), (10e12, 3e9)]


@pytest.fixture(scope="module")
def sdxl() -> JobProfile:
    description = architecture("random:sdxl-fp16vae")
    dtypes = dict.fromkeys(description.components, "float16")
    return profile_job(description, Job(1024, 1024, bands="low", text_kv=True), dtypes)


@pytest.fixture(scope="module")
def units(sdxl: JobProfile) -> tuple[StreamUnit, ...]:
    return next(c for c in sdxl.components if c.name == "unet").stream


def _plan(profile: JobProfile, gib: float, machine: Machine = GENERIC, **more: Any) -> Plan:
    return make_plan(profile, machine, round(gib * GIB), **more)


def _at(speed: tuple[float, float]) -> Machine:
    return replace(GENERIC, flops_per_s=speed[0], link_bytes_per_s=speed[1])


def _total(units: tuple[StreamUnit, ...], streamed: frozenset[int]) -> int:
    return sum(units[i].n_bytes for i in streamed)


@pytest.mark.parametrize("speed", SPEEDS)
def test_ring_formula_holds_in_the_simulator(
    units: tuple[StreamUnit, ...], speed: tuple[float, float]
) -> None:
    machine = _at(speed)
    seconds, link = seconds_of(units, machine), machine.link_bytes_per_s
    everything = sum(unit.n_bytes for unit in units)
    tried = 0
    for share in (0.15, 0.3, 0.5, 0.7, 0.9):
        streamed = pick_even(units, seconds, everything * share, "bytes")
        total = _total(units, streamed)
        rounds = total // ring_bytes(units, seconds, streamed, link)
        if rounds < 2:
            continue  # such a ring would hold all of it
        layout = ring_layout(units, streamed, even_ring(units, streamed, rounds))
        took = simulate(units, seconds, streamed, layout, link)
        assert took <= 1.015 * max(sum(seconds), total / link)
        tried += 1
    assert tried >= 3


def _occupied(
    units: tuple[StreamUnit, ...],
    seconds: list[float],
    layout: dict[int, int],
    link: float,
    passes: int,
) -> tuple[list[tuple[float, float, int, int]], list[float]]:
    """(from, to, first byte, last byte) of each use of the ring, and the end of each pass.

    Written against the rule itself: a copy waits for every earlier use of any byte of its place.
    """
    used: list[tuple[float, float, int, int]] = []
    ends, copied, computed = [], 0.0, 0.0
    for _ in range(passes):
        for index, busy in enumerate(seconds):
            if index in layout:
                first, last = layout[index], layout[index] + units[index].n_bytes
                free = [to for _, to, a, b in used if a < last and first < b]
                begin = max([copied, *free])
                copied = begin + units[index].n_bytes / link
                computed = max(computed, copied) + busy
                used.append((begin, computed, first, last))
            else:
                computed += busy
        ends.append(computed)
    return used, ends


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize(("by", "rounds"), [("time", 9), ("bytes", 9), ("bytes", 1000)])
def test_layout_never_overlaps_two_live_units(
    units: tuple[StreamUnit, ...],
    speed: tuple[float, float],
    by: Literal["time", "bytes"],
    rounds: int,
) -> None:
    machine = _at(speed)
    seconds, link = seconds_of(units, machine), machine.link_bytes_per_s
    streamed = pick_even(units, seconds, 2 * GIB, by)
    # at 1000 the ring is as large as the largest unit: most are alone in it
    ring = even_ring(units, streamed, rounds)
    layout = ring_layout(units, streamed, ring)
    assert set(layout) == streamed
    assert all(offset % 512 == 0 for offset in layout.values())
    assert all(at >= 0 and at + units[i].n_bytes <= ring for i, at in layout.items())
    tight = max(units[i].n_bytes for i in streamed)
    assert set(ring_layout(units, [i for i in streamed if units[i].n_bytes == tight], tight)
               .values()) == {0}  # fmt: skip
    used, ends = _occupied(units, seconds, layout, link, 3)
    for at, (begin, end, first, last) in enumerate(used):
        for other_begin, other_end, a, b in used[:at]:
            assert not (a < last and first < b and begin < other_end and other_begin < end)
    took = simulate(units, seconds, streamed, layout, link, passes=3)
    assert took == pytest.approx(ends[-1] - ends[-2], rel=1e-9)


@pytest.mark.parametrize("speed", SPEEDS)
def test_never_under_the_bound(units: tuple[StreamUnit, ...], speed: tuple[float, float]) -> None:
    machine = _at(speed)
    computing = sum(seconds_of(units, machine))
    found = [
        best_stream("denoise", units, machine, eighth * GIB // 8) for eighth in range(2, 34, 2)
    ]
    assert all(found)
    for stream in found:
        assert stream is not None
        assert stream.streamed_bytes == sum(units[i].n_bytes for i, _ in stream.slots)
        bound = max(computing, stream.streamed_bytes / machine.link_bytes_per_s)
        assert stream.seconds >= stream.bound_seconds - 2e-6
        assert stream.bound_seconds == pytest.approx(bound, abs=1e-6)
        assert stream.seconds < 1.25 * bound


@pytest.mark.parametrize("factor", [1.3, 1.7, 2.0, 2.3])
def test_a_card_faster_than_was_seen_loses_little(
    units: tuple[StreamUnit, ...], factor: float
) -> None:
    """An H200's host launches a step in 97 ms; as one CUDA graph it takes 42 (docs/benchmarks)."""
    flops, link = sum(unit.flops for unit in units) / 97e-3, 55e9
    quick = seconds_of(units, _at((flops * factor, link)))

    def seconds(plan: StreamPlan) -> float:
        slots = dict(plan.slots)
        return simulate(units, quick, set(slots), slots, link)

    choices = streaming._all(units, _at((flops, link)), 0)
    for tenth in range(8, 40, 4):
        room = tenth * GIB // 10
        plan = best_stream("denoise", units, _at((flops, link)), room)
        assert plan is not None
        best = min(seconds(choice.plan) for choice in choices if choice.room_bytes <= room)
        assert seconds(plan) <= 1.03 * best, tenth


def test_the_search_tries_a_bounded_number_of_choices(
    units: tuple[StreamUnit, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    real = streaming.simulate
    monkeypatch.setattr(streaming, "simulate", lambda *a: runs.append(1) or real(*a))
    # a speed that no other test asks for
    machine = _at((33e12, 11e9))
    for quarter in range(2, 17):
        best_stream("denoise", units, machine, quarter * GIB // 4)
    # each at the speed that was seen and at twice that
    assert 200 < len(runs) <= 600


def test_the_least_room_is_the_edge(units: tuple[StreamUnit, ...]) -> None:
    least = smallest_room(units, GENERIC)
    assert least is not None
    assert best_stream("denoise", units, GENERIC, least) is not None
    assert best_stream("denoise", units, GENERIC, least - 1) is None


def _unit(component: str, index: int, n_bytes: int, flops: float = 1e9) -> StreamUnit:
    return StreamUnit(f"{component}.{index}", component, index, 0, n_bytes, flops)


def test_a_unit_that_is_too_large_stays() -> None:
    cycle = [_unit("unet", i, size * MIB) for i, size in enumerate((120, 30, 40, 30, 40, 30))]
    stream = best_stream("denoise", cycle, GENERIC, 300 * MIB, rest_bytes=7 * MIB)
    assert stream is not None
    assert 0 in stream.resident
    assert stream.resident_bytes + stream.streamed_bytes == (290 + 7) * MIB
    assert stream.ring_bytes < 120 * MIB
    assert best_stream("denoise", cycle, GENERIC, 150 * MIB) is None


def test_large_units_pass_where_that_takes_less() -> None:
    # 120 + 2·40 is less than 2·120; 3·120 + 2·40 is not
    sizes = ((120, 40, 30, 40), (120, 40, 120, 30, 120, 40) * 4)
    few, many = ([_unit("unet", i, n * MIB) for i, n in enumerate(s)] for s in sizes)
    assert largest_streamed(few) == 40 * MIB
    assert largest_streamed(many) == 120 * MIB
    assert best_stream("denoise", many, GENERIC, 300 * MIB) is not None


def test_what_saves_nothing_is_not_streamed() -> None:
    assert best_stream("denoise", [_unit("unet", 0, 50 * MIB)], GENERIC, 40 * MIB) is None
    assert best_stream("denoise", (), GENERIC, GIB) is None
    assert smallest_room((), GENERIC) is None


def test_streamed_units_are_spread_evenly(units: tuple[StreamUnit, ...]) -> None:
    seconds = seconds_of(units, GENERIC)
    shares = {"time": seconds, "bytes": [float(unit.n_bytes) for unit in units]}

    def lag(picked: frozenset[int], over: str) -> float:
        """How far the streamed bytes are from growing evenly over time or bytes, in MiB."""
        done = list(accumulate(shares[over]))
        total, worst = 0.0, 0.0
        for index, reached in enumerate(done):
            total += units[index].n_bytes if index in picked else 0
            worst = max(worst, abs(total - GIB * reached / done[-1]))
        return worst / MIB

    by_time, by_bytes = (pick_even(units, seconds, GIB, by) for by in ("time", "bytes"))
    for picked in (by_time, by_bytes):
        assert abs(_total(units, picked) - GIB) < 100 * MIB
    assert lag(by_bytes, "bytes") < 100
    # there are few weights where the picture is large: no choice is even over time
    assert lag(by_time, "time") < 0.8 * lag(by_bytes, "time")
    assert lag(by_time, "bytes") > lag(by_bytes, "bytes")


# -- plans of SDXL


def test_monotone_2_to_24_in_quarters(sdxl: JobProfile) -> None:
    for machine in (GENERIC, H200):
        plans = [_plan(sdxl, quarter / 4, machine) for quarter in range(8, 97)]
        assert all(plan.feasible for plan in plans)
        assert all(plan.predicted_peak_gib <= plan.budget_gib for plan in plans)
        steps = [plan.seconds_per_step for plan in plans]
        assert steps == sorted(steps, reverse=True)
        pictures = [
            20 * plan.seconds_per_step + plan.moved_gib_per_picture * GIB / machine.link_bytes_per_s
            for plan in plans
        ]
        assert all(b <= a + 1e-4 for a, b in pairwise(pictures))
    assert steps[0] > 1.5 * steps[-1]


def test_a_streamed_denoise_is_two_allocations(sdxl: JobProfile) -> None:
    plan = _plan(sdxl, 4)
    assert plan.feasible
    stream = plan.stream("denoise")
    assert stream is not None
    assert plan.placement["denoise"] == {"unet": 0}
    assert "unet" not in plan.placement["decode"]
    assert plan.text_kv
    assert plan.seconds_per_step == stream.seconds
    denoise = plan.phase("denoise")
    assert denoise is not None
    held = (stream.resident_bytes + stream.ring_bytes) / GIB
    assert sum(denoise.resident_gib.values()) == pytest.approx(held, abs=0.005)
    assert denoise.resident_gib["unet ring"] == pytest.approx(stream.ring_bytes / GIB, abs=0.003)
    unet = next(c for c in sdxl.components if c.name == "unet")
    text = sum(unit.n_bytes for unit in unet.units[-unet.text_chunks :])
    assert stream.resident_bytes + stream.streamed_bytes + text == unet.n_bytes


def _advised(profile: JobProfile, gib: float, machine: Machine) -> str:
    plan = _plan(profile, gib, machine)
    words = advice(lambda budget: make_plan(profile, machine, budget), plan)
    return replace(plan, advice=words).explain()


def test_the_plan_says_what_streams_and_what_binds(sdxl: JobProfile) -> None:
    said, plan = _advised(sdxl, 2, GENERIC), _plan(sdxl, 2)
    stream = plan.stream("denoise")
    assert stream is not None
    assert f"denoise streams {stream.streamed_bytes / GIB:.2f} GiB a step over 12 GB/s" in said
    assert f"{stream.seconds:.3g} s a step, bound {stream.bound_seconds:.3g} s" in said
    assert f"ring {stream.ring_bytes / MIB:.0f} MiB" in said
    assert "text streams" in said
    assert "binds: computing" in said
    assert "GiB less to copy a step, which is no faster" in said
    assert f"smallest budget that works: {plan.smallest_budget_gib:.2f} GiB" in said
    fast = _advised(sdxl, 2, H200)
    assert "binds: the link" in fast
    gain = _plan(sdxl, 2, H200).seconds_per_step - _plan(sdxl, 2.5, H200).seconds_per_step
    assert f"0.5 GiB more: {gain * 1000:.1f} ms less a step" in fast
    assert "nothing: all weights stay" in _advised(sdxl, 24, GENERIC)
    assert "binds: the memory of" in _advised(sdxl, 7, GENERIC)
    assert "binds" not in _advised(sdxl, 1, GENERIC)


def test_two_gib_fit(sdxl: JobProfile) -> None:
    plan = _plan(sdxl, 2)
    assert plan.feasible
    assert {stream.phase for stream in plan.streams} == {"text", "denoise"}


def test_the_smallest_budget_is_the_edge(sdxl: JobProfile) -> None:
    smallest = _plan(sdxl, 8).smallest_budget_gib
    assert smallest < 2
    assert _plan(sdxl, smallest).feasible
    assert not _plan(sdxl, smallest - 0.06).feasible
    assert _plan(sdxl, smallest - 0.06).smallest_budget_gib == smallest


def test_six_gib_on_an_h200_costs_at_most_3_percent(sdxl: JobProfile) -> None:
    alone = _plan(sdxl, 24, H200).seconds_per_step
    assert alone == pytest.approx(0.057, abs=0.001)
    assert _plan(sdxl, 6, H200).seconds_per_step <= 1.03 * alone
    assert _plan(sdxl, 2, H200).seconds_per_step > 1.03 * alone


def test_eight_gib_does_not_stream(sdxl: JobProfile) -> None:
    for gib in (8, 12, 24):
        plan = _plan(sdxl, gib)
        assert plan.feasible
        assert not plan.streams
        # no copies for a new prompt that the plain placement would not need
        assert not plan.text_kv
    plain = replace(
        sdxl, components=tuple(replace(c, text_chunks=0, stream=()) for c in sdxl.components)
    )
    assert _plan(plain, 8).placement == _plan(sdxl, 8).placement


def test_kept_text_makes_a_whole_denoiser_fit(sdxl: JobProfile) -> None:
    plan = _plan(sdxl, 6)
    unet = next(c for c in sdxl.components if c.name == "unet")
    assert plan.text_kv
    assert not plan.streams
    assert plan.placement["denoise"]["unet"] == len(unet.units) - unet.text_chunks
    assert max(p["unet"] for p in plan.placement.values()) <= len(unet.units) - unet.text_chunks
    assert "computed once for each new prompt" in plan.explain()


def test_same_inputs_same_plan(sdxl: JobProfile) -> None:
    first = _plan(sdxl, 3)
    streaming._choices.cache_clear()
    assert _plan(sdxl, 3) == first
    assert _plan(sdxl, 3).digest == first.digest
    assert _plan(sdxl, 3, H200).digest != first.digest


def test_json_round_trip_with_streams(sdxl: JobProfile) -> None:
    plan = _plan(sdxl, 2)
    assert len(plan.streams) == 2
    assert Plan.from_json(plan.to_json()) == plan
    values = json.loads(plan.to_json())
    assert {s["phase"] for s in values["streams"]} == {"text", "denoise"}


def test_floors_never_make_a_plan_larger(sdxl: JobProfile) -> None:
    for gib in (2.5, 3, 4, 8):
        free, raised = (_plan(sdxl, gib, floors=floors) for floors in ({}, {"denoise": 300 * MIB}))
        assert raised.feasible
        assert raised.predicted_peak_gib <= gib
        assert raised.smallest_budget_gib >= free.smallest_budget_gib
        if free.stream("denoise") is None:
            continue
        sizes = [_held(plan.stream("denoise")) for plan in (free, raised)]
        assert sizes[1] <= sizes[0]
        assert raised.seconds_per_step >= free.seconds_per_step
    impossible = _plan(sdxl, 2.5, floors={"denoise": 2 * GIB})
    assert not impossible.feasible
    assert impossible.binding_phase == "denoise"


def _held(stream: StreamPlan | None) -> int:
    assert stream is not None
    return stream.resident_bytes + stream.ring_bytes


def test_too_little_host_memory_is_its_own_reason(sdxl: JobProfile) -> None:
    plan = _plan(sdxl, 8, ram=4 * GIB)
    assert not plan.feasible
    assert plan.binding_phase == "host memory"
    assert "6.46 GiB of host memory, 4.00 GiB are allowed" in plan.explain()
    assert _plan(sdxl, 8, ram=7 * GIB).feasible
    assert _plan(sdxl, 8, replace(GENERIC, ram_bytes=4 * GIB)).binding_phase == "host memory"
    assert Plan.from_json(plan.to_json()) == plan


def test_what_cannot_be_pinned_is_slower_and_said(sdxl: JobProfile) -> None:
    pinned = _plan(sdxl, 3, replace(H200, pinnable_bytes=64 * GIB))
    windows = _plan(sdxl, 3, replace(H200, pinnable_bytes=GIB))
    assert windows.seconds_per_step > 2 * pinned.seconds_per_step
    assert any("only 1.00 GiB of host memory can be pinned" in note for note in windows.notes)
    assert not any("pinned" in note for note in pinned.notes)


# -- cycles of several models


def _job(*components: Component, need: int = 100 * MIB) -> JobProfile:
    phases = tuple(
        PhaseProfile(name, ((1, 0, need), (-1, 0, need)), (need / MIB,))
        for name in ("text", "denoise", "decode")
        if any(name in c.phases for c in components)
    )
    return JobProfile("made up", {"guided": True}, {"unet": "float16"}, components, phases)


def _model(name: str, sizes: list[int], phase: str = "denoise", rest: int = 0) -> Component:
    stream = tuple(_unit(name, i, size * MIB) for i, size in enumerate(sizes))
    units = [Unit(f"{name}.{i}", size * MIB) for i, size in enumerate(sizes)]
    return Component(name, (*units, Unit("rest", rest)), (phase,), stream)


def test_a_controlnet_runs_before_the_unet_in_the_cycle() -> None:
    unet, guide = _model("unet", [40] * 20, rest=3 * MIB), _model("controlnet", [30] * 10)
    plan = _plan(_job(unet, guide), 1.5)
    stream = plan.stream("denoise")
    assert stream is not None
    assert stream.components == ("controlnet", "unet")
    assert stream.resident_bytes + stream.streamed_bytes == (1100 + 3) * MIB
    assert plan.placement["denoise"] == {"controlnet": 0, "unet": 0}
    denoise = plan.phase("denoise")
    assert denoise is not None
    assert set(denoise.resident_gib) == {"controlnet", "unet", "unet ring"}
    kept = {c.name: sum(i in stream.resident for i in range(*span)) for c, span in
            ((guide, (0, 10)), (unet, (10, 30)))}  # fmt: skip
    assert denoise.resident_units["controlnet"] == f"{kept['controlnet']}/10"
    assert denoise.resident_units["unet"].startswith(f"{kept['unet']}/20 + ring ")


def test_a_model_that_cannot_be_streamed_stays_whole_in_its_phase() -> None:
    image = replace(_model("image_encoder", [90, 90], "text"), stream=())
    encoder = _model("text_encoder", [40] * 20, "text")
    profile = _job(image, encoder, _model("unet", [10]))
    plan = _plan(profile, 1.3)
    assert plan.feasible
    assert plan.placement["text"] == {"image_encoder": 3, "text_encoder": 0}
    stream = plan.stream("text")
    assert stream is not None
    # the negative prompt is a pass of its own
    moved = sum(c.n_bytes for c in profile.components) + stream.streamed_bytes
    assert plan.moved_gib_per_picture == pytest.approx(moved / GIB, abs=1e-3)
    # the denoiser has no units that anything is known of: no time is promised
    blind = replace(profile, components=(image, encoder, replace(_model("unet", [10]), stream=())))
    assert _plan(blind, 2).seconds_per_step == 0
    assert "a step takes" not in _plan(blind, 2).explain()


def test_projections_apart_are_only_streamed_around_when_they_are_kept() -> None:
    unet = replace(_model("unet", [40] * 20), text_chunks=1)
    text = replace(unet, units=(*unet.units[:-1], Unit("text", 200 * MIB)), kv_bytes=20 * MIB)
    plan = _plan(_job(text), 1.3)
    assert plan.feasible
    assert plan.text_kv
    stream = plan.stream("denoise")
    assert stream is not None
    assert stream.resident_bytes + stream.streamed_bytes == 800 * MIB
