"""A held pipeline on the CPU: weights move between two sets of storage, bits never change."""

import copy
import logging
import pickle

import pytest
import torch

import sdx_accel
from sdx_accel.errors import BudgetError, PlacementError, RefusedError
from sdx_accel.runtime import budget_session, session_plans
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.executor import Executor

STEPS = 2


@pytest.fixture
def pipe():
    loaded = load("random:sdxl-tiny", dtype="fp32")
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture
def moving(monkeypatch):
    """Let units move on the CPU as they would to a card."""

    class Moving(Executor):
        def __init__(self, *args, moves):
            super().__init__(*args, moves=True)

    monkeypatch.setattr(budget_session, "Executor", Moving)


def _run(pipe, seed=0, **arguments):
    arguments = {"height": 64, "width": 64, "num_inference_steps": STEPS, **arguments}
    return pipe(
        "a red apple", generator=torch.Generator().manual_seed(seed), output_type="np", **arguments
    ).images


def _storages(pipe):
    return {
        name: [p.data_ptr() for p in module.parameters()]
        for name, module in pipe.components.items()
        if isinstance(module, torch.nn.Module)
    }


def test_placement_never_changes_a_bit(pipe, moving):
    pipe.enable_xattn()
    free = _run(pipe)
    pipe.enable_xattn(vram=8, device="cpu")
    executor = pipe.__dict__["_sdx_budget"].executor
    first = _run(pipe)
    assert executor.moved_bytes > 0
    assert (free == first).all()
    assert (free == _run(pipe)).all()


def _evicting(plan):
    """The same plan with everything out that a phase does not need."""
    import dataclasses

    keep = {"text": ("text_encoder", "text_encoder_2"), "denoise": ("unet",), "decode": ("vae",)}
    placement = {
        phase: {name: n for name, n in resident.items() if name in keep[phase]}
        for phase, resident in plan.placement.items()
    }
    return dataclasses.replace(plan, placement=placement)


def test_each_phase_has_what_the_plan_says_and_nothing_else(pipe, moving, monkeypatch):
    monkeypatch.setattr(
        session_plans,
        "plan_job",
        lambda *a, _real=session_plans.plan_job, **k: _evicting(_real(*a, **k)),
    )
    pipe.enable_xattn()
    free = _run(pipe)
    pipe.enable_xattn(vram=8, device="cpu")
    executor = pipe.__dict__["_sdx_budget"].executor
    seen = {}
    enter = executor.enter

    def watch(phase):
        enter(phase)
        seen[phase] = {
            name for name, units in executor._units.items() if any(u.loaded for u in units)
        }

    executor.enter = watch
    assert (free == _run(pipe)).all()
    assert seen == {
        "text": {"text_encoder", "text_encoder_2"},
        "denoise": {"unet"},
        "decode": {"vae"},
    }
    report = pipe.xattn_report()
    assert [phase.name for phase in report.phases] == ["text", "denoise", "decode"]


def test_disable_gives_back_the_very_objects(pipe, moving):
    before = _run(pipe)
    classes = {n: type(m) for n, m in pipe.components.items()}
    parameters = {n: id(p) for n, p in pipe.unet.named_parameters()}
    keys = {n: set(m.__dict__) for n, m in pipe.components.items() if hasattr(m, "__dict__")}
    hooks = [len(m._forward_pre_hooks) for m in pipe.unet.modules()]
    own = set(pipe.__dict__)
    stock = type(pipe)
    for budget in (8, 8, 4):
        pipe.enable_xattn(vram=budget, device="cpu")
    _run(pipe)
    pipe.disable_xattn()
    assert type(pipe) is stock
    assert set(pipe.__dict__) == own
    assert {n: type(m) for n, m in pipe.components.items()} == classes
    assert {n: id(p) for n, p in pipe.unet.named_parameters()} == parameters
    assert {
        n: set(m.__dict__) for n, m in pipe.components.items() if hasattr(m, "__dict__")
    } == keys
    assert [len(m._forward_pre_hooks) for m in pipe.unet.modules()] == hooks
    assert (before == _run(pipe)).all()
    pipe.disable_xattn()


