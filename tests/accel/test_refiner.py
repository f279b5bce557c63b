"""`--refiner`: two UNets after each other, the same picture as diffusers', one plan for both."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sdx_accel
from sdx_accel.budget.machine import Machine
from sdx_accel.budget.search import make_plan
from sdx_accel.budget.units import GIB
from sdx_accel.errors import CheckpointError, RefusedError
from sdx_accel.runtime import budget_session
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.phase_calls import twin
from sdx_accel.runtime.profiler import Job, profile_job
from sdx_accel.runtime.refiner import check_stages, join_refiner, with_refiner

Cli = Callable[..., Any]
TINY, REFINER = "random:sdxl-tiny", "random:sdxl-refiner-tiny"
SMALL = ("--model", TINY, "--width", 64, "--height", 64, "--seed", 3)


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


@pytest.fixture
def joined() -> Any:
    pipe = load(TINY, dtype="fp32")
    made = join_refiner(pipe, REFINER, with_refiner(architecture(TINY), REFINER))
    made.set_progress_bar_config(disable=True)
    return made


def stock(joined: Any, negative: str | None) -> Any:
    """What diffusers' documentation does with a base and a refiner."""
    from diffusers import StableDiffusionXLImg2ImgPipeline

    base = load(TINY, dtype="fp32")
    refiner = StableDiffusionXLImg2ImgPipeline(
        vae=base.vae, text_encoder=None, text_encoder_2=base.text_encoder_2, tokenizer=None,
        tokenizer_2=base.tokenizer_2, unet=joined.refiner, scheduler=load(TINY).scheduler,
        requires_aesthetics_score=True, force_zeros_for_empty_prompt=False, add_watermarker=False,
    )  # fmt: skip
    for pipe in (base, refiner):
        pipe.set_progress_bar_config(disable=True)
    common = {"prompt": "a cat", "negative_prompt": negative, "num_inference_steps": 5,
              "guidance_scale": 5.0}  # fmt: skip
    latents = base(
        **common, width=64, height=64, denoising_end=0.6, output_type="latent",
        generator=torch.Generator().manual_seed(3),
    ).images  # fmt: skip
    return refiner(**common, image=latents, denoising_start=0.6).images[0]


@pytest.mark.parametrize("negative", [None, "dog"])
def test_case_128_pictures_are_those_of_diffusers_whether_alone_or_second(
    cli: Cli, joined: Any, negative: str | None
) -> None:
    flags = ("--negative", negative) if negative else ()
    # the picture with seed 3: by itself, or as the second one of two
    seeds = ("--seed", 3) if negative else ("--seed", 2, "--num", 2)
    line = ("generate", "a cat", *SMALL[:6], "--steps", 5, *flags, *seeds)
    result = cli(*line, "--refiner", REFINER, "--refiner-start", 0.6)
    assert result.code == 0, result.err
    expected = np.asarray(stock(joined, negative)).astype(int)
    assert abs(pixels(result.paths[-1]) - expected).max() <= 1
    assert "5 steps, " in result.out
    assert "refine: predicted" in result.out
    if negative is None:
        return
    again = cli("generate", "--from", result.paths[0])
    assert (pixels(again.paths[0]) == pixels(result.paths[0])).all()
    plain = cli(*line)
    assert (pixels(plain.paths[0]) != pixels(result.paths[0])).any()


