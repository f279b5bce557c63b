"""`generate` and `plan` on the tiny model, in this process."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sdx_accel.cli.metadata import read_record

Cli = Callable[..., Any]
SMALL = ("--model", "random:sdxl-tiny", "--width", 64, "--height", 64, "--steps", 2)


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as picture:
        assert picture.mode == "RGB"
        return np.asarray(picture)


def noise(path: Path, mode: str = "RGB", size: tuple[int, int] = (64, 64)) -> Path:
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(values).convert(mode).save(path)
    return path


@pytest.fixture
def unet_inputs(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the UNet is given at each step, batch first."""
    from diffusers import UNet2DConditionModel

    seen: list[torch.Tensor] = []
    original = UNet2DConditionModel.forward

    def forward(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # the planner runs the model too, on tensors without contents
        if sample.device.type != "meta":
            seen.append(sample.detach().clone())
        return original(self, sample, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", forward)
    return seen


def test_a_prompt_is_all_it_takes(cli: Cli, tmp_path: Path) -> None:
    result = cli("generate", "a red apple on a table")
    assert result.code == 0, result.err
    (path,) = result.paths
    assert result.out.splitlines()[-1] == str(path)
    assert path.parent == Path("outputs")
    assert pixels(path).shape == (128, 128, 3)
    assert pixels(path).std() > 5
    assert "no model given: demo" in result.err
    assert result.err.count("no model given") == 1
    for wanted in ("plan", "seed", "s/step", "denoise: predicted", "not measured on the CPU"):
        assert wanted in result.out
    assert list(tmp_path.rglob("*.part")) == []


def test_json_is_one_object_and_nothing_else(cli: Cli) -> None:
    result = cli("generate", "a cat", *SMALL, "--seed", 5, "--num", 2, "--json")
    assert result.code == 0, result.err
    values = json.loads(result.out)
    assert values["seeds"] == [5, 6]
    assert [Path(path).name for path in values["paths"]] == ["a-cat_5.png", "a-cat_6.png"]
    assert values["settings"]["prompt"] == "a cat"
    assert values["plan"]["feasible"] is True
    assert [phase["name"] for phase in values["report"]["phases"]] == ["text", "denoise", "decode"]
    assert values["versions"]["torch"].startswith("2.")
    assert values["seconds"] > 0
    assert "plan" in result.err


def test_json_failure_is_one_object_too(cli: Cli) -> None:
    result = cli("generate", "a cat", "--width", 65, "--json")
    failure = json.loads(result.out)["error"]
    assert (result.code, failure["exit_code"], failure["type"]) == (2, 2, "SizeError")
    assert "64 or 72" in failure["message"]
    assert "64 or 72" in result.err


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("generate x --json --bogus", "NoSuchOption", "--bogus"),
        ("generate x --json --quality best", "BadParameter", "best"),
        ("generate x --json --steps many", "BadParameter", "--steps"),
        ("generate x y --json", "UsageError", "y"),
        ("plan --warm --json", "NoSuchOption", "--warm"),
        ("doctor --json --bogus", "NoSuchOption", "--bogus"),
    ],
)
def test_wrong_flags_with_json_are_one_object_too(
    cli: Cli, line: str, kind: str, words: str
) -> None:
    result = cli(*line.split())
    failure = json.loads(result.out)["error"]
    assert (result.code, failure["exit_code"], failure["type"]) == (2, 2, kind)
    assert words in failure["message"]
    assert words in result.err
    assert cli(*line.replace("--json", "").split()).out == ""


def test_case_128_and_139_picture_i_equals_its_single_run(
    cli: Cli, unet_inputs: list[torch.Tensor]
) -> None:
    pair = cli("generate", "a cat", *SMALL, "--seed", 5, "--num", 2).paths
    both = [unet_inputs[0], unet_inputs[2]]
    unet_inputs.clear()
    single = cli("generate", "a cat", *SMALL, "--seed", 6).paths
    assert torch.equal(unet_inputs[0], both[1])
    assert not torch.equal(*both)
    assert (pixels(pair[1]) == pixels(single[0])).all()
    assert (pixels(pair[0]) != pixels(pair[1])).any()


