"""Several `--lora`: scales add up, the flags' order changes nothing, misfits are refused early."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import sdx_accel
from sdx_accel.budget.machine import Machine
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import describe_pipeline, load
from sdx_accel.runtime.loras import load_loras, with_loras
from sdx_accel.runtime.phase_calls import twin
from sdx_accel.runtime.weights import split_weights, unit_bytes

Cli = Callable[..., Any]
SMALL = ("--model", "random:sdxl-tiny", "--width", 64, "--height", 64, "--steps", 1, "--seed", 3)


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


def write_lora(path: Path, model: str, seed: int, rank: int, ends: tuple[str, ...]) -> Path:
    """A LoRA in diffusers' layout for the UNet's layers whose names end so."""
    unet = twin(architecture(model), "unet", "float32")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in unet.named_modules():
        if name.endswith(ends) and getattr(layer, "weight", None) is not None:
            outputs, inputs = layer.weight.shape[:2]
            down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"unet.{name}.lora_A.weight"] = down
            tensors[f"unet.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
    save_file(tensors, path)
    return path


@pytest.fixture
def loras(tmp_path: Path) -> tuple[Path, Path]:
    """Two files whose layers overlap in `to_q` only."""
    first = write_lora(tmp_path / "ink.safetensors", "random:sdxl-tiny", 1, 2, ("to_q", "to_v"))
    second = write_lora(tmp_path / "wash.safetensors", "random:sdxl-tiny", 2, 3, ("to_q", "to_k"))
    return first, second


def test_order_changes_no_bit_and_a_replay_has_both(
    cli: Cli, loras: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[list[tuple[str, float]]] = []

    def record(pipe: Any, files: list[tuple[str, float]]) -> Any:
        loaded.append(files)
        return load_loras(pipe, files)

    monkeypatch.setattr("sdx_accel.runtime.loras.load_loras", record)
    one, two = f"{loras[0]}:0.7", f"{loras[1]}:-0.3"
    forth = cli("generate", "x", *SMALL, "--lora", one, "--lora", two)
    assert forth.code == 0, forth.err
    back = cli("generate", "x", *SMALL, "--lora", two, "--lora", one)
    alone = cli("generate", "x", *SMALL, "--lora", one)
    # eight bits a channel rarely show in which order sums were rounded: the files are compared too
    assert loaded[0] == loaded[1]
    assert len(loaded[0]) == 2
    assert (pixels(forth.paths[0]) == pixels(back.paths[0])).all()
    assert (pixels(forth.paths[0]) != pixels(alone.paths[0])).any()
    again = cli("generate", "--from", forth.paths[0])
    assert (pixels(again.paths[0]) == pixels(forth.paths[0])).all()


def test_scales_add_up_in_the_weights(loras: tuple[Path, Path]) -> None:
    from safetensors.torch import load_file

    pipe = load("random:sdxl-tiny", dtype="fp32")
    path = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    before = pipe.unet.get_submodule(path).weight.clone()
    load_loras(pipe, [(loras[0], 0.7), (loras[1], -0.3)])
    pipe.fuse_lora()
    expected = before.clone()
    for file, scale in zip(loras, (0.7, -0.3), strict=True):
        tensors = load_file(file)
        up, down = (tensors[f"unet.{path}.lora_{part}.weight"] for part in "BA")
        expected += scale * (up @ down)
    merged = pipe.unet.get_submodule(path).weight
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_plan_before_loading_is_the_plan_after(loras: tuple[Path, Path], dtype: str) -> None:
    described = with_loras(architecture("random:sdxl-tiny"), loras)
    pipe = load("random:sdxl-tiny", dtype=dtype)
    plain = sum(p.numel() for p in pipe.unet.parameters())
    load_loras(pipe, [(file, 1.0) for file in loras])
    assert describe_pipeline(pipe).components["unet"].adapters == (
        described.components["unet"].adapters
    )
    shape = twin(described, "unet", {"fp32": "float32", "bf16": "bfloat16"}[dtype])
    assert [(n, p.shape, p.dtype) for n, p in shape.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in pipe.unet.named_parameters()
    ]
    assert sum(p.numel() for p in shape.parameters()) > plain
    assert [unit_bytes(group) for group in split_weights(shape)] == [
        unit_bytes(group) for group in split_weights(pipe.unet)
    ]
    plans = [
        sdx_accel.plan(model, vram=8, dtype=dtype, machine=Machine.generic())
        for model in (described, pipe)
    ]
    assert plans[0].phases == plans[1].phases
    assert plans[0].placement == plans[1].placement


def test_case_076_a_file_for_another_model_is_refused_before_weights(
    cli: Cli, loras: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sdx_accel.runtime.checkpoints.load", lambda *a, **k: pytest.fail("a model was loaded")
    )
    foreign = write_lora(tmp_path / "sd15.safetensors", "random:sd15-tiny", 1, 2, ("to_k",))
    for verb in (("generate", "x"), ("plan",)):
        line = (*verb, "--model", "random:sdxl-tiny", "--lora", loras[0], "--lora", foreign)
        result = cli(*line)
        assert result.code == 2
        assert "sd15.safetensors was made for another model" in result.err
        assert "Traceback" not in result.err


def test_plan_shows_what_loras_take(cli: Cli, loras: tuple[Path, Path]) -> None:
    def host(*flags: Any) -> float:
        result = cli("plan", *SMALL[:6], "--dtype", "fp32", *flags, "--json")
        assert result.code == 0, result.err
        return sdx_accel.Plan.from_json(result.out).host_gib

    both = host("--lora", loras[0], "--lora", loras[1])
    files = sum(path.stat().st_size for path in loras) / 2**30
    assert both - host() == pytest.approx(files, abs=3e-4)
