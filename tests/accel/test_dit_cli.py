"""Transformers on the command line: tiny ones make pictures, the public ones are planned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sdx_accel.cli.defaults import fill_defaults
from sdx_accel.runtime.checkpoints import describe

from .conftest import CliResult

Cli = Callable[..., CliResult]


@pytest.mark.parametrize("spec", ["random:sd3-tiny", "random:flux-tiny"])
def test_a_picture_its_replay_and_one_from_it(cli: Cli, spec: str) -> None:
    size = ("--width", 96, "--height", 64)
    made = cli("generate", "a red apple", "-m", spec, "--steps", 2, "--vram", 4, *size)
    assert made.code == 0, made.err
    (first,) = made.paths
    again = cli("generate", "--from", first, "-o", "again.png")
    assert again.code == 0, again.err
    other = cli("generate", "x", "-m", spec, "--steps", 2, "--image", first, "-o", "other.png")
    assert other.code == 0, other.err
    pictures = [Image.open(path) for path in (first, *again.paths, *other.paths)]
    assert [picture.size for picture in pictures] == [(96, 64)] * 3
    assert pictures[0].tobytes() == pictures[1].tobytes()
    assert pictures[0].tobytes() != pictures[2].tobytes()


def test_sd3_is_planned_by_name(cli: Cli) -> None:
    fits = cli("plan", "-m", "random:sd3", "--vram", 8, "--width", 256, "--height", 256, "--json")
    assert fits.code == 0, fits.err
    plan = json.loads(fits.out)
    assert plan["feasible"]
    assert [phase["name"] for phase in plan["phases"]] == ["text", "denoise", "decode"]
    little = cli("plan", "-m", "random:sd3-tiny", "--vram", 0.7)
    assert little.code == 1
    assert "does not fit" in little.out + little.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--scheduler", "euler"), "flow-matching models keep their own scheduler"),
        (("--width", 104), "width 104 is none that this model can do"),
        (("--width", 512), "positions end at 384"),
    ],
)
def test_what_a_transformer_cannot_do_is_said(
    cli: Cli, flags: tuple[object, ...], said: str
) -> None:
    refused = cli("generate", "x", "-m", "random:sd3-tiny", *flags)
    assert refused.code != 0
    assert said in refused.err
    assert not list(Path().glob("**/*.png"))


@pytest.mark.parametrize(
    ("spec", "steps", "guidance"),
    [
        ("random:flux", 20, 3.5),
        ("random:sd3", 20, 7.0),
        ("random:pixart-sigma", 20, 4.5),
        ("random:sdxl", 20, 5.0),
        ("random:sd15", 20, 7.5),
        ("demo", 20, 4.0),
    ],
)
def test_guidance_is_what_the_pipeline_takes_by_itself(
    spec: str, steps: int, guidance: float
) -> None:
    settings: dict[str, Any] = {"model": spec}
    fill_defaults(settings, describe(spec), None, print)
    assert (settings["steps"], settings["guidance"]) == (steps, guidance)
