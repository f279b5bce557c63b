"""Pipelines around transformers held to a budget on the CPU: placement changes no bit."""

from typing import Any

import pytest
import torch

import sdx_accel  # noqa: F401  (attaches enable_xattn)
from sdx_accel.errors import BudgetError, SizeError
from sdx_accel.runtime import budget_session

from .dit_case import PIPELINES, STEPS, Moving, build, executor_of, latents

CASES = {
    "sd3": ("sd3", {}),
    "sd3 without guidance, two pictures": (
        "sd3",
        {"guidance_scale": 1.0, "num_images_per_prompt": 2},
    ),
    "sd3 short text": ("sd3", {"max_sequence_length": 32}),
    "flux": ("flux", {}),
    "flux guided": ("flux", {"negative_prompt": "blur", "true_cfg_scale": 2.0}),
    "pixart sigma": ("pixart sigma", {}),
    "pixart alpha": ("pixart alpha", {}),
}

GUIDANCE = dict.fromkeys(CASES, "batched") | {
    "sd3 without guidance, two pictures": "off",
    "flux": "embedded",
    "flux guided": "in turn",
}


@pytest.fixture(scope="module")
def pipes() -> Any:
    """Each pipeline once; tests leave them as they were."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = build(name)
        return made[name]

    return get


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_session, "Executor", Moving)


@pytest.mark.parametrize("case", CASES)
def test_latents_equal_the_unheld_run(pipes: Any, moving: None, case: str) -> None:
    name, arguments = CASES[case]
    pipe = pipes(name)
    pipe.enable_xattn()
    free, other = latents(pipe, **arguments), latents(pipe, seed=1, **arguments)
    assert not torch.equal(free, other)
    pipe.enable_xattn(vram=8, device="cpu")
    executor = executor_of(pipe)
    try:
        held = latents(pipe, **arguments)
        assert torch.equal(free, held)
        moved = executor.moved_bytes
        assert moved >= sum(u.n_bytes for u in executor._units["transformer"])
        planned = pipe.xattn_report().plan
        asked = arguments.get("max_sequence_length")
        assert asked is None or planned.job["tokens"] == asked
        assert planned.numerics["guidance"] == GUIDANCE[case]
        # the second picture of a prompt reads no text
        assert torch.equal(other, latents(pipe, seed=1, **arguments))
        texts = {n for n in executor.modules if n.startswith("text_encoder")}
        assert executor.seen == {"text": texts, "denoise": {"transformer"}}
    finally:
        pipe.disable_xattn()


@pytest.mark.parametrize("name", PIPELINES)
def test_disable_gives_back_the_stock_pipeline(pipes: Any, moving: None, name: str) -> None:
    pipe = pipes(name)
    stock, classes = latents(pipe), {n: type(m) for n, m in pipe.components.items()}
    tensors = [id(p) for p in pipe.transformer.parameters()]
    for budget in (8, 4):
        pipe.enable_xattn(vram=budget, device="cpu")
    latents(pipe)
    pipe.disable_xattn()
    assert {n: type(m) for n, m in pipe.components.items()} == classes
    assert [id(p) for p in pipe.transformer.parameters()] == tensors
    assert torch.equal(stock, latents(pipe))


@pytest.mark.parametrize("name", PIPELINES)
def test_pictures_equal_and_each_phase_is_accounted_for(
    pipes: Any, moving: None, name: str
) -> None:
    pipe = pipes(name)
    pipe.enable_xattn()

    def picture() -> Any:
        usual = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}
        if "PixArt" in type(pipe).__name__:
            usual |= {"use_resolution_binning": False, "clean_caption": False}
        return pipe("a pear", generator=torch.Generator().manual_seed(0), **usual).images

    free = picture()
    pipe.enable_xattn(vram=8, device="cpu")
    try:
        assert (free == picture()).all()
        assert executor_of(pipe).seen["decode"] == {"vae"}
        report = pipe.xattn_report()
        assert [phase.name for phase in report.phases] == ["text", "denoise", "decode"]
        assert report.plan.job["height"] == 64
    finally:
        pipe.disable_xattn()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sd3", "StableDiffusion3Img2ImgPipeline"), ("flux", "FluxImg2ImgPipeline")],
)
def test_from_a_picture(pipes: Any, moving: None, name: str, kind: str) -> None:
    import diffusers

    pipe = getattr(diffusers, kind).from_pipe(pipes(name))
    pipe.set_progress_bar_config(disable=True)
    picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    pipe.enable_xattn()
    free = latents(pipe, image=picture, strength=0.5)
    pipe.enable_xattn(vram=8, device="cpu")
    try:
        assert torch.equal(free, latents(pipe, image=picture, strength=0.5))
        assert executor_of(pipe).seen["encode"] == {"vae"}
        phases = [phase.name for phase in pipe.xattn_report().plan.phases]
        assert phases == ["text", "encode", "denoise", "decode"]
    finally:
        pipe.disable_xattn()


def test_without_the_long_text_encoder(moving: None) -> None:
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pipe(build("sd3"), text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    pipe.enable_xattn()
    free = latents(pipe)
    pipe.enable_xattn(vram=8, device="cpu")
    assert torch.equal(free, latents(pipe))
    assert "text_encoder_3" not in executor_of(pipe).modules
    # the pipeline fills the place of that text with zeros
    assert pipe.xattn_report().plan.job["tokens"] == 256


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_a_lora_is_part_of_the_plan(moving: None, name: str) -> None:
    from peft import LoraConfig

    pipe = build(name)
    pipe.enable_xattn(vram=8, device="cpu")
    without = latents(pipe)
    before = sum(u.n_bytes for u in executor_of(pipe)._units["transformer"])
    torch.manual_seed(0)
    pipe.transformer.add_adapter(
        LoraConfig(r=4, target_modules=["to_q", "to_v", "add_k_proj"], init_lora_weights=False)
    )
    held = latents(pipe)
    assert sum(u.n_bytes for u in executor_of(pipe)._units["transformer"]) > before
    pipe.disable_xattn()
    pipe.enable_xattn()
    assert torch.equal(held, latents(pipe))
    assert not torch.equal(held, without)


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_a_refused_step_is_repeated(pipes: Any, moving: None, name: str) -> None:
    pipe = pipes(name)
    pipe.enable_xattn()
    free = latents(pipe)
    pipe.enable_xattn(vram=8, device="cpu")
    calls = []

    def refuse(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")

    block = pipe.transformer.transformer_blocks[-1]
    handle = block.register_forward_pre_hook(refuse)
    try:
        assert torch.equal(free, latents(pipe))
        assert len(calls) == STEPS + 1
        assert [r.component for r in executor_of(pipe).retries] == ["transformer"]
    finally:
        handle.remove()
        pipe.disable_xattn()


@pytest.mark.parametrize("name", ["sd3", pytest.param("flux", marks=pytest.mark.slow)])
def test_what_does_not_fit_is_refused_before_any_text_is_read(pipes: Any, name: str) -> None:
    pipe = pipes(name)
    pipe.enable_xattn(vram=1, device="cpu")
    ran: list[int] = []
    handle = pipe.text_encoder.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(BudgetError, match="smallest budget that works"):
            latents(pipe, height=384, width=384, num_images_per_prompt=24)
        assert not ran
    finally:
        handle.remove()
        pipe.disable_xattn()


def test_sizes_that_a_pipeline_refuses_keep_its_own_words(pipes: Any) -> None:
    pipe = pipes("sd3")
    pipe.enable_xattn(vram=8, device="cpu")
    try:
        with pytest.raises(ValueError, match="divisible by 16"):
            latents(pipe, height=72)
        with pytest.raises(SizeError, match=r"width 512 is more .* positions end at 384"):
            latents(pipe, width=512)
    finally:
        pipe.disable_xattn()
