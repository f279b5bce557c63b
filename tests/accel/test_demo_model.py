"""The model that comes with the package: its files, what it draws, and that ours draws the same."""

import contextlib
import io
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sdx_accel
import sdx_patches
from sdx_accel.api import Report
from sdx_accel.cli.metadata import read_record
from sdx_accel.errors import CheckpointError
from sdx_accel.runtime import budget_session, shipped
from sdx_accel.runtime.checkpoint_files import read_header
from sdx_accel.runtime.checkpoints import describe, load
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.meta_models import meta_component

Cli = Callable[..., Any]
FOLDER = Path(sdx_accel.__file__).parent / "demo" / "model"
STEPS, GUIDANCE = 20, 4.0


def draw(pipe: Any, *prompts: str, steps: int = STEPS, seed: int = 7) -> np.ndarray[Any, Any]:
    """(N, 128, 128, 3) between 0 and 1, each picture from the same noise."""
    pipe.set_progress_bar_config(disable=True)
    found: np.ndarray[Any, Any] = pipe(
        list(prompts),
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        generator=[torch.Generator().manual_seed(seed) for _ in prompts],
        output_type="np",
    ).images
    return found


def psnr(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    error = float(((one.astype(np.float64) - other) ** 2).mean())
    return float("inf") if error == 0 else -10 * float(np.log10(error))


def round_thing(picture: np.ndarray[Any, Any], channel: int) -> bool:
    """On white, with a middle of one colour: 0 red, 1 green, 2 blue."""
    border = np.ones(picture.shape[:2], bool)
    border[2:-2, 2:-2] = False
    white = (picture[border].min(-1) > 0.95).mean() > 0.95
    middle = picture[48:80, 48:80].reshape(-1, 3).mean(0)
    others = np.delete(middle, channel)
    return bool(white and middle[channel] > 0.55 and (others < middle[channel] - 0.1).all())


def red_apple(picture: np.ndarray[Any, Any]) -> bool:
    """A red middle under a green leaf, on white."""
    top = picture[:32].reshape(-1, 3)
    leaf = (top[:, 1] > top[:, 0] + 0.2) & (top[:, 1] > top[:, 2] + 0.1)
    return round_thing(picture, 0) and 0.02 < leaf.mean() < 0.4


@pytest.fixture(scope="module")
def pipe() -> Any:
    return sdx_accel.demo.load()


@pytest.fixture(scope="module")
def drawn(pipe: Any) -> dict[str, np.ndarray[Any, Any]]:
    """By stock diffusers."""
    prompts = ("a red apple", "green apple", "blue heart", "dog face")
    return dict(zip(prompts, draw(pipe, *prompts), strict=True))


def test_it_draws_a_red_apple(drawn: dict[str, np.ndarray[Any, Any]]) -> None:
    assert red_apple(drawn["a red apple"])


def test_the_look_for_an_apple_finds_nothing_else(drawn: dict[str, np.ndarray[Any, Any]]) -> None:
    found = [name for name, picture in drawn.items() if red_apple(picture)]
    assert found == ["a red apple"]
    noise = np.random.default_rng(0).random((128, 128, 3))
    assert not red_apple(noise)
    wrong = load("random:sdxl-tiny", dtype="fp32")
    assert not red_apple(draw(wrong, "a red apple", steps=4)[0])


def test_the_prompt_decides_colour_and_shape(drawn: dict[str, np.ndarray[Any, Any]]) -> None:
    assert round_thing(drawn["green apple"], 1)
    assert round_thing(drawn["blue heart"], 2)
    names = list(drawn)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            # the same noise: a model that read no prompt would draw the same picture
            assert psnr(drawn[name], drawn[other]) < 16, (name, other)


@pytest.mark.parametrize(
    ("op", "ran"),
    [("auto", {"unet": "sdpa", "text": "reference"}), ("reference", {"unet": "reference"})],
    ids=["chosen by layer", "our equation"],
)
def test_ours_draws_what_stock_draws(
    drawn: dict[str, np.ndarray[Any, Any]], op: str, ran: dict[str, str]
) -> None:
    ours = sdx_accel.demo.load()
    ours.enable_xattn(attention_op=op)
    again = draw(ours, "a red apple", "dog face")
    layers = ours.xattn_report().layers
    for start, name in ran.items():
        running = [layer.running for layer in layers if layer.path.startswith(start)]
        assert running
        assert set(running) == {name}
    for name, picture in zip(("a red apple", "dog face"), again, strict=True):
        # 125 dB on torch 2.13: only the order of rounding differs
        assert psnr(picture, drawn[name]) >= 80


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units move on the CPU as they would to a card."""

    class Moving(Executor):
        def __init__(self, *args: Any, moves: bool) -> None:
            super().__init__(*args, moves=True)

    monkeypatch.setattr(budget_session, "Executor", Moving)


@pytest.mark.usefixtures("moving")
def test_a_budget_changes_no_bit() -> None:
    held = sdx_accel.demo.load()
    held.enable_xattn()
    free = draw(held, "a red apple", steps=4)
    smallest = sdx_accel.plan("demo", vram=8, device="cpu").smallest_budget_gib
    for budget in (8, smallest):
        held.enable_xattn(vram=budget, device="cpu")
        assert np.array_equal(free, draw(held, "a red apple", steps=4))
        assert held.__dict__["_sdx_budget"].executor.moved_bytes > 0


def test_its_files_are_small_and_nothing_but_weights_and_words() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert len(weights) == 4
    assert sum(path.stat().st_size for path in weights) <= 20 << 20
    assert sum(path.stat().st_size for path in files) <= 21 << 20


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2", "unet", "vae"])
def test_its_files_hold_the_model_s_weights_and_no_other_tensor(name: str) -> None:
    """Nothing of the training data travels along: each tensor is one that the module has."""
    (file,) = (FOLDER / name).glob("*.safetensors")
    tensors = read_header(file).tensors
    expected = meta_component(describe("demo").components[name]).state_dict()
    shapes = {
        key.removeprefix("text_model."): tuple(value.shape) for key, value in expected.items()
    }
    found = {key.removeprefix("text_model."): value.shape for key, value in tensors.items()}
    position = "embeddings.position_ids"
    assert {k: tuple(v) for k, v in found.items() if k != position} == {
        k: v for k, v in shapes.items() if k != position
    }


def test_its_paths_and_settings_name_no_machine() -> None:
    for path in FOLDER.rglob("*config.json"):
        values = json.loads(path.read_text(encoding="utf-8"))
        assert not [k for k, v in values.items() if isinstance(v, str) and v.startswith("/")]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was asked for something")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    # a session that is offline already would hide what asks
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.mark.usefixtures("no_network")
def test_loading_is_quiet_and_asks_nobody() -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        found = sdx_accel.demo.load()
    assert said.getvalue() == ""
    assert type(found).__name__ == "StableDiffusionXLPipeline"
    models = [m for m in found.components.values() if isinstance(m, torch.nn.Module)]
    assert len(models) == 4
    assert {p.dtype for model in models for p in model.parameters()} == {torch.float32}
    assert {p.device.type for model in models for p in model.parameters()} == {"cpu"}
    assert not any(model.training for model in models)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"dtype": "bf16"}, torch.bfloat16),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"dtype": "auto", "device": "cpu"}, torch.float32),
        ({"device": "cpu"}, torch.float32),
        ({"dtype": "fp16", "device": "cpu"}, torch.float32),
    ],
)
def test_dtypes_follow_those_of_every_other_model(given: dict[str, Any], dtype: Any) -> None:
    assert sdx_accel.demo.load(**given).unet.dtype is dtype


def test_the_first_load_of_a_process_is_quiet_too() -> None:
    """Only then diffusers is imported, and transformers says what it does without torchvision."""
    code = "import sdx_accel.demo; print(type(sdx_accel.demo.load()).__name__)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout.strip() == "StableDiffusionXLPipeline"
    assert done.stderr == ""


def test_loading_keeps_what_else_transformers_says(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("transformers.utils.import_utils")
    lost = "`{}ImageProcessor` requires torchvision (not installed); falling back to the other"
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    def speaking(*args: Any, **kwargs: Any) -> None:
        for text in (lost.format("CLIP"), lost.format("Siglip"), lost.format("ViT"), "another"):
            log.warning(text)

    monkeypatch.setattr("sdx_accel.runtime.checkpoints.load", speaking)
    handler = Kept()
    log.addHandler(handler)
    filters = list(log.filters)
    try:
        sdx_accel.demo.load()
        assert said == [lost.format("ViT"), "another"]
        assert log.filters == filters
        log.warning(lost.format("CLIP"))
        assert said[2:] == [lost.format("CLIP")]
    finally:
        log.removeHandler(handler)


def test_importing_it_is_light() -> None:
    code = "import sdx_accel, sys; sdx_accel.demo.load; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_package_without_its_files_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "sdx_accel/runtime/shipped.py"))
    for call in (describe, load):
        with pytest.raises(CheckpointError, match="install sdx-accel again"):
            call("demo")


def test_the_command_line_draws_with_it_unless_told_otherwise(cli: Cli, tmp_path: Path) -> None:
    # a folder of the same name is another model, reached as ./demo
    (tmp_path / "demo").mkdir()
    result = cli("generate", "a red apple", "--seed", 7, "--output", "a.png")
    assert result.code == 0, result.err
    assert "no model given: demo" in result.err
    with Image.open("a.png") as picture:
        assert red_apple(np.asarray(picture) / 255)
    recorded = read_record("a.png").job
    assert (recorded.model, recorded.steps, recorded.guidance) == ("demo", STEPS, GUIDANCE)
    assert (recorded.width, recorded.height) == (128, 128)

    again = cli("generate", "--from", "a.png", "--output", "b.png")
    assert again.code == 0, again.err
    assert psnr(np.asarray(Image.open("a.png")) / 255, np.asarray(Image.open("b.png")) / 255) > 99

    named = cli("plan", "--model", "demo", "--json")
    assert named.code == 0, named.err
    assert json.loads(named.out)["model"] == "demo"
    other = cli("generate", "a red apple", "--model", "./demo")
    assert other.code == 2
    assert "no model_index.json" in other.err


def test_a_folder_as_a_path_is_not_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    for place in (Path("demo"), "./demo"):
        with pytest.raises(CheckpointError, match=r"no model_index\.json"):
            describe(place)
    assert describe("demo").default_width == 128


def test_another_size_and_many_words_are_said_to_suit_it_badly(cli: Cli) -> None:
    line = ("generate", "rocket " * 30, "--model", "demo", "--steps", 1, "--output", "a.png")
    result = cli(*line, "--width", 192)
    assert result.code == 0, result.err
    assert "use --width 128 --height 128" in result.err
    assert "longer than 24 tokens" in result.err
    assert "no model given" not in result.err
    assert "--height 128" not in cli("plan", "--model", "demo").err


def test_a_slip_of_the_name_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="did you mean 'demo'"):
        describe("Demo")


def test_a_picture_and_a_mask_start_from_what_is_there(
    cli: Cli, drawn: dict[str, np.ndarray[Any, Any]]
) -> None:
    apple = Image.fromarray((drawn["a red apple"] * 255).round().astype(np.uint8))
    apple.save("apple.png")
    mask = np.zeros((128, 128), np.uint8)
    mask[:64] = 255
    Image.fromarray(mask).save("mask.png")
    line = ("generate", "green apple", "--image", "apple.png", "--seed", 1)
    assert cli(*line, "--strength", 0.9, "--output", "green.png").code == 0
    assert round_thing(np.asarray(Image.open("green.png")) / 255, 1)
    assert cli(*line, "--mask", "mask.png", "--output", "half.png").code == 0
    half = np.asarray(Image.open("half.png"))
    assert np.array_equal(half[64:], np.asarray(apple)[64:])
    assert not np.array_equal(half[:64], np.asarray(apple)[:64])


def test_its_plans_say_demo_and_nothing_takes_no_time(cli: Cli) -> None:
    pipe = load("demo")
    pipe.enable_xattn(vram=4, device="cpu")
    report = pipe.xattn_report()
    pipe.disable_xattn()
    assert report.plan.model == "demo"
    said = report.plan.explain()
    assert said.splitlines()[0].split(": ")[1].startswith("demo, 128 × 128 px")
    assert "moves nothing to the card for a new prompt" in said
    assert "0.000" not in said
    assert " 0.00 s" not in said
    tight = cli("plan", "--model", "demo", "--vram", 0.8).out
    assert "a step takes below 1 ms" in tight
    assert "moves 1 MiB to the card for each new prompt (below 1 ms)" in tight


def test_one_layer_is_not_layers() -> None:
    one = sdx_patches.Layer("unet.mid", "auto", "torch", "")
    assert str(Report((one,), (), None)).startswith("unet: 1 layer, requested")
    assert str(Report((one, one), (), None)).startswith("unet: 2 layers, requested")
