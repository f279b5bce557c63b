"""Kept keys and values of the text: equal pictures, and weights that stay out of the steps."""

import copy
import dataclasses
import pickle

import pytest
import torch
from diffusers import StableDiffusionXLControlNetPipeline
from peft import LoraConfig
from PIL import Image

import sdx_accel  # noqa: F401  (attaches the methods)
from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Plan, StreamPlan
from sdx_accel.runtime import budget_session, session_plans, stream_order
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.controlnets import load_controlnet, with_controlnets
from sdx_accel.runtime.enforce import NoEnforcer
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.held import hold_models, hold_pipeline, let_go
from sdx_accel.runtime.ip_adapters import load_ip_adapters, with_ip_adapters
from sdx_accel.runtime.meta_models import describe_pipeline
from sdx_accel.runtime.pipeline_parts import pipeline_models
from sdx_accel.runtime.weights import split_weights, unit_bytes
from sdx_patches.text_kv import text_projections

TINY = "random:sdxl-tiny"
STEPS = 2
LAYERS = 22


def _load():
    pipe = load(TINY, dtype="fp32")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def shared():
    """A pipeline that every test leaves as it was."""
    return _load()


def _run(pipe, **arguments):
    arguments = {
        "prompt": "a red apple", "height": 64, "width": 64, "num_inference_steps": STEPS,
        **arguments,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return pipe(generator=generator, output_type="latent", **arguments).images


_STAGES = ("conv_in", "time", "add", "encoder", "down", "mid", "up", "conv")


def _order(unet):
    """Units in order of execution, as a trace would find them."""
    paths = [path for path, _ in stream_order.stream_modules(unet)]
    stage = {path: next(i for i, s in enumerate(_STAGES) if path.startswith(s)) for path in paths}
    return tuple((path, 1.0) for path in sorted(paths, key=stage.__getitem__))


def _stream(unet, found):
    """The whole UNet through a ring of two units, but for the text's projections."""
    sizes = [unit.n_bytes for unit in found.units]
    slots, offset, ring = [], 0, 2 * max(sizes)
    for index, size in enumerate(sizes):
        offset = 0 if offset + size > ring else offset
        slots.append((index, offset))
        offset += size
    kept = found.groups[: len(found.groups) - found.text_chunks]
    rest = sum(unit_bytes(group) for group in kept) - sum(sizes)
    return StreamPlan("denoise", ("unet",), (), tuple(slots), rest, ring, sum(sizes), 0.0, 0.0)


class _Held:
    """A pipeline held to a plan that has each phase's models in alone and keeps the text."""

    def __init__(self, pipe, streamed=False):
        self.pipe, modules = pipe, pipeline_models(pipe)
        unet = modules["unet"]
        stream_order.remember(unet, _order(unet), text_projections(unet))
        found = stream_order.layout("unet", unet, *stream_order.order_of(unet))
        placement = {"text": {}, "denoise": {}, "decode": {}}
        for name, module in modules.items():
            phase = {"unet": "denoise", "controlnet": "denoise", "vae": "decode"}.get(name, "text")
            placement[phase][name] = len(split_weights(module))
        placement["denoise"]["unet"] = len(found.groups) - found.text_chunks
        streams = (_stream(unet, found),) if streamed else ()
        self.plan = Plan(
            "", {}, Machine.generic(), 8.0, True, 1.0, "denoise", {}, placement, (), 0.0, 0.0,
            streams=streams, text_kv=True,
        )  # fmt: skip
        self.executor = Executor(modules, torch.device("cpu"), NoEnforcer())
        self.executor.hold(self.plan)
        self._undo = hold_models(self.executor)
        hold_pipeline(pipe, self.executor, lambda *_: None, lambda: None)

    @property
    def kv(self):
        return self.executor.on_call[0].kv

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def release(self):
        let_go(self.pipe)
        undo, self._undo = self._undo, lambda: None
        undo()
        self.executor.release()


def test_a_streamed_denoise_keeps_the_text_and_survives_refusals(shared, monkeypatch):
    monkeypatch.setattr(stream_order, "STREAM_BYTES", 400 << 10)
    wanted = _run(shared)
    with _Held(shared, streamed=True) as held:
        assert torch.equal(_run(shared), wanted)
        assert (held.kv.misses, held.kv.hits) == (0, LAYERS * STEPS)
        passed = held.executor.moved_bytes
        assert passed > STEPS * held.plan.streams[0].streamed_bytes
        order = [unit.name.split(".", 1)[1] for unit in held.executor._splits["unet"].stream]
        assert len(order) > 30
        # refused in the first, a middle and the last unit, in the first step and in the second
        for unit, call in [(order[0], 0), (order[len(order) // 2], 1), (order[-1], 1)]:
            calls = []

            def refuse(module, args, calls=calls, call=call):
                calls.append(1)
                if len(calls) == call + 1:
                    raise torch.OutOfMemoryError("injected")

            handle = shared.unet.get_submodule(unit).register_forward_pre_hook(refuse)
            assert torch.equal(_run(shared), wanted)
            handle.remove()
            assert len(calls) == STEPS + 1
            assert len(held.executor.retries) == 1
        # and while the ring itself is made
        allocate, asked = held.executor.copies.allocate, []

        def no_ring(n_bytes):
            asked.append(n_bytes)
            if len(asked) == 2:
                raise torch.OutOfMemoryError("injected")
            return allocate(n_bytes)

        held.executor.copies.allocate = no_ring
        assert torch.equal(_run(shared), wanted)
        assert len(asked) == 4


@pytest.fixture
def held(shared):
    with _Held(shared) as held:
        yield held


def _lora(pipe):
    torch.manual_seed(0)
    # a strength of 2/3 · 0.7 is not what it was once it is multiplied and divided again
    config = LoraConfig(r=3, lora_alpha=2, target_modules=["to_k", "to_v"], init_lora_weights=False)
    pipe.unet.add_adapter(config)


def _after_first_step(change):
    def callback(pipe, step, time, values):
        return {**values, **(change(pipe, values) or {})} if step == 0 else values

    return {
        "callback_on_step_end": callback,
        "callback_on_step_end_tensor_inputs": [
            "prompt_embeds", "add_text_embeds", "add_time_ids", "latents",
        ],
    }  # fmt: skip


def _no_guidance(pipe, values):
    pipe._guidance_scale = 0.0
    names = ("prompt_embeds", "add_text_embeds", "add_time_ids")
    return {name: values[name].chunk(2)[-1] for name in names}


def _other_strength(pipe, values):
    pipe._cross_attention_kwargs = {"scale": 0.3}


def _other_prompt(pipe, values):
    return {"prompt_embeds": values["prompt_embeds"].flip(1)}


def _edit(pipe, values):
    values["prompt_embeds"][:, 3] *= 2


MID_RUN = {
    "guidance_off": _no_guidance,
    "prompt_changed": _other_prompt,
    "inplace_edit": _edit,
}


@pytest.mark.parametrize("change", [None, *MID_RUN])
def test_latents_equal_with_and_without(shared, change):
    arguments = {} if change is None else _after_first_step(MID_RUN[change])
    wanted = _run(shared, **arguments)
    plain = _run(shared)
    with _Held(shared) as held:
        assert torch.equal(_run(shared, **arguments), wanted)
        assert held.kv.misses == 0
        assert held.kv.hits == LAYERS * STEPS
        assert torch.equal(wanted, plain) is (change is None)


def test_an_edit_within_a_call_is_seen(shared):
    def edited():
        edits = []

        def edit(module, args, kwargs):
            if not edits:
                edits.append(kwargs["encoder_hidden_states"].mul_(2))

        handle = shared.unet.mid_block.register_forward_pre_hook(edit, with_kwargs=True)
        latents = _run(shared)
        handle.remove()
        return latents

    wanted = edited()
    with _Held(shared) as held:
        assert torch.equal(edited(), wanted)
        assert 0 < held.kv.misses < LAYERS


def test_batch(shared):
    arguments = {"prompt": ["a", "b"], "num_images_per_prompt": 2, "num_inference_steps": 1}
    wanted = _run(shared, **arguments)
    with _Held(shared) as held:
        assert torch.equal(_run(shared, **arguments), wanted)
        kept = sum(layer.kept.numel() for layer in held.kv._layers.values())
        assert all(layer.kept.shape[:2] == (8, 77) for layer in held.kv._layers.values())
        assert held.kv.n_bytes == 4 * (kept + held.kv._copy.numel())


@pytest.fixture(scope="module")
def with_lora():
    pipe = _load()
    _lora(pipe)
    return pipe


@pytest.mark.parametrize("case", ["plain", "scaled", "scale_mid_run", "set_adapters_mid_run"])
def test_lora(with_lora, case):
    pipe = with_lora
    pipe.unet.set_adapters(["default"], [1.0])
    arguments = {"cross_attention_kwargs": {"scale": 0.7}} if case != "plain" else {}
    if case == "scale_mid_run":
        arguments |= _after_first_step(_other_strength)
    if case == "set_adapters_mid_run":
        arguments = _after_first_step(lambda *_: pipe.unet.set_adapters(["default"], [0.25]))
    wanted = _run(pipe, **arguments)
    pipe.unet.set_adapters(["default"], [1.0])
    with _Held(pipe) as held:
        assert torch.equal(_run(pipe, **arguments), wanted)
        if case == "set_adapters_mid_run":
            assert 0 < held.kv.misses <= LAYERS
        else:
            assert held.kv.misses == 0
            assert held.kv.hits == LAYERS * STEPS


def test_ip_adapter():
    pipe = _load()
    description = with_ip_adapters(describe_pipeline(pipe), ["random:ip-adapter"])
    load_ip_adapters(pipe, [("random:ip-adapter", 1.0)], description)
    arguments = {"ip_adapter_image": Image.new("RGB", (32, 32), "red")}
    wanted = _run(pipe, **arguments)
    with _Held(pipe) as held:
        assert torch.equal(_run(pipe, **arguments), wanted)
        assert (held.kv.misses, held.kv.hits) == (0, LAYERS * STEPS)


def test_controlnet(shared):
    description = with_controlnets(architecture(TINY), ["random:controlnet"], "text")
    net = load_controlnet("random:controlnet", description.components["controlnet"], torch.float32)
    pipe = StableDiffusionXLControlNetPipeline.from_pipe(shared, controlnet=net)
    pipe.set_progress_bar_config(disable=True)
    arguments = {"image": Image.new("RGB", (64, 64), "red")}
    wanted = _run(pipe, **arguments)
    with _Held(pipe) as held:
        filled_in = []
        _watch_fill(held, filled_in)
        assert torch.equal(_run(pipe, **arguments), wanted)
        assert (held.kv.misses, held.kv.hits) == (0, LAYERS * STEPS)
        # the ControlNet begins the loop: not even it is in by then
        assert filled_in == [set()]


def _watch_fill(held, filled_in):
    """Note which components are in whenever a text is computed."""
    phase = held.executor.on_call[0]
    kv = phase._current()["unet"]
    fill = kv.fill

    def watched(*arguments):
        units = {n for n, us in held.executor._units.items() if any(u.loaded for u in us)}
        if fill(*arguments):
            filled_in.append(units)

    kv.fill = watched


def test_fill_runs_before_the_unet_is_in_and_after_the_encoders_are_out(held):
    filled_in = []
    _watch_fill(held, filled_in)
    _run(held.pipe)
    assert filled_in == [set()]


def test_weights_are_out_during_the_denoise_and_in_one_at_a_time(held, monkeypatch):
    executor, unet = held.executor, held.pipe.unet
    names = text_projections(unet)
    chunks = executor._units["unet"][len(executor._used("unet")) :]
    assert chunks
    homes = [data for chunk in chunks for _, data in chunk.pieces(0, chunk.n_bytes)]
    host = [range(data.data_ptr(), data.data_ptr() + data.numel()) for data in homes]

    def out():
        weights = [unet.get_submodule(name).weight for name in names]
        return [any(w.data_ptr() in blob for blob in host) for w in weights]

    ran, linear = [], torch.nn.Linear.forward

    def forward(self, x):
        if any(self is unet.get_submodule(name) for name in names):
            ran.append(out().count(False))
        return linear(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    steps = []
    unet.mid_block.register_forward_pre_hook(lambda *_: steps.append(all(out())))
    _run(held.pipe)
    unet.mid_block._forward_pre_hooks.clear()
    # each layer computed once, with no other layer's weights in; none were in during a step
    assert ran == [1] * len(names)
    assert steps == [True] * STEPS
    assert not any(chunk.loaded for chunk in chunks)


def test_second_picture_of_a_prompt_loads_nothing_and_another_prompt_does(held):
    first = _run(held.pipe)
    moved = []
    kv_weights = held.executor.kv_weights

    def watch(name, paths):
        moved.append(paths)
        return kv_weights(name, paths)

    held.executor.kv_weights = watch
    assert torch.equal(_run(held.pipe), first)
    assert moved == []
    second = _run(held.pipe, prompt="two pears")
    assert len(moved) == LAYERS
    assert not torch.equal(second, first)
    held.release()
    assert torch.equal(_run(held.pipe, prompt="two pears"), second)


def test_gradients_turn_it_off(held):
    _run(held.pipe)
    unet = held.pipe.unet
    text = held.kv._text.clone()
    sample = torch.ones(2, 4, 8, 8, requires_grad=True)
    config = unet.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    added = {"text_embeds": torch.ones(2, pooled), "time_ids": torch.ones(2, 6)}
    hits = held.kv.hits

    def call():
        return unet(sample, 1, encoder_hidden_states=text, added_cond_kwargs=added).sample

    weight = unet.get_submodule(text_projections(unet)[0]).weight
    on_host = weight.data_ptr()
    call().sum().backward()
    assert held.kv.hits == hits
    # the weights stay in for the gradients, until the next call without
    assert weight.data_ptr() != on_host
    assert weight.grad is not None
    unet.zero_grad()
    with torch.no_grad():
        kept = call()
    assert weight.data_ptr() == on_host
    assert held.kv.hits > hits
    assert torch.equal(kept, call().detach())
    with torch.no_grad():
        call()


def test_a_text_of_equal_content_is_found_and_one_of_another_layout_is_not(held):
    _run(held.pipe)
    kv, text = held.kv, held.kv._text
    twin = text.clone()
    assert kv.fill(twin) is False
    assert kv._text is twin
    turned = text.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(turned, text)
    assert kv.fill(turned) is True
    other = turned.clone()
    other[0, 0, 0] += 1
    assert kv.fill(other) is True


def test_changed_weights_and_adapters_make_it_compute_again(held):
    _run(held.pipe)
    first = held.kv
    weight = held.pipe.unet.get_submodule(text_projections(held.pipe.unet)[0]).weight
    with torch.no_grad():
        weight.mul_(1.0)
    hits = first.hits
    _run(held.pipe)
    assert held.kv is first
    assert first.hits == hits + LAYERS * STEPS
    assert first._layers[text_projections(held.pipe.unet)[0]].state() == first._key[1][0]
    # weights that left for an adapter are other layers' afterwards
    held.executor.bring_home()
    held.executor.hold(held.plan)
    _run(held.pipe)
    assert held.kv is not first


def test_layers_that_somebody_listens_to_are_called(held):
    calls = []
    layer = held.pipe.unet.get_submodule(text_projections(held.pipe.unet)[0])
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    _run(held.pipe)
    handle.remove()
    # once to fill, and at each step
    assert len(calls) == 1 + STEPS


def test_a_written_output_is_computed_again(held):
    wanted = _run(held.pipe)
    layer = held.kv._layers[text_projections(held.pipe.unet)[0]]
    layer.kept.zero_()
    held.kv.drop()
    assert torch.equal(_run(held.pipe), wanted)
    layer.kept.zero_()
    assert torch.equal(_run(held.pipe), wanted)


def test_a_plan_without_it_and_the_undo_leave_stock_layers(held):
    _run(held.pipe)
    layers = [held.pipe.unet.get_submodule(name) for name in text_projections(held.pipe.unet)]
    for twin in (copy.deepcopy(held.pipe.unet), pickle.loads(pickle.dumps(held.pipe.unet))):
        assert not any("_compiled_call_impl" in m.__dict__ for m in twin.modules())
    _run(held.pipe)
    assert all("_compiled_call_impl" in layer.__dict__ for layer in layers)
    whole = dataclasses.replace(held.plan, text_kv=False)
    held.executor.hold(whole)
    _run(held.pipe, num_inference_steps=1)
    assert held.kv is None
    assert not any("_compiled_call_impl" in layer.__dict__ for layer in layers)
    held.executor.hold(held.plan)
    _run(held.pipe, num_inference_steps=1)
    held.release()
    assert held.executor.on_call == []
    assert not any("_compiled_call_impl" in layer.__dict__ for layer in layers)


def test_enable_xattn_carries_out_a_plan_that_keeps_the_text(shared, monkeypatch):
    class Moving(Executor):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "moves": True})

    def keeping(*args, _real=session_plans.plan_job, **kwargs):
        plan = _real(*args, **kwargs)
        chunks = plan.placement["denoise"]["unet"]
        denoise = {"unet": chunks - 1}
        placement = {**plan.placement, "denoise": denoise, "text": {}}
        return dataclasses.replace(plan, placement=placement, text_kv=True)

    monkeypatch.setattr(budget_session, "Executor", Moving)
    monkeypatch.setattr(session_plans, "plan_job", keeping)
    shared.enable_xattn(attention_op="torch")
    wanted = _run(shared)
    shared.enable_xattn(vram=8, device="cpu", attention_op="torch")
    executor = shared.__dict__["_sdx_budget"].executor
    assert torch.equal(_run(shared), wanted)
    kv = executor.on_call[0].kv
    assert (kv.misses, kv.hits) == (0, LAYERS * STEPS)
    assert not executor._units["unet"][-1].loaded
    shared.disable_xattn()
    assert torch.equal(_run(shared), _run(shared))
    assert not any("_compiled_call_impl" in m.__dict__ for m in shared.unet.modules())
