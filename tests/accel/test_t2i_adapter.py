"""T2I-Adapters under a budget: counted, held, and the same pictures as without one."""

import dataclasses
from typing import Any

import pytest
import torch
from diffusers import (
    MultiAdapter,
    StableDiffusionAdapterPipeline,
    StableDiffusionXLAdapterPipeline,
    T2IAdapter,
)
from PIL import Image

import sdx_accel
from sdx_accel.budget.machine import Machine
from sdx_accel.errors import SizeError
from sdx_accel.runtime import budget_session, session_plans
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.descriptions import ComponentDescription
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.pipeline_parts import pipeline_models
from sdx_accel.runtime.profiler import Job, profile_job

XL, SD = "random:sdxl-tiny", "random:sd15-tiny"
TINY_XL = {"channels": [32, 64, 64, 64], "downscale_factor": 16, "adapter_type": "full_adapter_xl"}
TINY_SD = {"channels": [32, 64, 64, 64], "downscale_factor": 8, "adapter_type": "full_adapter"}
STEPS = 2


def _adapter(seed: int = 0, **config: Any) -> T2IAdapter:
    torch.manual_seed(seed)
    return T2IAdapter(num_res_blocks=1, **config).eval()


def _load(spec: str = XL, count: int = 1) -> Any:
    pipe = load(spec, dtype="fp32")
    config = TINY_XL if spec == XL else TINY_SD
    adapters = [_adapter(seed, **config) for seed in range(count)]
    kind = StableDiffusionXLAdapterPipeline if spec == XL else StableDiffusionAdapterPipeline
    parts = {**pipe.components, "adapter": adapters[0] if count == 1 else MultiAdapter(adapters)}
    if spec == SD:
        parts.pop("image_encoder")
        parts["requires_safety_checker"] = False
    pipe = kind(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def shared() -> Any:
    """A pipeline that every test leaves as it was."""
    return _load()


def _picture(side: int = 64, shade: str = "red") -> Image.Image:
    picture = Image.new("RGB", (side, side), shade)
    picture.paste("blue", (0, 0, side // 2, side // 3))
    return picture


def _run(pipe: Any, **arguments: Any) -> torch.Tensor:
    count = sum(name.startswith("adapter") for name in pipeline_models(pipe))
    arguments = {
        "prompt": "a red apple", "num_inference_steps": STEPS, "output_type": "latent",
        "image": _picture() if count == 1 else [_picture(), _picture(shade="green")], **arguments,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    images = pipe(generator=generator, **arguments).images
    return torch.as_tensor(images)


def _wanted(pipe: Any, **arguments: Any) -> torch.Tensor:
    """The same attention without a budget."""
    pipe.enable_xattn(attention_op="torch")
    latents = _run(pipe, **arguments)
    pipe.disable_xattn()
    return latents


class _Moving(Executor):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "moves": True})


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights move between two sets of storage, and each phase's models are in alone."""

    def alone(*args: Any, _real: Any = session_plans.plan_job, **kwargs: Any) -> Any:
        plan = _real(*args, **kwargs)
        own = {"text": "text_encoder", "encode": "adapter", "denoise": "unet", "decode": "vae"}
        placement = {
            phase: {name: n for name, n in placed.items() if name.startswith(own[phase])}
            for phase, placed in plan.placement.items()
        }
        return dataclasses.replace(plan, placement=placement)

    monkeypatch.setattr(budget_session, "Executor", _Moving)
    monkeypatch.setattr(session_plans, "plan_job", alone)


def _hold(pipe: Any) -> Any:
    pipe.enable_xattn(vram=8, device="cpu", attention_op="torch")
    return pipe.__dict__["_sdx_budget"].executor


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weak": {"adapter_conditioning_scale": 0.3},
    "unguided": {"guidance_scale": 1.0},
    "several_pictures": {"num_images_per_prompt": 2},
    "pixels": {"output_type": "np"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_pictures_as_without_a_budget(shared: Any, moving: None, case: str) -> None:
    wanted, other = _wanted(shared, **CASES[case]), _wanted(shared, image=_picture(shade="white"))
    assert wanted.shape != other.shape or not torch.equal(wanted, other)
    executor = _hold(shared)
    assert torch.equal(_run(shared, **CASES[case]), wanted)
    assert torch.equal(_run(shared, **CASES[case]), wanted)
    phases = ["text", "encode", "denoise"] + ["decode"] * (case == "pixels")
    assert [record.name for record in executor.audit.records.values()] == phases
    assert executor.moved_bytes > 0
    shared.disable_xattn()
    assert torch.equal(_wanted(shared, **CASES[case]), wanted)


def test_sd15(moving: None) -> None:
    pipe = _load(SD)
    wanted = _wanted(pipe)
    assert not torch.equal(wanted, _wanted(pipe, image=_picture(shade="white")))
    _hold(pipe)
    assert torch.equal(_run(pipe), wanted)


def test_an_adapter_that_ends_early(shared: Any, moving: None) -> None:
    arguments = {"adapter_conditioning_factor": 0.5}
    wanted = _wanted(shared, **arguments)
    assert not torch.equal(wanted, _wanted(shared))
    _hold(shared)
    assert torch.equal(_run(shared, **arguments), wanted)
    shared.disable_xattn()


def test_two_adapters_are_listed_and_held_singly(moving: None) -> None:
    pipe = _load(count=2)
    wanted = _wanted(pipe, adapter_conditioning_scale=[0.5, 0.8])
    executor = _hold(pipe)
    assert {"adapter", "adapter_2"} <= set(executor.modules)
    assert torch.equal(_run(pipe, adapter_conditioning_scale=[0.5, 0.8]), wanted)
    assert pipe.xattn_report().plan.placement["encode"] == {"adapter": 1, "adapter_2": 1}
    pipe.disable_xattn()
    assert torch.equal(_wanted(pipe, adapter_conditioning_scale=[0.5, 0.8]), wanted)


def test_only_the_adapter_is_in_for_its_phase(shared: Any, moving: None) -> None:
    executor, seen = _hold(shared), []

    def look(name: str) -> Any:
        def hook(*_: Any) -> None:
            units = executor._units.items()
            seen.append((name, {n for n, us in units if any(u.loaded for u in us)}))

        return hook

    handles = [
        getattr(shared, name).register_forward_pre_hook(look(name)) for name in ("adapter", "unet")
    ]
    _run(shared)
    for handle in handles:
        handle.remove()
    shared.disable_xattn()
    assert seen == [("adapter", {"adapter"}), *[("unet", {"unet"})] * STEPS]


def test_a_refused_adapter_is_called_again(shared: Any, moving: None) -> None:
    wanted = _wanted(shared)
    executor, calls = _hold(shared), []

    def refuse(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("injected")

    handle = shared.adapter.adapter.body[1].register_forward_pre_hook(refuse)
    assert torch.equal(_run(shared), wanted)
    handle.remove()
    assert [(each.phase, each.component) for each in executor.retries] == [("encode", "adapter")]
    shared.disable_xattn()


def test_a_size_is_rounded_as_the_pipeline_does(shared: Any) -> None:
    shared.enable_xattn(vram=8, device="cpu", attention_op="torch")
    # 104 would do for the VAE
    latents = _run(shared, image=_picture(104))
    job = shared.xattn_report().plan.job
    assert latents.shape[-2:] == (96 // 8, 96 // 8)
    assert (job["height"], job["width"], job["encode"]) == (96, 96, False)
    shared.disable_xattn()


def test_undo_is_exact(shared: Any) -> None:
    def state() -> Any:
        return {
            name: (type(part), sorted(vars(part)), [p.data_ptr() for p in part.parameters()])
            for name, part in pipeline_models(shared).items()
        }

    before = state()
    shared.enable_xattn(vram=8, device="cpu")
    _run(shared)
    assert "_sdx_held" in vars(shared.adapter)
    shared.disable_xattn()
    assert state() == before


FULL_XL = {
    "channels": [320, 640, 1280, 1280], "downscale_factor": 16, "adapter_type": "full_adapter_xl",
}  # fmt: skip


def _described(spec: str = XL, count: int = 1) -> Any:
    """A model with adapters, for SDXL in the shape of its public ones."""
    description = architecture(spec)
    config = {"in_channels": 3, "num_res_blocks": 2, **(TINY_XL if spec == XL else FULL_XL)}
    adapters = {
        name: ComponentDescription(name, "diffusers", "T2IAdapter", config)
        for name in ("adapter", "adapter_2")[:count]
    }
    return dataclasses.replace(
        description,
        pipeline_class="StableDiffusionXLAdapterPipeline",
        components={**description.components, **adapters},
    )


@pytest.mark.parametrize(
    ("spec", "side"),
    [(XL, 128), pytest.param("random:sdxl-fp16vae", 1024, marks=pytest.mark.slow)],
)
def test_the_plan_counts_its_weights_and_the_features_that_stay(spec: str, side: int) -> None:
    job, plain, described = Job(side, side, bands="low"), architecture(spec), _described(spec)
    with_one = profile_job(described, job, dict.fromkeys(described.components, "float16"))
    without = profile_job(plain, job, dict.fromkeys(plain.components, "float16"))
    assert [phase.name for phase in with_one.phases] == ["text", "encode", "denoise", "decode"]
    (adapter,) = (c for c in with_one.components if c.name == "adapter")
    assert adapter.phases == ("encode",)
    config = described.components["adapter"].config
    weights = sum(p.numel() * 2 for p in T2IAdapter(**config).parameters())
    assert adapter.n_bytes == pytest.approx(weights, rel=0.01)
    # of two predictions in 16 bits, and the picture, that live to the end: 25 + 6 MiB of SDXL
    first, second, third, fourth = config["channels"]
    large, small = (side // 16) ** 2, (side // 32) ** 2
    features = 2 * 2 * ((first + second) * large + (third + fourth) * small)
    living = features + 2 * 3 * side**2

    def grown(name: str) -> int:
        one, none = (
            next(p for p in profile.phases if p.name == name) for profile in (with_one, without)
        )
        return max(_live(one.events)) - max(_live(none.events))

    assert grown("decode") == living
    # a step copies them for the UNet, which lets each go as it adds it
    assert living <= grown("denoise") <= living + features
    (encode,) = (p for p in with_one.phases if p.name == "encode")
    assert encode.carries == ()
    assert max(_live(encode.events)) >= living
    # what the phases before it compute is the model's
    assert (
        next(p for p in without.phases if p.name == "text").events
        == next(p for p in with_one.phases if p.name == "text").events
    )


def _live(events: Any) -> list[int]:
    live, found = 0, [0]
    for kind, _, size in events:
        live += kind * size
        found.append(live)
    return found


def test_a_plan_by_description_and_by_pipeline(shared: Any) -> None:
    machine = Machine.generic()
    none = sdx_accel.plan(XL, vram=8, machine=machine)
    one, two = (sdx_accel.plan(_described(XL, n), vram=8, machine=machine) for n in (1, 2))
    assert one.feasible
    assert none.host_gib < one.host_gib
    assert two.host_gib - one.host_gib == pytest.approx(one.host_gib - none.host_gib, abs=2e-4)
    assert one.job["encode"] is False
    encode = one.phase("encode")
    assert encode is not None
    assert "adapter" in encode.resident_gib
    live = sdx_accel.plan(shared, vram=8, machine=machine, height=64, width=64, image=True)
    assert live.placement["encode"]["adapter"] == 1
    assert live.job["encode"] is False
    with pytest.raises(SizeError, match="multiple of 16; the nearest: 64 or 80"):
        sdx_accel.plan(shared, vram=8, machine=machine, height=72, width=64)
