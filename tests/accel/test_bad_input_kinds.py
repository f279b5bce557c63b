"""Whole kinds of bad input, beyond the one example of each case."""

import copy
import json
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, PngImagePlugin
from safetensors.torch import save_file

import sdx_patches
from sdx_accel.errors import RefusedError
from sdx_accel.runtime.checkpoints import load

Cli = Callable[..., Any]
SMALL = ("--model", "random:sdxl-tiny", "--width", 64, "--height", 64, "--steps", 1)
_UNET = "unet/diffusion_pytorch_model.safetensors"


def refused(result: Any, *words: str) -> None:
    assert result.code == 2, result.err
    assert "Traceback" not in result.err
    assert "the work failed" not in result.err
    (line,) = [text for text in result.err.splitlines() if not text.startswith("note: ")]
    assert all(word in line for word in words), line


@pytest.mark.parametrize("name", ["n" * 260, "n" * 252 + ".png"])
def test_case_134_output_names_that_are_too_long(cli: Cli, name: str) -> None:
    refused(cli("generate", "x", *SMALL, "-o", name), "--output")


def test_case_138_folder_that_may_not_be_entered(cli: Cli, monkeypatch: Any) -> None:
    def refuse(self: Path, **_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    # root may enter everything, so the system's answer is given here
    monkeypatch.setattr("os.path.isdir", lambda path: False)
    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    from sdx_accel.cli.pictures_out import open_destination

    for output in ("locked/sub", "locked/sub/a.png"):
        with pytest.raises(RefusedError, match="--output"):
            open_destination(output, None, False, 0)


@pytest.mark.parametrize("flags", [("caf\udce9",), ("cafe", "--negative", "d\udce9")])
def test_case_136_prompt_bytes_that_are_not_utf8(cli: Cli, flags: tuple[str, ...]) -> None:
    refused(cli("generate", *flags, *SMALL), "not UTF-8")


@pytest.mark.parametrize(
    "file", ["model_index.json", "unet/config.json", "tokenizer/tokenizer.json"]
)
def test_case_133_json_nested_too_deeply(cli: Cli, model: Path, file: str) -> None:
    (model / file).write_text("[" * 100_000)
    refused(cli("generate", "x", *SMALL, "--model", model), Path(file).name, "invalid JSON")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}'])
def test_case_133_shard_list_of_another_form(cli: Cli, model: Path, text: str) -> None:
    (model / _UNET).unlink()
    (model / f"{_UNET}.index.json").write_text(text)
    refused(cli("generate", "x", *SMALL, "--model", model), "weight_map")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("unet", {"norm_num_groups": 0}),
        ("unet", {"attention_head_dim": 0}),
        ("unet", {"in_channels": -4}),
        ("unet", {"sample_size": "x"}),
        ("unet", {"sample_size": 0}),
        ("text_encoder", {"hidden_size": 31}),
        ("text_encoder", {"num_attention_heads": 0}),
    ],
)
def test_case_133_configuration_values_that_make_no_sense(
    cli: Cli, model: Path, file: str, change: dict[str, Any]
) -> None:
    path = model / file / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    refused(cli("generate", "x", *SMALL, "--model", model), file, "configuration")


@pytest.mark.parametrize(("kind", "flag"), [("Img2Img", "--image"), ("Inpaint", "--mask")])
def test_models_that_start_from_a_picture_say_so(
    cli: Cli, model: Path, kind: str, flag: str
) -> None:
    path = model / "model_index.json"
    path.write_text(path.read_text().replace("XLPipeline", f"XL{kind}Pipeline"))
    refused(cli("generate", "x", *SMALL, "--model", model), flag)


def test_case_131_config_for_a_model_that_is_no_single_file(cli: Cli, model: Path) -> None:
    for name in ("random:sdxl-tiny", model):
        refused(cli("generate", "x", *SMALL, "--model", name, "--config", "absent"), "--config")


def _lora(path: Path, down: torch.Tensor, up: torch.Tensor, layer: str) -> Path:
    save_file({f"unet.{layer}.lora_A.weight": down, f"unet.{layer}.lora_B.weight": up}, path)
    return path


@pytest.mark.parametrize(
    ("down", "up", "layer"),
    [
        ((64,), (64, 2), "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"),
        ((), (), "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"),
        ((2, 8), (8, 2), "down_blocks.0.resnets.0.norm1"),
    ],
)
def test_lora_of_other_shapes(cli: Cli, tmp_path: Path, down: Any, up: Any, layer: str) -> None:
    file = _lora(tmp_path / "a.safetensors", torch.ones(down), torch.ones(up), layer)
    result = cli("generate", "x", *SMALL, "--lora", file)
    refused(result, "a.safetensors", "was made for another model")


def test_case_129_broken_lora_is_refused_before_the_model_loads(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    monkeypatch.setattr("sdx_accel.runtime.checkpoints.load", lambda *a, **k: pytest.fail("loaded"))
    refused(cli("generate", "x", *SMALL, "--lora", "a.safetensors"), "truncated")


def test_lora_that_fits_in_part_and_damaged_weights_are_said(cli: Cli, tmp_path: Path) -> None:
    layer = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    pair = {
        f"{layer}.lora_A.weight": torch.ones(2, 64),
        f"{layer}.lora_B.weight": torch.ones(64, 2),
    }
    strange = {key.replace("to_q", "nowhere"): value.clone() for key, value in pair.items()}
    save_file({**pair, **strange}, tmp_path / "part.safetensors")
    result = cli("generate", "x", *SMALL, "--lora", "part.safetensors")
    assert result.code == 0, result.err
    assert "2 keys match nothing" in result.err
    pair[f"{layer}.lora_A.weight"] *= float("nan")
    save_file(pair, tmp_path / "nan.safetensors")
    result = cli("generate", "x", *SMALL, "--lora", "nan.safetensors")
    assert result.code == 1
    assert "damaged" in result.err
    assert "--dtype" not in result.err


def test_replay_of_hostile_pictures(cli: Cli, tmp_path: Path) -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("sdx_accel", "[" * 50_000)
    Image.new("RGB", (8, 8)).save(tmp_path / "deep.png", pnginfo=info)
    refused(cli("generate", "--from", "deep.png"), "damaged")

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    (tmp_path / "bomb.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    )
    refused(cli("generate", "--from", "bomb.png"), "bomb.png")


def test_transparent_mask_is_said(cli: Cli, tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "i.png")
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(tmp_path / "m.png")
    result = cli("generate", "x", *SMALL[:4], "--steps", 2, "--image", "i.png", "--mask", "m.png")
    assert result.code == 0, result.err
    assert "m.png has transparent parts" in result.err


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_refused_device_leaves_the_pipeline_unpatched(device: str) -> None:
    pipe = load("random:sdxl-tiny")
    with pytest.raises(RefusedError):
        pipe.enable_xattn(vram=8, device=device)
    assert not any(layer.patched for layer in sdx_patches.layers(pipe))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copy_of_a_held_pipeline_does_not_undo_the_original(way: Callable[[Any], Any]) -> None:
    pipe = load("random:sdxl-tiny")
    stock = type(pipe)
    pipe.enable_xattn(vram=8, device="cpu")
    twin = way(pipe)
    assert type(twin) is stock
    twin.disable_xattn()
    assert pipe.xattn_report().plan is not None
    with pytest.raises(ValueError, match="disable_xattn"):
        pipe.to("cpu")
