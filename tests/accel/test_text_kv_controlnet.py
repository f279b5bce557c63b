"""Kept keys and values of the text in ControlNets: planned, equal pictures, exact undo."""

import copy
import dataclasses
from itertools import pairwise

import pytest
import torch
from diffusers import StableDiffusionXLControlNetPipeline
from PIL import Image

import sdx_accel
from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import StreamPlan
from sdx_accel.runtime import budget_session, profiler, session_plans, stream_order
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.controlnets import load_controlnet, with_controlnets
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.meta_models import describe_pipeline, meta_component
from sdx_accel.runtime.pipeline_parts import numbered, pipeline_models
from sdx_accel.runtime.profiler import Job, profile_job
from sdx_accel.runtime.weights import unit_bytes
from sdx_patches.text_kv import text_projections

TINY, RANDOM = "random:sdxl-tiny", "random:controlnet"
STEPS = 2
# of a tiny ControlNet: the down half and the middle of the UNet's 22
UNET, NET = 22, 10


def _load(count=1):
    pipe = load(TINY, dtype="fp32")
    described = with_controlnets(architecture(TINY), [RANDOM] * count, "text").components
    nets = [
        load_controlnet(RANDOM, described[numbered("controlnet", i)], torch.float32)
        for i in range(count)
    ]
    for net in nets:
        # what a ControlNet adds is zero at first: the pictures must depend on it
        for layer in (*net.controlnet_down_blocks, net.controlnet_mid_block):
            torch.nn.init.normal_(layer.weight, std=0.2)
    pipe = StableDiffusionXLControlNetPipeline.from_pipe(
        pipe, controlnet=nets[0] if count == 1 else nets
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def shared():
    """A pipeline that every test leaves as it was."""
    return _load()


def _run(pipe, **arguments):
    count = len([name for name in pipeline_models(pipe) if name.startswith("controlnet")])
    picture = Image.new("RGB", (64, 64), "red")
    picture.paste("blue", (0, 0, 30, 40))
    arguments = {
        "prompt": "a red apple", "height": 64, "width": 64, "num_inference_steps": STEPS,
        "image": picture if count == 1 else [picture] * count, **arguments,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return pipe(generator=generator, output_type="latent", **arguments).images


def _wanted(pipe, **arguments):
    """The latents with the same attention and without a budget."""
    pipe.enable_xattn(attention_op="torch")
    latents = _run(pipe, **arguments)
    pipe.disable_xattn()
    return latents


class _Moving(Executor):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "moves": True})


def _keeping(*args, **kwargs):
    """The plan, made to keep the text and to have each phase's models in alone."""
    plan = _keeping.real(*args, **kwargs)
    modules = args[6]
    found = {n: stream_order.layout(n, m, *stream_order.order_of(m)) for n, m in modules.items()}
    denoise = {
        name: len(each.groups) - each.text_chunks
        for name, each in found.items()
        if name == "unet" or name.startswith("controlnet")
    }
    placement = {**plan.placement, "denoise": denoise, "text": {}}
    return dataclasses.replace(plan, placement=placement, text_kv=True)


_keeping.real = session_plans.plan_job


@pytest.fixture
def moving(monkeypatch):
    monkeypatch.setattr(budget_session, "Executor", _Moving)
    monkeypatch.setattr(session_plans, "plan_job", _keeping)


class _Held:
    def __init__(self, pipe):
        self.pipe = pipe

    def __enter__(self):
        self.pipe.enable_xattn(vram=8, device="cpu", attention_op="torch")
        self.executor = self.pipe.__dict__["_sdx_budget"].executor
        return self

    def __exit__(self, *_):
        self.pipe.disable_xattn()

    @property
    def counts(self):
        kept = self.executor.on_call[0].kept
        return {name: (kv.misses, kv.hits) for name, kv in kept.items()}


def test_which_layers_of_a_controlnet_read_the_text():
    described = with_controlnets(architecture("random:sdxl"), [RANDOM], "text").components
    net = meta_component(described["controlnet"], "float16")
    kept = [net.get_submodule(name).weight for name in text_projections(net)]
    # 34 layers of cross-attention: 4 of 640 and 30 of 1280 channels
    assert (len(kept), sum(w.numel() * 2 for w in kept)) == (68, 320 << 20)
    net.encoder_hid_proj = torch.nn.Identity()
    net.register_to_config(encoder_hid_dim_type="text_proj")
    assert text_projections(net) == []


@pytest.mark.slow  # traces SDXL with its ControlNet
def test_the_plan_leaves_them_out_of_the_denoise():
    description = with_controlnets(architecture("random:sdxl-fp16vae"), [RANDOM], "text")
    dtypes = dict.fromkeys(description.components, "float16")
    job = Job(512, 512, bands="low", text_kv=True)
    parts = {c.name: c for c in profile_job(description, job, dtypes).components}
    net = parts["controlnet"]
    assert sum(unit.n_bytes for unit in net.units[-net.text_chunks :]) == 320 << 20
    # (4 · 2 · 640 + 30 · 2 · 1280) channels, 77 tokens, both predictions, 16 bits
    assert net.kv_bytes == (8 * 640 + 60 * 1280) * 77 * 2 * 2
    assert net.kv_bytes < parts["unet"].kv_bytes
    plain = profile_job(description, dataclasses.replace(job, text_kv=False), dtypes)
    assert not any(c.kv_bytes for c in plain.components)