def test_enabling_again_is_one_session_case_097(pipe):
    pipe.enable_xattn(vram=8, device="cpu")
    hooks = len(pipe.unet._forward_pre_hooks)
    held = type(pipe)
    pipe.enable_xattn(vram=8, device="cpu")
    pipe.enable_xattn(vram=4, device="cpu")
    assert len(pipe.unet._forward_pre_hooks) == hooks
    assert type(pipe) is held
    assert pipe.xattn_report().plan.budget_gib == 4


def test_a_call_that_does_not_fit_is_refused_before_the_text_encoder_runs(pipe):
    pipe.enable_xattn(vram=1, device="cpu")
    ran = []
    pipe.text_encoder.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(BudgetError, match="smallest budget that works") as refusal:
        _run(pipe, height=512, width=512, num_images_per_prompt=4)
    assert not ran
    assert "pixels" in str(refusal.value)
    assert not refusal.value.plan.feasible
    _run(pipe)


def test_the_plan_follows_the_size_of_the_call(pipe):
    pipe.enable_xattn(vram=8, device="cpu")
    _run(pipe, height=64, width=128)
    job = pipe.xattn_report().plan.job
    assert (job["height"], job["width"], job["guided"]) == (64, 128, True)
    _run(pipe, guidance_scale=1.0)
    assert pipe.xattn_report().plan.job["guided"] is False
    pipe(
        ["a", "b"],
        height=64,
        width=64,
        num_inference_steps=1,
        num_images_per_prompt=2,
        output_type="latent",
    )
    assert pipe.xattn_report().plan.job["batch"] == 4


def test_moving_a_held_pipeline_is_refused_case_099(pipe):
    pipe.enable_xattn(vram=8, device="cpu")
    for target in (pipe, pipe.unet, pipe.text_encoder):
        with pytest.raises(PlacementError, match="disable_xattn"):
            target.to("meta")
    with pytest.raises(PlacementError, match="enable_model_cpu_offload"):
        pipe.enable_model_cpu_offload(device="cpu")
    pipe.disable_xattn()
    pipe.to("cpu")


def test_foreign_placement_is_named(pipe):
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(pipe.unet, ModelHook())
    with pytest.raises(PlacementError, match="drop the call"):
        pipe.enable_xattn(vram=8, device="cpu")
    assert not any(layer.patched for layer in pipe.xattn_report().layers)


def test_refused_arguments_change_nothing(pipe):
    wrong = (
        {"vram": "much"},
        {"quality": "fast"},
        {"vram": "auto", "device": "cpu"},
        {"attention_op": 5},
        {"attention_op": "fastest", "vram": 8},
    )
    for arguments in wrong:
        with pytest.raises(ValueError):
            pipe.enable_xattn(**arguments)
        assert not any(layer.patched for layer in pipe.xattn_report().layers)
        assert "_sdx_budget" not in pipe.__dict__


def test_a_model_takes_no_budget(pipe):
    with pytest.raises(RefusedError, match="pipeline"):
        pipe.unet.enable_xattn(vram=8)
    pipe.unet.enable_xattn()
    assert any(layer.patched for layer in pipe.unet.xattn_report().layers)
    pipe.unet.disable_xattn()
    assert not any(layer.patched for layer in pipe.unet.xattn_report().layers)


def test_the_vae_cast_happens_inside_its_phase_and_is_undone(moving, caplog):
    pipe = load("random:sdxl-tiny", dtype="fp32")
    pipe.set_progress_bar_config(disable=True)
    pipe.enable_xattn(vram=8, device="cpu")
    _run(pipe)
    executor = pipe.__dict__["_sdx_budget"].executor
    before = {n: p.clone() for n, p in pipe.vae.named_parameters()}
    executor.enter("denoise")
    pipe.vae.to(dtype=torch.float64)
    assert executor.phase == "decode"
    assert pipe.vae.dtype == torch.float64
    pipe.vae.to(dtype=torch.float32)
    assert pipe.vae.dtype == torch.float32
    assert all((before[n] == p).all() for n, p in pipe.vae.named_parameters())


