"""The planner: held limits, monotone, deterministic, honest about what does not fit."""

import json
import math

import pytest

import sdx_accel
from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Plan
from sdx_accel.budget.search import make_plan
from sdx_accel.budget.units import GIB
from sdx_accel.errors import RefusedError
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.profiler import Job, profile_job

SDXL_UNITS_GIB = 4.782


@pytest.fixture(scope="module")
def sdxl():
    description = architecture("random:sdxl")
    dtypes = dict.fromkeys(description.components, "float16")
    return profile_job(description, Job(1024, 1024), dtypes)


def _plan(profile, gib):
    return make_plan(profile, Machine.generic(), round(gib * GIB))


def test_weights_are_counted_to_the_byte(sdxl):
    sizes = {c.name: c.n_bytes for c in sdxl.components}
    exact = {
        "unet": 2_567_463_684,
        "text_encoder": 123_060_480,
        "text_encoder_2": 694_659_840,
        "vae": 83_653_863,
    }
    for name, parameters in exact.items():
        # tensors are aligned to 512 bytes and position ids come on top
        assert 2 * parameters <= sizes[name] < 2 * parameters * 1.001


def test_predictions_never_exceed_the_budget_case_109(sdxl):
    for quarter in range(8, 97):
        plan = _plan(sdxl, quarter / 4)
        if plan.feasible:
            assert plan.predicted_peak_gib <= plan.budget_gib


def test_more_budget_is_never_worse(sdxl):
    plans = [_plan(sdxl, quarter / 4) for quarter in range(8, 97)]
    feasible = [plan.feasible for plan in plans]
    assert feasible == sorted(feasible)
    moved = [plan.moved_gib_per_picture for plan in plans if plan.feasible]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0


def test_the_smallest_budget_is_the_edge(sdxl):
    smallest = _plan(sdxl, 4).smallest_budget_gib
    assert _plan(sdxl, smallest).feasible
    assert not _plan(sdxl, smallest - 0.06).feasible


def test_eight_gibibytes_keep_the_whole_unet_through_the_denoise(sdxl):
    plan = _plan(sdxl, 8)
    assert plan.feasible
    denoise = plan.phase("denoise")
    assert denoise is not None
    assert denoise.resident_gib["unet"] >= SDXL_UNITS_GIB
    decode = plan.phase("decode")
    assert decode is not None
    assert decode.resident_gib["unet"] < SDXL_UNITS_GIB
    assert plan.numerics["vae_mode"] == "whole picture"


def test_same_inputs_same_plan(sdxl):
    assert _plan(sdxl, 7) == _plan(sdxl, 7)
    assert _plan(sdxl, 7).digest == _plan(sdxl, 7).digest
    assert _plan(sdxl, 7).digest != _plan(sdxl, 7.25).digest


def test_json_has_the_published_names_and_comes_back_equal(sdxl):
    plan = _plan(sdxl, 8)
    values = json.loads(plan.to_json())
    assert {"budget_gib", "feasible", "smallest_budget_gib", "phases", "numerics"} <= set(values)
    assert [phase["name"] for phase in values["phases"]] == ["text", "denoise", "decode"]
    for phase in values["phases"]:
        assert {"name", "predicted_peak_gib", "resident_gib"} <= set(phase)
    assert Plan.from_json(plan.to_json()) == plan


def test_four_gib_streams():
    plan = sdx_accel.plan("random:sdxl", vram=4, machine=Machine.generic())
    assert plan.feasible
    stream = plan.stream("denoise")
    assert stream is not None
    assert plan.seconds_per_step == stream.seconds
    assert plan.predicted_peak_gib <= 4
    assert "denoise streams" in plan.explain()
    assert "0.5 GiB more" in plan.explain()
    # the decode has the card to itself, in bands since it is in fp32
    assert plan.placement["decode"] == {}
    assert "bands" in plan.numerics["vae_mode"]


def test_two_gib_do_not_hold_an_fp32_decode():
    plan = sdx_accel.plan("random:sdxl", vram=2, machine=Machine.generic())
    assert not plan.feasible
    assert plan.shortfall().startswith("decode does not fit in 2.00 GiB")
    assert 2.2 < plan.smallest_budget_gib < 2.6
    # what is shown of each phase is the least that it can do with
    assert all(p.predicted_peak_gib <= plan.smallest_budget_gib for p in plan.phases)


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_that_works(sdxl):
    plan = _plan(sdxl, 4)
    assert not plan.feasible
    assert f"{plan.smallest_budget_gib:.2f} GiB" in plan.shortfall()
    assert "MiB short" in plan.shortfall()
    assert "DOES NOT FIT" in plan.explain()