@pytest.mark.slow  # as above
def test_a_tight_plan_gains_by_it(monkeypatch):
    described = with_controlnets(architecture("random:sdxl-fp16vae"), [RANDOM], "text")
    size = {"height": 512, "width": 512, "machine": Machine.generic()}

    def at(vram):
        return sdx_accel.plan(described, vram=vram, **size)

    # whole models with their text kept: 4.78 − 0.63 + 2.33 − 0.31 GiB of weights, and 0.6 beside
    plan = at(7.6)
    assert plan.feasible
    assert plan.text_kv
    assert not plan.streams
    placed, weights = plan.placement["denoise"], plan.phase("denoise").resident_gib
    assert weights["controlnet"] == pytest.approx(2.33 - 0.31, abs=0.05)
    assert placed["controlnet"] < sum(placed.values())
    real = profiler.text_projections
    monkeypatch.setattr(
        profiler, "text_projections", lambda m: real(m) if hasattr(m, "conv_norm_out") else []
    )
    without = at(7.6)
    assert without.streams or not without.feasible or without.moved_gib_per_picture > 0
    assert without.phase("denoise").resident_gib["controlnet"] > weights["controlnet"] or (
        without.streams
    )


def test_meta_and_live_split_alike(shared, monkeypatch):
    monkeypatch.setattr(stream_order, "STREAM_BYTES", 200 << 10)
    profiler._traced.cache_clear()
    try:
        description, live = describe_pipeline(shared), pipeline_models(shared)
        dtypes = dict.fromkeys(description.components, "float32")
        job = Job(64, 64, text_kv=True)
        planned = {c.name: c for c in profile_job(description, job, dtypes).components}
        counted = {c.name: c for c in profile_job(description, job, dtypes, live).components}
    finally:
        profiler._traced.cache_clear()
    assert planned == counted
    net = planned["controlnet"]
    assert net.stream
    assert net.text_chunks == 1
    order, text = stream_order.order_of(shared.controlnet)
    assert list(text) == text_projections(shared.controlnet)
    found = stream_order.layout("controlnet", shared.controlnet, order, text)
    assert (found.units, found.text_chunks) == (net.stream, net.text_chunks)


def _other_prompt(pipe, step, time, values):
    return values if step else {**values, "prompt_embeds": values["prompt_embeds"].flip(1)}


