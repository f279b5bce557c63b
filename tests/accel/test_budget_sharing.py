"""Held pipelines among others: shared models, copies, casts, swaps, dropped pipelines."""

import copy
import gc
import pickle
from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoPipelineForImage2Image, StableDiffusionXLImg2ImgPipeline
from PIL import Image

import sdx_patches
from sdx_accel import api
from sdx_accel.budget.machine import Machine
from sdx_accel.errors import BudgetError, PlacementError, RefusedError
from sdx_accel.runtime import budget_session
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.planning import job_of_call


@pytest.fixture
def pipe():
    loaded = load("random:sdxl-tiny", dtype="fp32")
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(autouse=True)
def moving(monkeypatch):
    """Let units move on the CPU as they would to a card."""

    class Moving(Executor):
        def __init__(self, *args, moves):
            super().__init__(*args, moves=True)

    monkeypatch.setattr(budget_session, "Executor", Moving)


def _run(pipe, **arguments):
    arguments = {"height": 64, "width": 64, "num_inference_steps": 2, **arguments}
    generator = torch.Generator().manual_seed(0)
    return pipe("a red apple", generator=generator, output_type="np", **arguments).images


def _executor(pipe):
    return pipe.__dict__["_sdx_budget"].executor


def test_from_pipe_takes_the_models_of_a_held_pipeline(pipe):
    pipe.enable_xattn(vram=8, device="cpu")
    other = StableDiffusionXLImg2ImgPipeline.from_pipe(pipe)
    assert other.unet is pipe.unet
    assert other.vae is pipe.vae
    assert type(pipe.unet) is not type(load("random:sdxl-tiny", dtype="fp32").unet)


def test_two_budgets_for_one_model_are_refused(pipe):
    pipe.enable_xattn(vram=8, device="cpu")
    expected = _run(pipe)
    other = AutoPipelineForImage2Image.from_pipe(pipe)
    with pytest.raises(PlacementError, match="disable_xattn"):
        other.enable_xattn(vram=8, device="cpu")
    assert (expected == _run(pipe)).all()
    pipe.disable_xattn()
    other.enable_xattn(vram=8, device="cpu")
    other.disable_xattn()
    pipe.enable_xattn()
    assert (expected == _run(pipe)).all()


def test_a_pipeline_dropped_while_held_frees_its_models():
    pipe = load("random:sdxl-tiny", dtype="fp32")
    picture = Image.new("RGB", (64, 64), (200, 10, 10))
    stock = type(pipe.unet)
    pipe.enable_xattn(vram=8, device="cpu")
    _run(pipe)
    pipe = AutoPipelineForImage2Image.from_pipe(pipe)
    gc.collect()
    assert type(pipe.unet) is stock
    assert not pipe.unet._forward_pre_hooks_with_kwargs
    pipe.to("cpu")
    pipe.enable_xattn(vram=8, device="cpu")
    pipe("x", image=picture, strength=0.5, num_inference_steps=2, output_type="np")


@pytest.mark.parametrize("through", ["pipeline", "model"])
def test_a_dropped_pipeline_lets_go_of_its_models(pipe, through):
    stock = type(pipe.unet)
    attention = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1
    processor = attention.processor
    other = type(pipe)(**pipe.components)
    loaded = type(pipe)(**pipe.components)
    loaded.enable_xattn(vram=8, device="cpu")
    assert attention.processor is not processor
    del loaded
    gc.collect()
    assert type(other.unet) is stock
    (other if through == "pipeline" else other.unet).disable_xattn()
    assert attention.processor is processor
    assert not any("_sdx" in vars(module) for module in other.unet.modules())


def test_disabling_leaves_the_patches_of_others_alone(pipe):
    other = type(pipe)(**pipe.components)
    other.enable_xattn()
    sdx_patches.patch(pipe.unet, owner="somebody")
    pipe.disable_xattn()
    assert len(sdx_patches.owners(pipe.unet)) == 2
    other.disable_xattn()
    assert sdx_patches.owners(pipe.unet) == {"somebody"}
    sdx_patches.restore(pipe.unet, owner="somebody")
    assert sdx_patches.owners(pipe.unet) == set()


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_of_a_held_pipeline_have_no_session(pipe, way):
    stock = type(pipe)
    pipe.enable_xattn(vram=8, device="cpu")
    twin = way(pipe)
    assert type(twin) is stock
    assert "_sdx_budget" not in twin.__dict__
    twin.disable_xattn()
    assert "_sdx_held" in pipe.__dict__
    assert "_sdx_held" in pipe.unet.__dict__


def test_a_pickle_holds_each_weight_once(pipe):
    stock = len(pickle.dumps(pipe))
    pipe.enable_xattn(vram=8, device="cpu")
    # before a run: transformers then hooks its encoders in a way that no pickle takes
    assert len(pickle.dumps(pipe)) < 1.1 * stock
    before = _run(pipe)
    assert len(pickle.dumps(pipe.unet)) < 1.1 * stock
    assert (before == _run(pipe)).all()


