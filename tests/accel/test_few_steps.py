"""Models distilled to a few steps: their schedules by name, one prediction a step, and messages."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sdx_accel
from sdx_accel.budget.machine import Machine
from sdx_accel.cli.metadata import read_record
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.schedulers import make_scheduler

Cli = Callable[..., Any]
TINY = "random:sdxl-tiny"
SMALL = ("--model", TINY, "--width", 64, "--height", 64, "--seed", 3)


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


@pytest.mark.parametrize(
    ("name", "kind", "steps"),
    [
        # a quarter of the way each, from the last timestep down: what they were distilled on
        ("lightning", "EulerDiscreteScheduler", [999, 749, 499, 249]),
        ("turbo", "EulerAncestralDiscreteScheduler", [999, 749, 499, 249]),
        # four of the fifty steps of the model that an LCM was distilled from
        ("lcm", "LCMScheduler", [999, 759, 499, 259]),
    ],
)
def test_schedules(name: str, kind: str, steps: list[int]) -> None:
    for spec in (TINY, "random:sd15-tiny"):
        scheduler = make_scheduler(name, architecture(spec).scheduler[1])
        scheduler.set_timesteps(4)
        assert type(scheduler).__name__ == kind
        assert [int(step) for step in scheduler.timesteps] == steps
        assert scheduler.config.beta_schedule == "scaled_linear"


@pytest.mark.parametrize("name", ["lcm", "lightning", "turbo"])
def test_a_name_is_enough_and_each_step_predicts_once(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from diffusers import UNet2DConditionModel

    batches: list[int] = []
    original = UNet2DConditionModel.forward

    def forward(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if sample.device.type != "meta":
            batches.append(len(sample))
        return original(self, sample, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", forward)
    result = cli("generate", "a cat", *SMALL, "--scheduler", name.upper(), "--num", 2)
    assert result.code == 0, result.err
    assert batches == [1] * 8
    assert "4 steps, guidance 1" in result.out
    assert "guidance off" in result.out
    assert "note" not in result.err
    job = read_record(str(result.paths[0])).job
    assert (job.steps, job.guidance) == (4, 1.0)
    # samplers that add noise draw it from the picture's own generator
    again = cli("generate", "--from", result.paths[1])
    assert (pixels(again.paths[0]) == pixels(result.paths[1])).all()


def test_plan_counts_one_prediction(cli: Cli) -> None:
    def plan(*flags: Any) -> Any:
        result = cli("plan", "--model", TINY, "--width", 512, "--height", 512, *flags, "--json")
        assert result.code == 0, result.err
        return sdx_accel.Plan.from_json(result.out)

    guided, named = plan(), plan("--scheduler", "lightning")
    assert (guided.job["guided"], named.job["guided"]) == (True, False)
    assert (guided.numerics["guidance"], named.numerics["guidance"]) == ("batched", "off")
    peaks = [max(p.phase("denoise").curve_mib) for p in (guided, named)]
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--scheduler lightning --guidance 7.5", "made to run without guidance"),
        ("--scheduler turbo --guidance 2", "use --guidance 1"),
        ("--scheduler lcm --guidance 7.5", "with a guidance of 1 to 2"),
        ("--scheduler lcm --steps 20", "made for 4 to 8 steps"),
        ("--scheduler turbo --negative dog", "the negative prompt is ignored"),
    ],
)
def test_unusual_settings_are_said_and_done(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, flags: str, message: str
) -> None:
    class Stop(Exception):
        pass

    def load(*_: Any, **__: Any) -> None:
        raise Stop

    monkeypatch.setattr("sdx_accel.runtime.checkpoints.load", load)
    result = cli("generate", "x", *SMALL, *flags.split())
    assert "Stop" in result.err
    assert result.err.count(message) == 1


@pytest.mark.parametrize("flags", ["--scheduler lcm --guidance 2", "--scheduler lcm --steps 8"])
def test_usual_settings_are_not_commented(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setattr("sdx_accel.runtime.checkpoints.load", lambda *a, **k: 1 / 0)
    assert "note" not in cli("generate", "x", *SMALL, *flags.split()).err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--scheduler lcm --steps 51", "does at most 50"),
        ("--scheduler lightening", "did you mean 'lightning'"),
    ],
)
def test_refused_before_any_weights(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, flags: str, message: str
) -> None:
    monkeypatch.setattr(
        "sdx_accel.runtime.checkpoints.load", lambda *a, **k: pytest.fail("a model was loaded")
    )
    result = cli("generate", "x", *SMALL, *flags.split())
    assert result.code == 2
    assert message in result.err


def test_guidance_inside_the_unet_takes_one_prediction() -> None:
    """Whole LCM models (`time_cond_proj_dim`): any guidance is an input, nothing is doubled."""
    plain = architecture(TINY)
    unet = plain.components["unet"]
    inside = replace(unet, config={**unet.config, "time_cond_proj_dim": 32})
    described = replace(plain, components={**plain.components, "unet": inside})
    plans = [
        sdx_accel.plan(model, vram=8, guidance=guidance, machine=Machine.generic())
        for model, guidance in ((described, 8.0), (plain, 0.0))
    ]
    assert plans[0].job["guided"] is False
    # its plan is that of no guidance but for the strength's embedding, half a kilobyte
    peaks = [max(plan.phase("denoise").curve_mib) for plan in plans]
    assert peaks[0] == pytest.approx(peaks[1], abs=0.1)


def test_four_steps_img2img(cli: Cli) -> None:
    Image.new("RGB", (64, 64), "gray").save("in.png")
    result = cli(
        "generate", "x", "--model", TINY, "--image", "in.png", "--scheduler", "turbo",
        "--strength", 0.5, "--seed", 1,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "picture: 2 steps" in result.out


def test_the_stock_pipeline_gives_the_same_picture(cli: Cli) -> None:
    result = cli("generate", "a cat", *SMALL, "--scheduler", "lightning")
    from diffusers import EulerDiscreteScheduler

    stock = load(TINY, dtype="fp32")
    stock.scheduler = EulerDiscreteScheduler.from_config(
        stock.scheduler.config, timestep_spacing="trailing"
    )
    stock.set_progress_bar_config(disable=True)
    picture = stock(
        "a cat", width=64, height=64, num_inference_steps=4, guidance_scale=0,
        generator=torch.Generator().manual_seed(3),
    ).images[0]  # fmt: skip
    assert abs(pixels(result.paths[0]) - np.asarray(picture).astype(int)).max() <= 1
