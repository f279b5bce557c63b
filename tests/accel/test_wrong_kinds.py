"""The command line on files under the wrong flag, on inputs that moved, and on generate's flags."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

Cli = Callable[..., Any]
TINY = "random:sdxl-tiny"
SMALL = ("--width", 64, "--height", 64, "--steps", 1, "--seed", 3)
CN, IP = "random:controlnet", "random:ip-adapter"


def one_line(result: Any) -> str:
    """The refusal, which is one line; notes may stand before it."""
    assert result.code == 2, result.err
    lines = [line for line in result.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1, result.err
    return str(lines[0])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """One small file of each kind, and a picture."""
    one = torch.zeros(1, 1)
    kinds = {
        "lora": ("unet.a.lora_A.weight", "unet.a.lora_B.weight"),
        "kohya": ("lora_unet_a.lora_down.weight", "lora_unet_a.lora_up.weight"),
        "adapter": ("image_proj.proj.weight", "ip_adapter.1.to_k_ip.weight"),
        "word": ("clip_l", "clip_g"),
        "model": ("model.diffusion_model.a.weight", "first_stage_model.a.weight"),
        "other": ("a.weight", "b.weight"),
    }
    for name, keys in kinds.items():
        save_file({key: one.clone() for key in keys}, tmp_path / f"{name}.safetensors")
    values = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "cat.png")
    return tmp_path


@pytest.mark.parametrize(
    ("flag", "file", "seems"),
    [
        ("--lora", "adapter", "it is an IP-Adapter: give it with --ip-adapter"),
        ("--lora", "word", "it is a textual inversion: give it with --embedding"),
        ("--lora", "model", "it is a whole model: give it with --model"),
        ("--lora", "other", "holds no LoRA: matched 0 of 2 keys"),
        ("--ip-adapter", "lora", "it is a LoRA: give it with --lora"),
        ("--ip-adapter", "kohya", "it is a LoRA: give it with --lora"),
        ("--ip-adapter", "word", "it is a textual inversion: give it with --embedding"),
        ("--ip-adapter", "other", "holds no IP-Adapter; it has 'a.weight'"),
        ("--embedding", "kohya", "it is a LoRA: give it with --lora"),
        ("--embedding", "adapter", "it is an IP-Adapter: give it with --ip-adapter"),
        ("--embedding", "other", "holds no embedding; it has 'a.weight'"),
        ("--model", "adapter", "is an IP-Adapter: give it with --ip-adapter"),
        ("--model", "kohya", "is a LoRA: give it with --lora"),
        ("--model", "word", "is a textual inversion: give it with --embedding"),
        ("--model", "model", "is no SDXL or SD 1.5 checkpoint"),
    ],
)
def test_a_file_under_the_wrong_flag_names_the_right_one(
    cli: Cli, files: Path, flag: str, file: str, seems: str
) -> None:
    line = ["generate", "x", flag, f"{file}.safetensors"]
    line += [] if flag == "--model" else ["--model", TINY]
    line += ["--ip-image", "cat.png"] if flag == "--ip-adapter" else []
    message = one_line(cli(*line))
    assert seems in message
    assert f"{file}.safetensors" in message


def test_a_missing_lora_says_what_is_there(cli: Cli, files: Path) -> None:
    message = one_line(cli("generate", "x", "--model", TINY, "--lora", "gone.safetensors"))
    assert "gone.safetensors: no such file" in message
    assert "lora.safetensors" in message


def test_a_replay_whose_pictures_moved_names_their_flags(cli: Cli, files: Path) -> None:
    flags = {"--image": "a.png", "--control-image": "b.png", "--ip-image": "c.png"}
    for name in flags.values():
        Path(name).write_bytes(Path("cat.png").read_bytes())
    pictures = [word for pair in flags.items() for word in pair]
    line = ("generate", "x", "--model", TINY, *SMALL[:4], "--steps", 2, "--seed", 3)
    made = cli(*line, "--controlnet", CN, "--ip-adapter", IP, *pictures, "-o", "first.png")
    assert made.code == 0, made.err
    for flag, name in flags.items():
        Path(name).rename(f"moved-{name}")
        message = one_line(cli("generate", "--from", "first.png"))
        assert f"{name} is not there any more; give {flag}" in message
        Path(f"moved-{name}").rename(name)
    for name in flags.values():
        Path(name).rename(f"moved-{name}")
    pictures = [word for flag, name in flags.items() for word in (flag, f"moved-{name}")]
    again = cli("generate", "--from", "first.png", *pictures, "-o", "again.png")
    assert again.code == 0, again.err
    first, second = (np.asarray(Image.open(name)) for name in ("first.png", "again.png"))
    assert (first == second).all()


def test_the_same_lora_twice_is_said(cli: Cli, tmp_path: Path) -> None:
    from sdx_accel.runtime.architectures import architecture
    from sdx_accel.runtime.phase_calls import twin

    unet = twin(architecture(TINY), "unet", "float32")
    name, layer = next((n, m) for n, m in unet.named_modules() if n.endswith("to_q"))
    outputs, inputs = layer.weight.shape
    tensors = {"A": torch.ones(1, inputs), "B": torch.ones(outputs, 1)}
    save_file({f"unet.{name}.lora_{k}.weight": v for k, v in tensors.items()}, "ink.safetensors")
    line = ("--model", TINY, "--vram", 8, "--lora", "ink.safetensors:0.5")
    result = cli("plan", *line, "--lora", "ink.safetensors:0.25")
    assert result.code == 0, result.err
    assert "ink.safetensors is given 2 times: it counts with 0.75" in result.err
    assert "given" not in cli("plan", *line).err


def test_several_adapters_make_no_other_library_speak(
    recwarn: pytest.WarningsRecorder,
) -> None:
    from sdx_accel.runtime.adapter_twins import add_adapters, lora_entry
    from sdx_accel.runtime.architectures import architecture
    from sdx_accel.runtime.phase_calls import twin

    # a twin is shared
    unet = copy.deepcopy(twin(architecture(TINY), "unet", "float32"))
    layers = {next(n for n, _ in unet.named_modules() if n.endswith("to_q")): 2}
    add_adapters(unet, [lora_entry("first", layers), lora_entry("second", layers)])
    assert [str(w.message) for w in recwarn] == []


def test_a_line_of_generate_can_be_planned_as_it_is(cli: Cli, files: Path) -> None:
    line = (
        "x", "--model", TINY, *SMALL, "--vram", 8, "--image", "cat.png", "--mask", "cat.png",
        "--strength", 1, "--controlnet", CN, "--control-image", "cat.png", "--ip-adapter", IP,
        "--ip-image", "cat.png", "--negative", "dog", "-o", "a.png", "--format", "png",
        "--overwrite", "--num", 2, "--guidance", 4, "--scheduler", "euler",
    )  # fmt: skip
    result = cli("plan", *line)
    assert result.code == 0, result.err
    assert "encode" in result.out
    assert not Path("a.png").exists()
    assert "--strength" not in cli("plan", "--help").out