def test_a_copy_in_the_middle_of_a_run_does_not_disturb_it(pipe):
    pipe.enable_xattn(vram=8, device="cpu")
    before = _run(pipe)

    def copied(pipe, step, timestep, values):
        copy.deepcopy(pipe.unet)
        return values

    assert (before == _run(pipe, callback_on_step_end=copied)).all()


def test_a_refused_change_leaves_the_old_budget(pipe):
    pipe.enable_xattn(vram=8, device="cpu")
    with pytest.raises(RefusedError, match="GPU"):
        pipe.enable_xattn(vram="auto", device="cpu")
    _run(pipe)
    assert pipe.xattn_report().plan.budget_gib == 8


def test_a_change_that_does_not_fit_is_what_the_report_says(pipe):
    pipe.enable_xattn(vram=8, device="cpu")
    _run(pipe)
    pipe.enable_xattn(vram=0.3, device="cpu")
    assert pipe.xattn_report().plan.budget_gib == 0.3
    with pytest.raises(BudgetError):
        _run(pipe)


def test_a_missing_device_changes_nothing(pipe, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RefusedError, match="doctor"):
        pipe.enable_xattn(vram=8, device="cuda")
    assert not any(layer.patched for layer in pipe.xattn_report().layers)


def test_a_cast_while_held_lasts(pipe):
    twin = copy.deepcopy(pipe)
    pipe.enable_xattn(vram=8, device="cpu")
    _run(pipe)
    pipe.to(torch.bfloat16)
    twin.to(torch.bfloat16)
    twin.enable_xattn()
    assert (_run(twin) == _run(pipe)).all()
    assert pipe.unet.dtype == pipe.text_encoder.dtype == torch.bfloat16
    assert pipe.xattn_report().plan.numerics["unet"] == "bfloat16"


def test_adapters_make_the_plan_anew(pipe):
    from peft import LoraConfig

    pipe.enable_xattn(vram=8, device="cpu")
    _run(pipe)
    before = pipe.xattn_report().plan.host_gib
    pipe.unet.add_adapter(LoraConfig(r=64, target_modules=["to_q", "to_v"]))
    _run(pipe)
    assert pipe.xattn_report().plan.host_gib > before
    held = sum(len(unit._slots) for unit in _executor(pipe)._units["unet"])
    assert held == len([*pipe.unet.parameters(), *pipe.unet.buffers()])


def test_a_replaced_model_is_refused_by_name(pipe):
    pipe.enable_xattn(vram=8, device="cpu")
    pipe.unet = copy.deepcopy(pipe.unet)
    with pytest.raises(PlacementError, match="unet was replaced"):
        _run(pipe)
    pipe.disable_xattn()
    pipe.enable_xattn(vram=8, device="cpu")
    _run(pipe)


def test_weights_moved_in_inference_mode_stay_ordinary(pipe):
    pipe.enable_xattn(vram=8, device="cpu")
    with torch.inference_mode():
        _run(pipe)
    assert not any(p.is_inference() for p in pipe.vae.parameters())
    pipe.vae.post_quant_conv(torch.randn(1, 4, 8, 8)).sum().backward()


def test_a_safety_checker_is_planned_and_runs_with_the_decode(pipe):
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    from sdx_accel.runtime import held

    small = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 1}
    config = CLIPConfig(text_config=small, vision_config={**small, "num_attention_heads": 4})
    checker = StableDiffusionSafetyChecker(config)
    executor = Executor({"safety_checker": checker}, torch.device("cpu"), None, moves=True)
    undo = held.hold_models(executor)
    (hook,) = checker._forward_pre_hooks.values()
    assert hook.phase == "decode"
    undo()


def test_sizes_of_latents_decide():
    config = SimpleNamespace(sample_size=128, out_channels=4)
    latents = torch.zeros(1, 4, 128, 96)
    job = job_of_call(StableDiffusionXLImg2ImgPipeline, config, 8, ("x",), {"image": latents})
    assert (job.height, job.width, job.encode) == (1024, 768, False)
    job = job_of_call(StableDiffusionXLImg2ImgPipeline, config, 8, ("x",), {"latents": latents})
    assert (job.height, job.width) == (1024, 768)


@pytest.mark.slow  # 26 s: traces SDXL's decode in every tile
def test_near_says_the_smallest_budget_of_its_tiles():
    def at(budget):
        return api.plan("random:sdxl", vram=budget, quality="near", machine=Machine.generic())

    said = at(2).smallest_budget_gib
    assert said == at(said).smallest_budget_gib
    assert at(said).feasible
    # small tiles need less than bands of rows, and streaming leaves the decode as what binds
    exact = api.plan("random:sdxl", vram=2, machine=Machine.generic())
    assert said < exact.smallest_budget_gib
    assert exact.binding_phase == "decode"


def test_near_tiles_where_exact_moves_the_unet():
    near, exact = (
        api.plan("random:sdxl", vram=8, quality=quality, machine=Machine.generic())
        for quality in ("near", "exact")
    )
    assert near.job["tile"] < 1024
    assert near.moved_gib_per_picture < exact.moved_gib_per_picture


def test_nonsense_sizes_get_the_pipelines_own_message(pipe):
    pipe.enable_xattn(vram=8, device="cpu")
    with pytest.raises(ValueError, match="divisible by 8"):
        _run(pipe, height=4, width=4)