_INPUTS = ["prompt_embeds", "add_text_embeds", "add_time_ids", "latents"]
CASES = {
    "plain": {},
    "ends_early": {"control_guidance_end": 0.5},
    "guess_mode": {"guess_mode": True},
    "other_prompt": {
        "callback_on_step_end": _other_prompt,
        "callback_on_step_end_tensor_inputs": _INPUTS,
    },
    "batch": {"prompt": ["a", "b"], "num_images_per_prompt": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_latents_equal_with_and_without(shared, moving, case):
    arguments = CASES[case]
    wanted = _wanted(shared, **arguments)
    with _Held(shared) as held:
        assert torch.equal(_run(shared, **arguments), wanted)
        # a ControlNet is asked at each step, also where its strength is nought
        assert held.counts == {"unet": (0, UNET * STEPS), "controlnet": (0, NET * STEPS)}


def test_what_a_controlnet_adds_depends_on_its_text(shared, moving):
    """Else equal latents would prove nothing."""
    wanted = _wanted(shared)
    with _Held(shared) as held:
        _run(shared)
        kv = held.executor.on_call[0].kept["controlnet"]
        for layer in kv._layers.values():
            layer.kept = layer.kept + 1
            layer._written = layer.kept._version
        assert not torch.equal(_run(shared), wanted)


def test_two_controlnets(moving):
    pipe = _load(2)
    with torch.no_grad():
        for weight in pipe.controlnet.nets[1].parameters():
            weight.mul_(1.25)
    wanted = _wanted(pipe)
    with _Held(pipe) as held:
        assert torch.equal(_run(pipe), wanted)
        assert held.counts == {
            "unet": (0, UNET * STEPS),
            "controlnet": (0, NET * STEPS),
            "controlnet_2": (0, NET * STEPS),
        }


def test_all_is_kept_before_any_denoiser_is_in_and_out_during_steps(shared, moving, monkeypatch):
    with _Held(shared) as held:
        executor, net = held.executor, shared.controlnet
        loaded, moved, kv_weights = [], [], executor.kv_weights

        def watch(name, paths):
            moved.append((name, *paths))
            loaded.append({n for n, us in executor._units.items() if any(u.loaded for u in us)})
            return kv_weights(name, paths)

        executor.kv_weights = watch
        first = _run(shared)
        assert len(moved) == len(set(moved)) == UNET + NET
        assert loaded == [set()] * len(moved)
        chunks = executor._units["controlnet"][len(executor._used("controlnet")) :]
        assert chunks
        homes = [data for chunk in chunks for _, data in chunk.pieces(0, chunk.n_bytes)]
        host = [range(data.data_ptr(), data.data_ptr() + data.numel()) for data in homes]
        steps = []

        def out(*_):
            weights = [net.get_submodule(name).weight for name in text_projections(net)]
            steps.append(all(any(w.data_ptr() in blob for blob in host) for w in weights))

        handle = net.mid_block.register_forward_pre_hook(out)
        # the second picture of a prompt loads nothing
        assert torch.equal(_run(shared), first)
        handle.remove()
        assert len(moved) == UNET + NET
        assert steps == [True] * STEPS
        kv = executor.on_call[0].kept["controlnet"]
        kept = [layer.kept for layer in kv._layers.values()]
        assert sum(t.numel() * t.element_size() for t in kept) == _planned_bytes(shared)


def _planned_bytes(pipe):
    description = describe_pipeline(pipe)
    dtypes = dict.fromkeys(description.components, "float32")
    profile = profile_job(description, Job(64, 64, text_kv=True), dtypes)
    return next(c.kv_bytes for c in profile.components if c.name == "controlnet")


def _streaming(*args, **kwargs):
    """`_keeping`'s plan with both models in one cycle, all of which passes through a small ring."""
    plan, modules = _keeping(*args, **kwargs), args[6]
    names = ("controlnet", "unet")
    found = {
        n: stream_order.layout(n, modules[n], *stream_order.order_of(modules[n])) for n in names
    }
    sizes = [unit.n_bytes for name in names for unit in found[name].units]
    slots, offset, ring = [], 0, 2 * max(sizes)
    for index, size in enumerate(sizes):
        offset = 0 if offset + size > ring else offset
        slots.append((index, offset))
        offset += size
    rest = -sum(sizes)
    for each in found.values():
        kept = each.groups[: len(each.groups) - each.text_chunks]
        rest += sum(unit_bytes(group) for group in kept)
    stream = StreamPlan("denoise", names, (), tuple(slots), rest, ring, sum(sizes), 1.0, 1.0)
    return dataclasses.replace(plan, streams=(stream,))


def test_a_streamed_loop_keeps_the_text_of_both(shared, moving, monkeypatch):
    monkeypatch.setattr(stream_order, "STREAM_BYTES", 400 << 10)
    monkeypatch.setattr(session_plans, "plan_job", _streaming)
    profiler._traced.cache_clear()
    wanted = _wanted(shared)
    try:
        with _Held(shared) as held:
            assert torch.equal(_run(shared), wanted)
            assert held.counts == {"unet": (0, UNET * STEPS), "controlnet": (0, NET * STEPS)}
            (stream,) = held.executor.plan.streams
            assert len(stream.slots) > 40
            assert held.executor.moved_bytes > STEPS * stream.streamed_bytes
    finally:
        profiler._traced.cache_clear()


def test_undo_leaves_stock_layers(shared, moving):
    def calls(root):
        return [m for m in root.modules() if "_compiled_call_impl" in m.__dict__]

    with _Held(shared) as held:
        _run(shared)
        assert len(calls(shared.controlnet)) == NET
        assert not calls(copy.deepcopy(shared.controlnet))
        held.executor.hold(dataclasses.replace(held.executor.plan, text_kv=False))
        held.executor.on_call[0]("controlnet", shared.controlnet, (), {})
        assert not calls(shared.controlnet)
        assert held.executor.on_call[0].kept == {}
        _run(shared)
    assert not calls(shared.controlnet)
    assert not calls(shared.unet)
    first, second = _run(shared), _run(shared)
    assert torch.equal(first, second)


def test_a_controlnet_that_was_compiled_since_keeps_its_weights(shared, moving):
    wanted = _wanted(shared)
    block = shared.controlnet.mid_block
    with _Held(shared) as held:
        _run(shared)
        assert set(held.counts) == {"unet", "controlnet"}
        block.compile(backend="eager")
        try:
            assert torch.allclose(_run(shared), wanted, atol=1e-5)
            assert set(held.counts) == {"unet"}
            assert stream_order.order_of(shared.controlnet)[1] == ()
        finally:
            block._compiled_call_impl = None
        assert torch.equal(_run(shared), wanted)
        assert set(held.counts) == {"unet", "controlnet"}


def test_spans_of_budgets_stay_monotone():
    description = with_controlnets(architecture(TINY), [RANDOM], "text")
    plans = [
        sdx_accel.plan(description, vram=0.7 + 0.02 * i, machine=Machine.generic())
        for i in range(20)
    ]
    assert all(b.feasible >= a.feasible for a, b in pairwise(plans))
    fitting = [plan for plan in plans if plan.feasible]
    assert all(
        b.moved_gib_per_picture <= a.moved_gib_per_picture + 1e-4 for a, b in pairwise(fitting)
    )
