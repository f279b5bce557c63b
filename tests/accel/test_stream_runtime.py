"""Whole pictures with weights that pass through a ring: bits never change."""

import copy

import pytest
import torch

from sdx_accel.runtime import budget_session, profiler, stream_order
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.controlnets import load_controlnet, with_controlnets
from sdx_accel.runtime.executor import Executor

from .stream_case import Early, Late, streaming

STEPS = 2
KIB = 1 << 10


@pytest.fixture(scope="module", autouse=True)
def small_units():
    """Units of at most 400 KiB: 70 of them in the tiny UNet, instead of 12."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_order, "STREAM_BYTES", 400 * KIB)
        profiler._traced.cache_clear()
        yield
    profiler._traced.cache_clear()


@pytest.fixture
def stream(monkeypatch):
    """`stream(pipe, …)` has a pipeline run from a ring, and gives its executor."""

    def begin(pipe, copies=None, phases=("denoise",), resident=2, ring=2):
        class Moving(Executor):
            def __init__(self, *args, moves):
                super().__init__(*args, moves=True, copies=copies or Late())
                self.passes = []

            def hold(self, plan):
                super().hold(streaming(plan, self.modules, phases, resident, ring))

            def _stop_stream(self):
                if self.streamer is not None:
                    self.passes.append(self.streamer.passes)
                super()._stop_stream()

        monkeypatch.setattr(budget_session, "Executor", Moving)
        pipe.enable_xattn(vram=8, device="cpu")
        return pipe.__dict__["_sdx_budget"].executor

    return begin


@pytest.fixture(scope="module")
def loaded():
    pipe = load("random:sdxl-tiny", dtype="fp32")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def pipe(loaded):
    yield loaded
    loaded.disable_xattn()


def _run(pipe, seed=0, **arguments):
    arguments = {"height": 64, "width": 64, "num_inference_steps": STEPS, **arguments}
    return pipe(
        "a red apple",
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        **arguments,
    ).images


@pytest.fixture(scope="module")
def latents(loaded, small_units):
    """What the same pipeline makes with everything in place."""
    loaded.enable_xattn()
    made = _run(loaded)
    loaded.disable_xattn()
    return made


@pytest.mark.parametrize("copies", [Late, Early])
def test_latents_equal_the_resident_run(pipe, stream, latents, copies):
    executor = stream(pipe, copies())
    assert torch.equal(_run(pipe), latents)
    assert torch.equal(_run(pipe), latents)
    assert executor.passes == [STEPS, STEPS]


def test_layouts_of_the_planner(pipe, stream, latents):
    executor = stream(pipe, Early(), ring=None)
    assert torch.equal(_run(pipe), latents)
    assert executor.passes == [STEPS]
    (planned,) = executor.plan.streams
    assert planned.streamed_bytes > 0
    assert planned.components == ("unet",)


def test_text_encoders_stream_too(pipe, stream, latents):
    executor = stream(pipe, phases=("text", "denoise"), resident=3)
    assert torch.equal(_run(pipe), latents)
    assert executor.passes == [1, STEPS]


def _both(pipe, stream, run, **options):
    """(resident, streamed) results of the same call."""
    pipe.enable_xattn()
    resident = run()
    pipe.disable_xattn()
    executor = stream(pipe, Early(), **options)
    return resident, run(), executor


def test_two_pictures_without_guidance(pipe, stream):
    arguments = {"guidance_scale": 1.0, "num_images_per_prompt": 2, "num_inference_steps": 1}
    resident, streamed, executor = _both(pipe, stream, lambda: _run(pipe, **arguments))
    assert torch.equal(resident, streamed)
    assert executor.passes == [1]


def test_from_a_picture(pipe, stream):
    from diffusers import AutoPipelineForImage2Image

    picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    other = AutoPipelineForImage2Image.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)

    def run():
        return other(
            "a red apple",
            image=picture,
            strength=0.5,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).images

    resident, streamed, executor = _both(other, stream, run)
    other.disable_xattn()
    assert torch.equal(resident, streamed)
    assert executor.passes == [1]


def test_a_controlnet_is_part_of_the_cycle(pipe, stream):
    from diffusers import StableDiffusionXLControlNetPipeline

    described = with_controlnets(architecture("random:sdxl-tiny"), ["random:controlnet"], "text")
    net = load_controlnet("random:controlnet", described.components["controlnet"], torch.float32)
    guided = StableDiffusionXLControlNetPipeline(
        **pipe.components, controlnet=net, add_watermarker=False
    )
    guided.set_progress_bar_config(disable=True)
    picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))

    def run(end):
        return _run(guided, image=picture, control_guidance_end=end)

    # with the ControlNet in each step, and in the first only
    resident, streamed, executor = _both(guided, stream, lambda: [run(1.0), run(0.5)])
    assert executor.plan.streams[0].components == ("controlnet", "unet")
    guided.disable_xattn()
    assert torch.equal(resident[0], streamed[0])
    assert torch.equal(resident[1], streamed[1])
    assert not torch.equal(*streamed)


def test_with_a_lora(stream):
    from peft import LoraConfig

    pipe = load("random:sdxl-tiny", dtype="fp32")
    pipe.set_progress_bar_config(disable=True)
    stream(pipe)
    without = _run(pipe)
    config = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)
    torch.manual_seed(0)
    pipe.unet.add_adapter(config)
    streamed = _run(pipe)
    executor = pipe.__dict__["_sdx_budget"].executor
    assert executor.passes == [STEPS, STEPS]
    # a layer with its adapter is one unit or part of one
    names = [unit.name for unit in executor._splits["unet"].stream]
    assert not any("lora" in name or "base_layer" in name for name in names)
    pipe.disable_xattn()
    pipe.enable_xattn()
    assert torch.equal(_run(pipe), streamed)
    assert not torch.equal(streamed, without)


def test_a_copy_in_the_middle_of_a_run_is_stock_and_disturbs_nothing(pipe, stream, latents):
    stream(pipe)
    copies = []

    def copied(pipe, step, timestep, values):
        copies.append(copy.deepcopy(pipe.unet))
        return {}

    assert torch.equal(_run(pipe, callback_on_step_end=copied), latents)
    for twin in copies:
        assert not any(stream_order.CALL in module.__dict__ for module in twin.modules())
        assert not twin._state_dict_pre_hooks
        for name, tensor in twin.named_parameters():
            assert torch.equal(tensor, pipe.unet.get_parameter(name))


def test_schedulers_with_two_calls_a_step(pipe, stream):
    from diffusers import HeunDiscreteScheduler

    stock = pipe.scheduler
    pipe.scheduler = HeunDiscreteScheduler.from_config(stock.config)
    try:
        resident, streamed, executor = _both(pipe, stream, lambda: _run(pipe))
    finally:
        pipe.scheduler = stock
    assert torch.equal(resident, streamed)
    assert executor.passes == [2 * STEPS - 1]


def test_weights_can_be_read_after_each_picture_and_in_the_middle(pipe, stream, latents):
    before = {name: t.clone() for name, t in pipe.unet.named_parameters()}
    executor = stream(pipe)
    assert torch.equal(_run(pipe), latents)
    found = [{name: t.clone() for name, t in pipe.unet.named_parameters()}]

    def read(pipe, step, timestep, values):
        found.append({name: t.clone() for name, t in pipe.unet.state_dict().items()})
        return {}

    assert torch.equal(_run(pipe, callback_on_step_end=read), latents)
    # begun anew for the step after each reading
    assert executor.passes == [STEPS, *[1] * STEPS]
    for state in found:
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


def test_disable_gives_back_the_stock_model(pipe, stream):
    keys = {name: set(m.__dict__) for name, m in pipe.unet.named_modules()}
    tensors = [id(p) for p in pipe.unet.parameters()]
    stream(pipe)
    _run(pipe)
    pipe.disable_xattn()
    assert {name: set(m.__dict__) for name, m in pipe.unet.named_modules()} == keys
    assert [id(p) for p in pipe.unet.parameters()] == tensors