def test_case_139_every_plan_starts_from_the_same_noise(
    cli: Cli, unet_inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    firsts = []
    for options in ([], ["--vram", 4], ["--vram", 16], ["--device", "cpu"], ["off"]):
        if options == ["off"]:
            monkeypatch.setenv("SDX_DISABLE", "1")
            options = []
        unet_inputs.clear()
        result = cli("generate", "a cat", *SMALL, "--seed", 5, *options)
        assert result.code == 0, result.err
        firsts.append(unet_inputs[0])
        results.append(pixels(result.paths[0]).astype(int))
    assert all(torch.equal(first, firsts[0]) for first in firsts)
    # the last one runs diffusers' own attention: rounding may differ there
    assert all((result == results[0]).all() for result in results[:-1])
    assert abs(results[-1] - results[0]).max() <= 1


@pytest.mark.parametrize("format", ["png", "jpg", "webp"])
def test_replay_gives_the_same_pixels(cli: Cli, tmp_path: Path, format: str) -> None:
    first = cli(
        "generate", "a cat, 日本 🙂", *SMALL, "--seed", 5, "--negative", "dog", "--guidance", 3,
        "--scheduler", "ddim", "--format", format,
    )  # fmt: skip
    again = cli("generate", "--from", first.paths[0])
    assert again.code == 0, again.err
    assert again.paths[0] != first.paths[0]
    assert again.paths[0].suffix == f".{format}"
    assert (pixels(again.paths[0]) == pixels(first.paths[0])).all()
    other = cli("generate", "--from", first.paths[0], "--seed", 6)
    assert (pixels(other.paths[0]) != pixels(first.paths[0])).any()
    assert "note" not in again.err


def test_replay_of_one_of_several_and_of_a_replay(cli: Cli) -> None:
    made = cli("generate", "a cat", *SMALL, "--seed", 5, "--num", 2).paths
    again = cli("generate", "--from", made[1]).paths
    third = cli("generate", "--from", again[0]).paths
    assert (pixels(third[0]) == pixels(made[1])).all()


def test_replay_from_another_folder_finds_its_pictures(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise(Path("in.png") if Path.cwd() == tmp_path else tmp_path / "in.png")
    first = cli("generate", "a cat", *SMALL, "--seed", 5, "--image", "in.png", "-o", "a.png")
    assert first.code == 0, first.err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = cli("generate", "--from", tmp_path / "a.png")
    assert (pixels(again.paths[0]) == pixels(tmp_path / "a.png")).all()
    noise(tmp_path / "in.png", mode="L")
    changed = cli("generate", "--from", tmp_path / "a.png")
    assert changed.code == 2
    assert "has changed since" in changed.err
    assert cli("generate", "--from", tmp_path / "a.png", "--image", tmp_path / "in.png").code == 0


def test_other_versions_are_said_on_replay(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cli("generate", "a cat", *SMALL, "--seed", 5)
    monkeypatch.setattr("sdx_accel.cli.prepare.versions", lambda: {"torch": "9.9"})
    again = cli("generate", "--from", first.paths[0])
    assert "→ 9.9" in again.err


def test_case_047_bf16_makes_a_normal_picture(cli: Cli) -> None:
    result = cli("generate", "a cat", *SMALL, "--dtype", "bf16", "--device", "cpu")
    assert result.code == 0, result.err
    assert pixels(result.paths[0]).std() > 5
    assert "in bfloat16" in result.out


def test_fp16_without_a_gpu_says_what_runs_instead(cli: Cli) -> None:
    result = cli("generate", "a cat", *SMALL, "--dtype", "fp16", "--device", "cpu")
    assert result.code == 0, result.err
    assert "fp32" in result.err
    assert "in float32" in result.out


@pytest.mark.parametrize("size", [(72, 64), (8, 8), (16, 8), (520, 64)])
def test_case_121_odd_multiples_of_8(cli: Cli, size: tuple[int, int]) -> None:
    options = ("--model", "random:sdxl-tiny", "--steps", 1)
    result = cli("generate", "x", *options, "--width", size[0], "--height", size[1])
    assert result.code == 0, result.err
    assert pixels(result.paths[0]).shape == (size[1], size[0], 3)


@pytest.mark.parametrize(("words", "negative_words"), [(10, 160), (80, 0), (200, 160)])
def test_case_123_long_prompts_are_cut_with_one_note(
    cli: Cli, words: int, negative_words: int
) -> None:
    negative = ["--negative", "blurry " * negative_words] if negative_words else []
    result = cli("generate", "cat " * words, *SMALL, *negative)
    assert result.code == 0, result.err
    assert result.err.count("the prompt is longer than 77 tokens") == (words > 70)
    assert result.err.count("the negative prompt is longer") == bool(negative_words)
    # diffusers' and transformers' own warnings would say it again
    assert "truncated" not in result.err
    assert "Token indices" not in result.err


def test_case_125_and_127_no_guidance_no_negative_prompt(
    cli: Cli, unet_inputs: list[torch.Tensor]
) -> None:
    plain = cli("generate", "a cat", *SMALL, "--seed", 5, "--guidance", 1)
    zero = cli("generate", "a cat", *SMALL, "--seed", 5, "--guidance", 0)
    ignored = cli("generate", "a cat", *SMALL, "--seed", 5, "--guidance", 1, "--negative", "dog")
    assert {len(sample) for sample in unet_inputs} == {1}
    assert (zero.code, ignored.code) == (0, 0)
    assert (pixels(plain.paths[0]) == pixels(zero.paths[0])).all()
    assert (pixels(plain.paths[0]) == pixels(ignored.paths[0])).all()
    assert ignored.err.count("the negative prompt is ignored") == 1
    assert "ignored" not in plain.err
    unet_inputs.clear()
    guided = cli("generate", "a cat", *SMALL, "--seed", 5, "--guidance", 5, "--negative", "dog")
    assert {len(sample) for sample in unet_inputs} == {2}
    assert (pixels(plain.paths[0]) != pixels(guided.paths[0])).any()


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "LA", "1", "CMYK", "I;16"])
def test_case_094_any_picture_can_be_started_from(cli: Cli, tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("in.jpg" if mode == "CMYK" else "in.png")
    if mode == "I;16":
        Image.fromarray(np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16).save(path)
    else:
        noise(path, mode)
    result = cli("generate", "x", "--model", "random:sdxl-tiny", "--steps", 2, "--image", path)
    assert result.code == 0, result.err
    assert pixels(result.paths[0]).shape == (64, 64, 3)


def test_case_094_opaque_rgba_equals_rgb(cli: Cli, tmp_path: Path) -> None:
    rgb, rgba = noise(tmp_path / "a.png"), tmp_path / "b.png"
    Image.open(rgb).convert("RGBA").save(rgba)
    results = [cli("generate", "x", *SMALL, "--seed", 1, "--image", path) for path in (rgb, rgba)]
    assert (pixels(results[0].paths[0]) == pixels(results[1].paths[0])).all()
    assert "white" not in results[1].err
    Image.new("RGBA", (64, 64), (0, 0, 0, 10)).save(rgba)
    assert "over white" in cli("generate", "x", *SMALL, "--image", rgba).err


def test_strength_counts_steps_and_follows_the_picture(cli: Cli, tmp_path: Path) -> None:
    path = noise(tmp_path / "in.png", size=(72, 40))
    options = ("--model", "random:sdxl-tiny", "--steps", 5, "--strength", 0.4)
    result = cli("generate", "x", *options, "--image", path)
    assert result.code == 0, result.err
    assert pixels(result.paths[0]).shape == (40, 72, 3)
    assert "picture: 2 steps" in result.out
    wider = cli("generate", "x", *options, "--image", path, "--width", 144)
    assert pixels(wider.paths[0]).shape == (80, 144, 3)
    assert "resized from 72 × 40 to 144 × 80" in wider.err


def test_case_092_pixels_outside_the_mask_are_bit_identical(cli: Cli, tmp_path: Path) -> None:
    path = noise(tmp_path / "in.png")
    mask = Image.new("L", (64, 64))
    mask.paste(255, (32, 0, 64, 64))
    mask.save(tmp_path / "mask.png")
    result = cli("generate", "x", *SMALL, "--image", path, "--mask", tmp_path / "mask.png")
    assert result.code == 0, result.err
    made, original = pixels(result.paths[0]), pixels(path)
    assert (made[:, :32] == original[:, :32]).all()
    assert (made[:, 32:] != original[:, 32:]).mean() > 0.5
    lossy = cli(
        "generate", "x", *SMALL, "--image", path, "--mask", tmp_path / "mask.png", "-o", "a.jpg"
    )
    assert "lossy" in lossy.err


def test_case_138_same_arguments_twice_give_two_files(cli: Cli, tmp_path: Path) -> None:
    options = ("generate", "a cat", *SMALL, "--seed", 5)
    first, second = cli(*options).paths[0], cli(*options, "--guidance", 2).paths[0]
    assert first != second
    before = second.read_bytes()
    replaced = cli(*options, "--overwrite").paths[0]
    assert replaced == first
    assert second.read_bytes() == before
    assert len(list((tmp_path / "outputs").iterdir())) == 2


def test_plan_prints_and_exits_by_feasibility(cli: Cli) -> None:
    fits = cli("plan", "--model", "random:sdxl-tiny")
    assert fits.code == 0
    assert "8.00 GiB" in fits.out
    tight = cli("plan", "a cat", "--model", "random:sdxl-tiny", "--vram", 0.3)
    assert tight.code == 1
    assert "DOES NOT FIT" in tight.out


def test_plan_as_json_is_the_plan(cli: Cli, tmp_path: Path) -> None:
    noise(tmp_path / "in.png", size=(72, 40))
    result = cli("plan", "--image", "in.png", "--vram", 6, "--num", 3, "--json")
    from sdx_accel import Plan

    plan = Plan.from_json(result.out)
    assert (plan.budget_gib, plan.feasible) == (6.0, True)
    assert (plan.job["width"], plan.job["height"], plan.job["batch"]) == (72, 40, 1)
    assert [phase.name for phase in plan.phases] == ["text", "encode", "denoise", "decode"]


def test_relative_budget_without_a_gpu_still_shows_a_plan(cli: Cli) -> None:
    for text in ("auto", "80%", "-1"):
        result = cli("generate", "x", *SMALL, "--device", "cpu", "--vram", text)
        assert result.code == 0, result.err
        assert "budget 8.00 GiB" in result.out
        assert f"--vram {text} is relative to a GPU" in result.err
    planned = cli("plan", "--vram", "80%", "--device", "cpu")
    assert "the plan is shown for 8 GiB" in planned.err
    assert "relative" not in cli("plan", "--vram", 8, "--device", "cpu").err


def test_lora_changes_the_picture_by_its_scale(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import load_file, save_file

    from sdx_accel.runtime.checkpoints import load

    pipe = load("random:sdxl-tiny")
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    folder = tmp_path / "C:" / "модель"
    folder.mkdir(parents=True)
    pipe.save_lora_weights(folder, unet_lora_layers=get_peft_model_state_dict(pipe.unet))
    (file,) = folder.glob("*.safetensors")
    options = ("generate", "x", *SMALL, "--seed", 1)
    plain = pixels(cli(*options).paths[0])
    strong = cli(*options, "--lora", f"{file.relative_to(tmp_path)}:1.5")
    assert strong.code == 0, strong.err
    none = cli(*options, "--lora", f"{file}:0")
    differences = (
        np.abs(pixels(made.paths[0]).astype(int) - plain.astype(int)).max()
        for made in (strong, none)
    )
    # weights at another address: some machines' BLAS sums in another order there
    assert next(differences) > 8
    assert next(differences) <= 1
    again = cli("generate", "--from", strong.paths[0])
    assert (pixels(again.paths[0]) == pixels(strong.paths[0])).all()
    # another file under the same name is refused rather than drawn with
    weights = load_file(file)
    save_file({name: 2 * value for name, value in weights.items()}, file)
    changed = cli("generate", "--from", strong.paths[0])
    assert changed.code == 2
    assert "has changed since" in changed.err
    assert "give --lora" in changed.err
    assert cli("generate", "--from", strong.paths[0], "--lora", file).code == 0
    # refused before anything is planned or loaded
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused = cli(*options, "--lora", file)
    assert (refused.code, refused.out) == (2, "")
    assert f"{sys.executable} -m pip install peft" in refused.err


def test_a_replay_with_other_threads_says_so(cli: Cli) -> None:
    before = torch.get_num_threads()
    first = cli("generate", "x", *SMALL, "--device", "cpu").paths[0]
    assert read_record(str(first)).ran["threads"] == before
    assert "CPU threads" not in cli("generate", "--from", first).err
    torch.set_num_threads(before + 1)
    try:
        again = cli("generate", "--from", first)
        other = cli("generate", "--from", first, "--seed", 7)
    finally:
        torch.set_num_threads(before)
    assert f"recorded with {before} CPU threads, now {before + 1}" in again.err
    assert "CPU threads" not in other.err


def test_out_of_memory_keeps_what_is_done(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import UNet2DConditionModel

    original = UNet2DConditionModel.forward
    calls: list[int] = []

    def forward(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if sample.device.type != "meta":
            calls.append(1)
        if len(calls) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …")
        return original(self, sample, *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", forward)
    result = cli("generate", "a cat", *SMALL, "--seed", 5, "--num", 2)
    assert result.code == 1
    assert "picture 2 of 2: cpu ran out of memory after step 1" in result.err
    assert [path.name for path in Path("outputs").iterdir()] == ["a-cat_5.png"]


@pytest.mark.gpu
def test_gpu_run_is_measured_and_starts_from_the_cpus_noise(
    cli: Cli, unet_inputs: list[torch.Tensor]
) -> None:
    options = ("generate", "a cat", *SMALL, "--seed", 5, "--dtype", "fp32")
    cpu = cli(*options, "--device", "cpu")
    first = unet_inputs[0]
    unet_inputs.clear()
    result = cli(*options, "--device", "cuda", "--vram", 8)
    assert (cpu.code, result.code) == (0, 0), result.err
    # the scheduler scales the noise on the device: the last bit may differ, other noise would not
    torch.testing.assert_close(unet_inputs[0].cpu(), first, rtol=1e-5, atol=1e-5)
    for phase in ("text", "denoise", "decode"):
        (line,) = [text for text in result.out.splitlines() if text.startswith(f"{phase}: ")]
        assert "measured" in line
        assert line.endswith("GiB")
