"""Values of files and flags that can be read and make no sense, and outputs that go away."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.checkpoints import ComponentDescription, load
from sdx_accel.runtime.meta_models import check_values

Cli = Callable[..., Any]
SMALL = ("--model", "random:sdxl-tiny", "--width", 64, "--height", 64, "--steps", 1)
# arguments of the host libraries, which nobody can give on a command line
HOSTS = ("ignore_mismatched_sizes", "low_cpu_mem_usage", "from_pretrained")


def refused(result: Any, *words: str) -> None:
    assert result.code == 2, result.err
    (line,) = [text for text in result.err.splitlines() if not text.startswith("note: ")]
    assert all(word in line for word in words), line
    assert not any(host in line for host in HOSTS), line


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("length", ["77", 1, 0, -3, 20.5, True, 100])
def test_tokenizer_length_that_makes_no_sense(cli: Cli, model: Path, length: Any) -> None:
    change(model / "tokenizer/tokenizer_config.json", model_max_length=length)
    refused(cli("generate", "x", *SMALL, "--model", model), "tokenizer", "model_max_length")


@pytest.mark.parametrize("length", [None, 1e30, 1000000000000000019884624838656])
def test_tokenizer_length_that_was_never_set_is_the_text_encoders(
    model: Path, length: float | None
) -> None:
    for name in ("tokenizer", "tokenizer_2"):
        change(model / name / "tokenizer_config.json", model_max_length=length)
    pipe = load(model, dtype="fp32")
    assert (pipe.tokenizer.model_max_length, pipe.tokenizer_2.model_max_length) == (77, 77)
    assert pipe("x", num_inference_steps=1, width=64, height=64, output_type="np").images.shape


@pytest.mark.parametrize(
    "values",
    [
        {"beta_schedule": "zigzag"},
        {"prediction_type": "guess"},
        {"num_train_timesteps": 0},
        {"num_train_timesteps": "many"},
        {"timestep_spacing": "wide"},
        {"beta_end": float("nan")},
    ],
)
def test_scheduler_values_that_make_no_sense(cli: Cli, model: Path, values: dict[str, Any]) -> None:
    change(model / "scheduler/scheduler_config.json", **values)
    refused(cli("generate", "x", *SMALL, "--model", model), "scheduler_config.json", "fetch")


def test_scheduler_class_that_is_not_there(cli: Cli, model: Path) -> None:
    change(model / "model_index.json", scheduler=["diffusers", "GuessingScheduler"])
    refused(cli("generate", "x", *SMALL, "--model", model), "GuessingScheduler", "newer")


def test_trying_a_scheduler_leaves_the_callers_random_numbers(model: Path) -> None:
    change(model / "model_index.json", scheduler=["diffusers", "EulerAncestralDiscreteScheduler"])
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    load(model)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("vae", {"scaling_factor": None}),
        ("vae", {"scaling_factor": 0}),
        ("vae", {"scaling_factor": float("inf")}),
        ("vae", {"latent_channels": 0}),
        ("vae", {"block_out_channels": None}),
        ("unet", {"in_channels": 0}),
        ("unet", {"out_channels": None}),
        ("text_encoder", {"max_position_embeddings": 4}),
        ("text_encoder_2", {"max_position_embeddings": 0}),
    ],
)
def test_configuration_values_that_make_no_sense(
    cli: Cli, model: Path, part: str, values: dict[str, Any]
) -> None:
    change(model / part / "config.json", **values)
    result = cli("generate", "x", *SMALL, "--model", model)
    refused(result, f"configuration of {part} has {next(iter(values))}", "fetch")


def test_null_that_means_the_same_as_in_channels() -> None:
    config = {"in_channels": 64, "out_channels": None}
    name = "FluxTransformer2DModel"
    check_values(ComponentDescription("transformer", "diffusers", name, config))
    with pytest.raises(CheckpointError, match="out_channels None"):
        check_values(ComponentDescription("unet", "diffusers", "UNet2DConditionModel", config))


def test_pipeline_class_of_another_family(cli: Cli, model: Path) -> None:
    change(model / "model_index.json", _class_name="StableDiffusionPipeline")
    result = cli("generate", "x", *SMALL, "--model", model)
    refused(result, "no use for text_encoder_2, tokenizer_2", "_class_name")


@pytest.mark.parametrize("entry", ["x", ["diffusers"], [None, None]])
def test_component_that_the_index_does_not_list(cli: Cli, model: Path, entry: Any) -> None:
    change(model / "model_index.json", text_encoder_2=entry)
    refused(cli("generate", "x", *SMALL, "--model", model), "also needs text_encoder_2")


@pytest.mark.parametrize("entry", [["os", "system"], [["os"], "system"], [5, 5]])
def test_only_classes_of_the_two_libraries_are_loaded(cli: Cli, model: Path, entry: Any) -> None:
    change(model / "model_index.json", unet=entry)
    result = cli("generate", "x", *SMALL, "--model", model)
    refused(result, "only classes of diffusers and transformers are loaded", "unet")


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2", "unet", "vae"])
def test_weights_of_another_shape(cli: Cli, model: Path, part: str) -> None:
    (file,) = (model / part).glob("*.safetensors")
    weights = load_file(file)
    name = next(key for key, value in weights.items() if value.dim() > 1)
    shape = list(weights[name].shape)
    weights[name] = torch.zeros(3, *shape[1:])
    save_file(weights, file, {"format": "pt"})
    result = cli("generate", "x", *SMALL, "--model", model)
    refused(result, f"of {part} ", f"{name} should be {shape} and is {[3, *shape[1:]]}", "fetch")


def test_flags_that_name_nothing(cli: Cli) -> None:
    for flag in ("--image", "--mask", "--config"):
        refused(cli("generate", "x", *SMALL, flag, ""), f"{flag} is empty")


def test_limit_of_num_does_not_hang_on_the_seed(cli: Cli) -> None:
    for seed in ((), ("--seed", 7)):
        result = cli("generate", "x", *SMALL, *seed, "--num", 10**30)
        refused(result, "from 1 to 1000000")
    refused(cli("generate", "x", *SMALL, "--seed", 2**63 - 1, "--num", 2), "--seed")


def test_format_jpeg_and_home_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    result = cli("generate", "x", *SMALL, "--format", "jpeg", "-o", "~/made")
    assert result.code == 0, result.err
    (path,) = (tmp_path / "home/made").iterdir()
    assert path.suffix == ".jpg"
    with Image.open(path) as picture:
        assert picture.format == "JPEG"
    path.rename(tmp_path / "home/a.jpg")
    flags = ("--image", "~/a.jpg", "--steps", 2, "--format", "jpeg", "-o", "~/b.jpeg")
    result = cli("generate", "x", *flags)
    assert result.code == 0, result.err
    assert (tmp_path / "home/b.jpeg").is_file()


@pytest.mark.parametrize("top", [255, 65535])
def test_32_bit_integers_keep_their_brightness(tmp_path: Path, top: int) -> None:
    from sdx_accel.cli.pictures_in import read_picture

    values = np.linspace(0, top, 64, dtype=np.int32).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "i.tiff")
    picture = read_picture(str(tmp_path / "i.tiff")).picture
    assert picture.getextrema() == ((0, 255),) * 3


def test_very_large_picture_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sdx_accel.cli.pictures_in import read_picture

    Image.new("RGB", (64, 64)).save(tmp_path / "i.png")
    # Pillow warns above its limit and refuses above twice that
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 64 - 1)
    (note,) = read_picture(str(tmp_path / "i.png")).notes
    assert "unusually large (64 × 64 pixels)" in note


def test_very_large_picture_is_made_again_without_a_warning(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("generate", "x", *SMALL, "-o", "a.png").code == 0
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 64 - 1)
    result = cli("generate", "--from", "a.png")
    assert result.code == 0, result.err


# each makes a picture in a process of its own, 14 s: the other combinations in `make test-all`
@pytest.mark.parametrize(
    "json_flag", [(), pytest.param(("--json",), marks=pytest.mark.slow)], ids=["text", "json"]
)
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("full", "closed")), "pipe"]
)
def test_stdout_that_goes_away_does_not_hide_the_picture(
    tmp_path: Path, kind: str, json_flag: tuple[str, ...]
) -> None:
    if kind == "full" and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    reader, writer = os.pipe()
    os.close(reader)
    target = os.open("/dev/full", os.O_WRONLY) if kind == "full" else writer
    code = "import sys, sdx_accel.cli as cli; sys.exit(cli.main(sys.argv[1:]))"
    if kind == "closed":
        code = f"import os; os.close(1); import sys; sys.stdout = None; {code}"
    command = [sys.executable, "-c", code, "generate", "x", *map(str, SMALL), "-o", "a.png"]
    done = subprocess.run(
        [*command, *json_flag],
        stdout=target,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    os.close(writer)
    assert (tmp_path / "a.png").is_file()
    assert done.returncode == 0, done.stderr
    assert "saved: a.png" in done.stderr
    assert "failed" not in done.stderr
    assert "Exception" not in done.stderr