def test_without_guidance_each_unet_predicts_once(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import UNet2DConditionModel

    seen: list[tuple[int, int]] = []
    original = UNet2DConditionModel.forward

    def forward(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if sample.device.type != "meta":
            seen.append((len(self.config.block_out_channels), len(sample)))
        return original(self, sample, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", forward)
    flags = ("--guidance", 1, "--steps", 4, "--refiner", REFINER, "--vram", 6, "--json")
    result = cli("generate", "a cat", *SMALL, *flags)
    assert result.code == 0, result.err
    # 0.8 of the noise are three of four steps: 751, 501 and 251 of 1000, then 1
    assert seen == [(3, 1)] * 3 + [(4, 1)]
    values = json.loads(result.out)
    assert values["settings"]["refiner_start"] == 0.8
    names = ["text", "denoise", "refine", "decode"]
    assert [phase["name"] for phase in values["report"]["phases"]] == names


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--refiner-start 0.8", "give --refiner too"),
        (f"--refiner {REFINER} --refiner-start 1", "--refiner-start 1"),
        (f"--refiner {REFINER} --refiner-start 0", "such as 0.8"),
        (f"--refiner {REFINER} --image in.png", "leave --image or --refiner out"),
        (
            f"--refiner {REFINER} --controlnet random:controlnet --control-image in.png",
            "--refiner with --controlnet is not built yet; built:",
        ),
        (f"--refiner {REFINER} --model random:sd15-tiny", "works after an SDXL base model"),
        ("--refiner random:sdxl-refiner", "reads texts of width 1280"),
        ("--refiner random:refiner", "did you mean 'random:sdxl-refiner"),
        ("--refiner absent/x/y", "absent"),
        (f"--refiner {REFINER} --steps 1", "leaves the base no step"),
        (f"--refiner {REFINER} --steps 4 --scheduler lightning", "leaves the refiner no step"),
    ],
)
def test_refused_before_any_weights(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, flags: str, message: str
) -> None:
    monkeypatch.setattr(
        "sdx_accel.runtime.checkpoints.load", lambda *a, **k: pytest.fail("a model was loaded")
    )
    Image.new("RGB", (64, 64)).save("in.png")
    model = () if "--model" in flags else ("--model", TINY)
    result = cli("generate", "x", *model, *flags.split())
    assert result.code == 2
    assert message in result.err
    lines = [line for line in result.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1


def test_a_folder_is_loaded_by_its_unet_alone(
    joined: Any, saved_tiny_sdxl: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "refiner"
    joined.refiner.save_pretrained(folder / "unet")
    index = {
        "_class_name": "StableDiffusionXLImg2ImgPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "text_encoder": [None, None],
        "force_zeros_for_empty_prompt": False,
    }
    for name in ("vae", "text_encoder_2", "tokenizer_2", "scheduler"):
        (folder / name).symlink_to(saved_tiny_sdxl / name)
    whole = json.loads((saved_tiny_sdxl / "model_index.json").read_text())
    index |= {name: whole[name] for name in ("vae", "text_encoder_2", "tokenizer_2", "scheduler")}
    (folder / "model_index.json").write_text(json.dumps(index))
    described = with_refiner(architecture(TINY), str(folder))
    made = join_refiner(load(TINY, dtype="fp32"), str(folder), described)
    assert made.config.requires_aesthetics_score is True
    assert made.config.refiner_force_zeros is False
    for ours, theirs in zip(made.refiner.parameters(), joined.refiner.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(CheckpointError, match="is no refiner for"):
        with_refiner(architecture(TINY), str(saved_tiny_sdxl))


@pytest.mark.parametrize(
    ("scheduler", "steps", "start", "idle"),
    [(None, 20, 0.8, None), ("dpm++", 20, 0.8, None), (None, 1, 0.8, "base"),
     (None, 20, 0.01, "base"), (None, 4, 0.999, "refiner")],
)  # fmt: skip
def test_both_have_a_step(
    scheduler: str | None, steps: int, start: float, idle: str | None
) -> None:
    if idle is None:
        check_stages(architecture(TINY), scheduler, steps, start)
        return
    with pytest.raises(RefusedError, match=f"leaves the {idle} no step"):
        check_stages(architecture(TINY), scheduler, steps, start)


def test_the_public_refiner_has_its_published_size() -> None:
    unet = twin(
        with_refiner(architecture("random:sdxl"), "random:sdxl-refiner"), "refiner", "float16"
    )
    # the fp16 file of the public refiner's UNet holds 4.52 GB
    assert 2 * sum(p.numel() for p in unet.parameters()) / 1e9 == pytest.approx(4.52, abs=0.01)


@pytest.mark.slow  # 14 s: traces both of SDXL's UNets
def test_eight_gibibytes_never_hold_both_unets() -> None:
    described = with_refiner(architecture("random:sdxl-fp16vae"), "random:sdxl-refiner")

    dtypes = dict.fromkeys(described.components, "float16")
    profile = profile_job(described, Job(512, 512), dtypes)

    def plan(gib: float) -> Any:
        return make_plan(profile, Machine.generic(), round(gib * GIB))

    eight = plan(8)
    assert eight.feasible
    assert eight.predicted_peak_gib <= 8
    whole = {name: len_of(eight, name) for name in ("unet", "refiner")}
    assert eight.placement["denoise"]["unet"] == whole["unet"]
    assert "refiner" not in eight.placement["denoise"]
    assert eight.placement["refine"]["refiner"] == whole["refiner"]
    assert eight.placement["refine"]["unet"] < whole["unet"]
    assert eight.moved_gib_per_picture > 4
    both, alone = (
        sdx_accel.plan(model, vram=8, machine=Machine.generic(), width=512, height=512)
        for model in (described, "random:sdxl-fp16vae")
    )
    # a refiner needs hardly a larger card than its base: its streamed steps take a little more
    assert alone.smallest_budget_gib <= both.smallest_budget_gib <= alone.smallest_budget_gib + 0.1
    large = plan(24)
    assert large.moved_gib_per_picture == 0
    plans = [plan(quarter / 4) for quarter in range(20, 60, 5)]
    assert [p.feasible for p in plans] == sorted(p.feasible for p in plans)
    moved = [p.moved_gib_per_picture for p in plans if p.feasible]
    assert moved == sorted(moved, reverse=True)


def len_of(plan: Any, name: str) -> int:
    phase = plan.phase("denoise" if name == "unet" else "refine")
    return int(phase.resident_units[name].split("/")[1])


def test_placement_never_changes_a_bit(joined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    class Moving(Executor):
        def __init__(self, *args: Any, moves: bool) -> None:
            super().__init__(*args, moves=True)

        def hold(self, plan: Any) -> None:
            # as under a tight budget: nothing stays that a phase does not need
            keep = {"text": ("text_encoder", "text_encoder_2"), "denoise": ("unet",),
                    "refine": ("refiner",), "decode": ("vae",)}  # fmt: skip
            placement = {
                phase: {name: n for name, n in resident.items() if name in keep[phase]}
                for phase, resident in plan.placement.items()
            }
            super().hold(dataclasses.replace(plan, placement=placement))

    monkeypatch.setattr(budget_session, "Executor", Moving)

    def run() -> Any:
        return joined(
            "a cat", width=64, height=64, num_inference_steps=4, output_type="np",
            generator=torch.Generator().manual_seed(0),
        ).images  # fmt: skip

    joined.enable_xattn()
    free = run()
    joined.enable_xattn(vram=8, device="cpu")
    executor = joined.__dict__["_sdx_budget"].executor
    held = []
    original = Executor.enter

    def enter(self: Any, phase: str) -> None:
        before = self.phase
        original(self, phase)
        if self.phase != before:
            loaded = {name for name, units in self._units.items() if any(u.loaded for u in units)}
            held.append((phase, loaded & {"unet", "refiner"}))

    monkeypatch.setattr(Executor, "enter", enter)
    assert (run() == free).all()
    assert executor.moved_bytes > 0
    unique = list(dict.fromkeys((phase, tuple(sorted(loaded))) for phase, loaded in held))
    assert unique == [
        ("text", ()), ("denoise", ("unet",)), ("refine", ("refiner",)), ("decode", ()),
    ]  # fmt: skip
    joined.disable_xattn()
    assert abs(run() - free).max() < 1e-3


def test_no_part_of_it_records_gradients(joined: Any) -> None:
    seen: dict[str, bool] = {}
    parts = [name for name, part in joined.components.items() if isinstance(part, torch.nn.Module)]
    for name in parts:

        def look(module: Any, args: Any, name: str = name) -> None:
            seen[name] = seen.get(name, False) or torch.is_grad_enabled()

        # the VAE is entered through decode(), not through its own forward
        part = getattr(joined, name)
        (part.decoder if name == "vae" else part).register_forward_pre_hook(look)
    with torch.enable_grad():
        joined("a cat", width=64, height=64, num_inference_steps=2, refiner_start=0.5)
    assert seen == dict.fromkeys(parts, False)