def test_a_refused_decode_is_repeated_with_everything_else_out_case_111(pipe, moving):
    pipe.enable_xattn()
    expected = _run(pipe)
    pipe.enable_xattn(vram=8, device="cpu")
    executor = pipe.__dict__["_sdx_budget"].executor
    calls = {"unet": 0, "refused": 0}
    pipe.unet.register_forward_pre_hook(lambda *_: calls.__setitem__("unet", calls["unet"] + 1))
    decoder = pipe.vae.decoder.forward

    def refuse_once(*args, **kwargs):
        if not calls["refused"]:
            calls["refused"] = 1
            raise torch.OutOfMemoryError("injected")
        assert not any(unit.loaded for unit in executor._units["unet"])
        return decoder(*args, **kwargs)

    pipe.vae.decoder.forward = refuse_once
    assert (expected == _run(pipe)).all()
    assert calls == {"unet": STEPS, "refused": 1}


def test_adapters_reach_the_weights_that_come_back(pipe, moving):
    pipe.enable_xattn(vram=8, device="cpu")
    first = _run(pipe)
    executor = pipe.__dict__["_sdx_budget"].executor
    executor.bring_home()
    with torch.no_grad():
        pipe.unet.conv_out.weight.mul_(2)
    changed = _run(pipe)
    assert (first != changed).any()
    assert (changed == _run(pipe)).all()


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_held_models_are_stock_case_088(pipe, way):
    stock = {name: type(pipe.components[name]) for name in ("unet", "vae", "text_encoder")}
    pipe.enable_xattn(vram=8, device="cpu")
    for name, cls in stock.items():
        held = pipe.components[name]
        twin = way(held)
        assert type(twin) is cls
        assert "_sdx_held" not in twin.__dict__
        assert not twin._forward_pre_hooks_with_kwargs
        assert "_sdx_held" in held.__dict__
        assert all(
            torch.equal(a, b) for a, b in zip(held.parameters(), twin.parameters(), strict=True)
        )


def test_the_plan_is_said_before_the_run_and_the_cpu_is_honest(pipe, caplog):
    logging.getLogger("sdx_accel").propagate = True
    with caplog.at_level(logging.INFO, logger="sdx_accel"):
        pipe.enable_xattn(vram=8, device="cpu")
    assert "not enforced on CPU" in caplog.text
    assert "predicted peak" in caplog.text
    _run(pipe)
    assert all(phase.measured_peak_gib is None for phase in pipe.xattn_report().phases)
    assert "not measured" in str(pipe.xattn_report())


def test_the_off_switch(pipe, monkeypatch):
    monkeypatch.setenv("SDX_DISABLE", "1")
    pipe.enable_xattn(vram=8)
    assert not any(layer.patched for layer in pipe.xattn_report().layers)


def test_tiling_that_the_user_switched_on_is_planned_and_kept(pipe):
    pipe.enable_xattn(vram=8, device="cpu")
    _run(pipe, height=256, width=256)
    assert pipe.xattn_report().plan.job["tile"] is None
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 128, 16
    _run(pipe, height=256, width=256)
    assert pipe.vae.use_tiling
    assert pipe.xattn_report().plan.job["tile"] == 128
    assert "tiles of 128" in pipe.xattn_report().plan.numerics["vae_mode"]
    pipe.disable_xattn()
    assert pipe.vae.use_tiling


def test_tiling_of_ours_ends_with_the_plan(pipe):
    before = (pipe.vae.use_tiling, pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size)
    whole = sdx_accel.plan(pipe, vram=8, height=640, width=640, dtype="fp32", device="cpu")
    pipe.enable_xattn(vram=whole.smallest_budget_gib - 0.05, device="cpu", quality="near")
    _run(pipe, height=640, width=640, num_inference_steps=1)
    assert pipe.vae.use_tiling
    assert pipe.vae.tile_sample_min_size < 640
    _run(pipe, height=64, width=64)
    after = (pipe.vae.use_tiling, pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size)
    assert after == before


def test_each_plan_is_audited_aloud_once(pipe, caplog):
    with caplog.at_level(logging.INFO, logger="sdx_accel"):
        pipe.enable_xattn(vram=8, device="cpu")
        for _ in range(3):
            _run(pipe)
    lines = [r.message for r in caplog.records if r.message.startswith(("text:", "decode:"))]
    assert len(lines) == 2
    assert all("predicted" in line and "measured" in line for line in lines)


def test_another_budget_begins_a_new_audit(pipe, moving):
    pipe.enable_xattn(vram=8, device="cpu")
    executor = pipe.__dict__["_sdx_budget"].executor
    _run(pipe)
    assert executor.audit.records
    pipe.enable_xattn(vram=4, device="cpu")
    assert not executor.audit.records
