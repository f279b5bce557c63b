"""Plans of a held pipeline change with what is learned, refused, and taken by others."""

from dataclasses import replace

import pytest
import torch

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.units import GIB, MIB, parse_vram
from sdx_accel.errors import RefusedError, WorkError
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.enforce import PhaseRecord
from sdx_accel.runtime.host_memory import HostLimits, parse_ram
from sdx_accel.runtime.meta_models import describe_pipeline
from sdx_accel.runtime.phase_calls import Job
from sdx_accel.runtime.pipeline_parts import pipeline_models
from sdx_accel.runtime.recovery import Retry
from sdx_accel.runtime.session_plans import Place, Planner, Terms
from sdx_accel.runtime.stream_order import order_of

JOB = Job(64, 64)
CARD = replace(Machine.generic(), name="card", total_bytes=8 * GIB, free_bytes=8 * GIB)


@pytest.fixture(scope="module")
def loaded():
    pipe = load("random:sdxl-tiny", dtype="fp32")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def parts(loaded):
    return describe_pipeline(loaded), pipeline_models(loaded)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SDX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def planner(parts):
    def make(vram="4", free_now=None, disturbed=None, **terms):
        place = Place(CARD, "key", free_now, disturbed)
        return Planner(Terms(parse_vram(vram), **terms), place, *parts)

    return make


def _took(plan, more):
    """A record of each phase as if it had taken `more` bytes more than was predicted."""
    return [
        PhaseRecord(phase.name, phase.predicted_peak_gib, phase.predicted_peak_gib + more / GIB)
        for phase in plan.phases
    ]


def test_learned_peaks_raise_the_next_plan(planner):
    first = planner()
    plan = first.plan(JOB)
    assert plan.machine.history == ""
    assert first.plan(JOB) is plan
    first.learn(JOB, plan, _took(plan, 30 * MIB))
    for later in (first.plan(JOB), planner().plan(JOB)):
        for phase in plan.phases:
            more = later.phase(phase.name).predicted_peak_gib - phase.predicted_peak_gib
            assert 30 * MIB <= more * GIB + 0.1 * MIB <= 33 * MIB
    # another size has taken nothing yet
    other = Job(64, 128)
    assert planner().plan(other) == planner(learn=False).plan(other)


def test_history_digest_is_in_the_plan(planner):
    plan = planner().plan(JOB)
    planner().learn(JOB, plan, _took(plan, 30 * MIB))
    once = planner().plan(JOB)
    assert len(once.machine.history) == 12
    assert f"learned peaks {once.machine.history}" in once.explain()
    assert once == planner().plan(JOB)
    assert once.digest != plan.digest
    planner().learn(JOB, once, _took(once, 2 * MIB))
    assert planner().plan(JOB).machine.history not in ("", once.machine.history)


def test_no_learn(planner):
    plan = planner().plan(JOB)
    off = planner(learn=False)
    off.learn(JOB, plan, _took(plan, 30 * MIB))
    assert planner().plan(JOB) == plan
    planner().learn(JOB, plan, _took(plan, 30 * MIB))
    assert planner(learn=False).plan(JOB) == plan


def test_a_record_is_learned_from_once(planner):
    held = planner()
    plan = held.plan(JOB)
    records = _took(plan, 30 * MIB)
    held.learn(JOB, plan, records)
    once = held.plan(JOB)
    # a phase that did not run again leaves its record in the books
    held.learn(JOB, once, records)
    assert held.plan(JOB) == once


def test_nothing_is_learned_beside_a_program_that_cannot_be_told_apart(planner):
    plan = planner().plan(JOB)
    planner(disturbed=lambda: True).learn(JOB, plan, _took(plan, 30 * MIB))
    assert planner().plan(JOB) == plan
    planner(disturbed=lambda: False).learn(JOB, plan, _took(plan, 30 * MIB))
    assert planner().plan(JOB) != plan


def test_what_ran_is_not_refused_for_what_it_took(planner):
    smallest = planner("7").plan(JOB).smallest_budget_gib
    tight = planner(str(smallest))
    plan = tight.plan(JOB)
    assert plan.feasible
    for _ in range(3):
        tight.learn(JOB, plan, _took(plan, 400 * MIB))
        again = planner(str(smallest)).plan(JOB)
        assert again.feasible
        assert again.machine.history == ""
    # nor does a figure that plans leave out grow from run to run
    assert planner("7").plan(JOB).predicted_peak_gib < plan.predicted_peak_gib + 0.5


def test_refused_memory_is_spared_as_long_as_the_session_lasts(planner):
    held = planner()
    plan = held.plan(JOB)
    spared = held.spare(JOB, "decode", 100 * MIB)
    more = spared.phase("decode").predicted_peak_gib - plan.phase("decode").predicted_peak_gib
    assert more * GIB == pytest.approx(100 * MIB, abs=3 * MIB)
    assert held.plan(JOB) is spared
    assert held.spare(JOB, "decode", 100 * MIB).predicted_peak_gib > spared.predicted_peak_gib
    assert planner().plan(JOB) == plan


def test_more_than_there_is_is_not_spared(planner):
    held = planner()
    plan = held.plan(JOB)
    assert not held.spare(JOB, "decode", 100 * GIB).feasible
    assert held.plan(JOB) is plan