def test_two_phases_decide_alone(sdxl):
    # everything out of the way: what remains is the phase's own need
    plan = _plan(sdxl, 4)
    for phase in plan.phases:
        assert phase.predicted_peak_gib <= plan.smallest_budget_gib


def test_exact_never_tiles_and_near_tiles_below_the_picture():
    job = {"height": 640, "width": 640, "machine": Machine.generic()}
    smallest = sdx_accel.plan("random:sdxl-tiny", vram=8, **job).smallest_budget_gib
    exact = sdx_accel.plan("random:sdxl-tiny", vram=smallest - 0.1, **job)
    near = sdx_accel.plan("random:sdxl-tiny", vram=smallest - 0.1, quality="near", **job)
    assert not exact.feasible
    assert exact.job["tile"] is None
    assert near.feasible
    assert near.job["tile"] is not None
    assert near.job["tile"] < 640
    assert "tiles" in near.numerics["vae_mode"]


def test_near_leaves_the_picture_whole_where_it_fits():
    # also after a tiled plan: the traced module is shared
    for _ in range(2):
        plan = sdx_accel.plan("random:sdxl-tiny", vram=8, quality="near", machine=Machine.generic())
        assert plan.job["tile"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quality": "fast"}, "exact, near"),
        ({"quality": "best"}, "exact, near"),
        ({"dtype": "fp8"}, "fp16"),
        ({"vram": "much"}, "budget"),
        ({"vram": "auto"}, "GPU"),
        ({"height": 65}, "64 or 72"),
        ({"height": 0}, "nearest: 8"),
        ({"width": -8}, "nearest: 8"),
        ({"batch": 0}, "at least 1"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(RefusedError, match=message):
        sdx_accel.plan("random:sdxl-tiny", machine=Machine.generic(), **arguments)


def test_a_busy_card_lowers_the_budget_and_the_plan_says_so():
    generic = Machine.generic()
    desktop = Machine(
        "8 GB card", 8 * GIB, round(6.9 * GIB), generic.non_torch_bytes, 12e9, 8 << 20, "measured"
    )
    plan = sdx_accel.plan("random:sdxl", vram=8, machine=desktop)
    assert plan.budget_gib < 6.91
    assert any("8.00 GiB asked" in note for note in plan.notes)


def test_the_verb_says_what_host_memory_would_do_case_105(cli):
    tight = cli("plan", "--model", "random:sdxl-tiny", "--vram", 8, "--ram", 0.001)
    assert tight.code == 1
    assert "of host memory, 0.00 GiB are allowed" in tight.out
    refused = cli("generate", "a cat", "--model", "random:sdxl-tiny", "--ram", 0.001)
    assert refused.code == 2
    assert "Use --ram 0.0" in refused.err
    assert "--vram" not in refused.err


@pytest.mark.parametrize("gib", [0.7, 0.72, 0.73, 0.75, 0.77])
def test_a_refusal_agrees_with_its_own_table(gib):
    plan = sdx_accel.plan("demo", vram=gib, machine=Machine.generic())
    assert not plan.feasible
    values = json.loads(plan.to_json())
    highest = max(values["phases"], key=lambda phase: phase["predicted_peak_gib"])
    margin = values["margin_gib"]
    assert margin == 0.0625
    missing = math.ceil((highest["predicted_peak_gib"] + margin - gib) * 1024 + 0.1)
    assert plan.shortfall() == (
        f"{highest['name']} does not fit in {gib:.2f} GiB: it takes "
        f"{highest['predicted_peak_gib']:.2f} GiB, and 64 MiB stay free for code that the driver "
        f"loads later: {missing} MiB short; the smallest budget that works is 0.80 GiB"
    )
    # what is short is what has to be added, not the next figure that is round
    assert sdx_accel.plan("demo", vram=gib + missing / 1024, machine=Machine.generic()).feasible
    less = sdx_accel.plan("demo", vram=gib + (missing - 2) / 1024, machine=Machine.generic())
    assert not less.feasible


@pytest.mark.parametrize("gib", [2, 2.5, 4])
def test_the_same_of_sdxl_where_phases_stream(sdxl, gib):
    plan = _plan(sdxl, gib)
    assert not plan.feasible
    missing = int(plan.shortfall().split(" MiB short")[0].split()[-1])
    assert _plan(sdxl, gib + missing / 1024).feasible
    assert not _plan(sdxl, gib + (missing - 2) / 1024).feasible