def test_other_programs_change_the_budget_between_pictures(planner, caplog):
    free = [8 * GIB]
    held = planner("6", lambda: free[0])
    plan = held.plan(JOB)
    assert plan.budget_gib == 6

    def look(gib):
        free[0] = round(gib * GIB)
        held.look()
        return held.plan(JOB)

    with caplog.at_level("INFO", logger="sdx_accel"):
        assert look(6.5) is plan
        smaller = look(5.5)
        assert smaller.budget_gib == 5.5
        assert "5.50 GiB can be held beside other programs" in smaller.explain()
        # swings of 200 MiB: still that one
        assert all(look(5.7 + swing) is smaller for swing in (0.2, -0.2, 0.2, -0.2))
        assert look(8) is plan
    assert len([r for r in caplog.records if "free memory has changed" in r.message]) == 2


def test_a_request_for_what_is_free_keeps_its_distance(parts):
    free = [5 * GIB]
    place = Place(CARD, "key", lambda: free[0]).as_now()
    held = Planner(Terms(parse_vram("-2")), place, *parts)

    def look(gib):
        free[0] = gib * GIB
        held.look()
        return held.plan(JOB).budget_gib

    assert held.plan(JOB).budget_gib == 3
    assert look(4) == 2
    # more than there was when the terms were accepted
    assert look(8) == 6


def test_new_terms_are_planned_with_what_is_free_then(parts):
    place = Place(CARD, "key", lambda: 5 * GIB).as_now()
    assert Planner(Terms(parse_vram("-1")), place, *parts).plan(JOB).budget_gib == 4
    assert Place(CARD).as_now().machine == CARD


def test_ram_is_resolved_when_asked(planner, monkeypatch):
    monkeypatch.setattr(
        "sdx_accel.runtime.session_plans.limits", lambda: HostLimits(8 * GIB, 4 * GIB)
    )
    assert planner(ram=parse_ram("2")).plan(JOB).feasible
    short = planner(ram=parse_ram("0.001")).plan(JOB)
    assert not short.feasible
    assert short.binding_phase == "host memory"
    assert (
        "host memory: 16.00 GiB asked, 4.00 GiB free"
        in planner(ram=parse_ram("16")).plan(JOB).explain()
    )
    with pytest.raises(RefusedError, match="--ram"):
        planner(ram=parse_ram("-5"))


def test_a_changed_model_is_planned_anew(planner, parts):
    held = planner()
    plan = held.plan(JOB)
    description, _ = parts
    held.describe(replace(description, source="elsewhere"))
    assert held.plan(JOB).model == "elsewhere" != plan.model


def test_a_known_plan_brings_its_layout_of_the_weights_back(planner, parts):
    held, (_, modules) = planner(), parts
    kept = replace(JOB, text_kv=True)
    plan = held.plan(kept)
    layout = order_of(modules["unet"])
    assert layout[1]
    held.plan(JOB)
    assert order_of(modules["unet"]) != layout
    assert held.plan(kept) is plan
    assert order_of(modules["unet"]) == layout


def test_no_card_no_history(parts):
    held = Planner(Terms(parse_vram("4")), Place(Machine.generic()), *parts)
    plan = held.plan(JOB)
    held.learn(JOB, plan, _took(plan, 30 * MIB))
    assert held.plan(JOB) is plan
    held.look()
    assert held.plan(JOB) is plan


def test_cuda_is_not_started_by_any_of_this(planner):
    planner().plan(JOB)
    assert not torch.cuda.is_initialized()


@pytest.fixture
def pipe(loaded):
    yield loaded
    loaded.disable_xattn()


def _held(pipe):
    pipe.enable_xattn(vram=2, device="cpu")
    return pipe.__dict__["_sdx_budget"]


def test_a_session_holds_what_spares_memory(pipe):
    session = _held(pipe)
    executor = session.executor
    before = executor.plan
    plan = executor.replan("decode", 100 * MIB)
    assert plan.feasible
    assert executor.plan is plan is session.plan
    assert plan.phase("decode").predicted_peak_gib > before.phase("decode").predicted_peak_gib
    assert not executor.replan("decode", 100 * GIB).feasible
    assert executor.plan is plan


def test_each_call_looks_whether_the_text_can_be_kept(pipe):
    session = _held(pipe)

    def run():
        pipe("x", height=64, width=64, num_inference_steps=1, output_type="latent")
        return session.plan.job["text_kv"]

    assert run() is True
    block = pipe.unet.mid_block
    block.compile(backend="eager")
    assert run() is False
    block._compiled_call_impl = None
    assert run() is True


def test_repetitions_are_in_the_report(pipe):
    session = _held(pipe)
    assert pipe.xattn_report().retries == ()
    session.executor.retries.append(Retry("decode", "vae", 64 * MIB, 1))
    report = pipe.xattn_report()
    assert report.to_dict()["retries"] == [
        {"phase": "decode", "component": "vae", "requested": 64 * MIB, "rung": 1}
    ]
    assert "decode: vae was refused 64 MiB" in str(report)


def test_no_learn_reaches_the_plan_and_the_session(cli, monkeypatch):
    from sdx_accel.cli import run_job

    seen = []

    class Pipe:
        def enable_xattn(self, **terms):
            seen.append(terms)
            raise WorkError("far enough")

    planned = run_job.plan_job
    monkeypatch.setattr(run_job, "plan_job", lambda *a, **k: (seen.append(k), planned(*a, **k))[1])
    monkeypatch.setattr(run_job, "load_pipeline", lambda *_: Pipe())
    monkeypatch.setattr(run_job, "prompt_notes", lambda *_: [])
    for flags, learn in ((["--no-learn"], False), ([], True)):
        assert cli("generate", "x", "--width", 64, "--height", 64, "--ram", "2", *flags).code == 1
        plan_terms, session_terms = seen[-2:]
        assert plan_terms["learn"] is session_terms["learn"] is learn
        assert session_terms["ram"] == "2"
