"""`--ip-adapter`: a picture as prompt, through the image encoder that diffusers would find."""

import json
import shutil
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
from sdx_accel.errors import CheckpointError
from sdx_accel.runtime import budget_session
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import describe_pipeline, load
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.ip_adapters import load_ip_adapters, with_ip_adapters
from sdx_accel.runtime.phase_calls import twin
from sdx_accel.runtime.weights import split_weights, unit_bytes

Cli = Callable[..., Any]
RANDOM = "random:ip-adapter"
TINY = "random:sdxl-tiny"
SMALL = ("--model", TINY, "--width", 64, "--height", 64, "--steps", 2, "--seed", 3)


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


def write_encoder(folder: Path, width: int = 64) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2,
        image_size=32, patch_size=8, projection_dim=width,
    )  # fmt: skip
    CLIPVisionModelWithProjection(config).save_pretrained(folder / "image_encoder")


def write_adapter(path: Path, kind: str, model: str = TINY, width: int = 64) -> Path:
    """A file as the public ones are: `standard`, `plus` or `faceid`."""
    unet = twin(architecture(model), "unet", "float32")
    layers = [unet.get_submodule(name.removesuffix(".processor")) for name in unet.attn_processors]
    shapes = [tuple(a.to_k.weight.shape) for a in layers if a.is_cross_attention]
    context, generator = shapes[0][1], torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    tensors = {}
    for index, shape in enumerate(shapes):
        for name in ("to_k_ip", "to_v_ip"):
            tensors[f"ip_adapter.{2 * index + 1}.{name}.weight"] = draw(*shape)
    if kind == "standard":
        parts = {"proj.weight": draw(4 * context, width), "proj.bias": draw(4 * context),
                 "norm.weight": torch.ones(context), "norm.bias": torch.zeros(context)}  # fmt: skip
    elif kind == "faceid":
        parts = {"proj.0.weight": draw(8, 8), "proj.2.weight": draw(8, 8),
                 "norm.weight": torch.ones(context)}  # fmt: skip
    else:
        hidden = 64
        parts = {"latents": draw(1, 5, hidden), "proj_in.weight": draw(hidden, width),
                 "proj_in.bias": draw(hidden), "proj_out.weight": draw(context, hidden),
                 "proj_out.bias": draw(context), "norm_out.weight": torch.ones(context),
                 "norm_out.bias": torch.zeros(context)}  # fmt: skip
        for layer in range(4):
            head, tail = f"layers.{layer}.0", f"layers.{layer}.1"
            for norm in (f"{head}.norm1", f"{head}.norm2", f"{tail}.0"):
                parts[f"{norm}.weight"] = torch.ones(hidden)
                parts[f"{norm}.bias"] = torch.zeros(hidden)
            parts[f"{head}.to_q.weight"] = draw(64, hidden)
            parts[f"{head}.to_kv.weight"] = draw(128, hidden)
            parts[f"{head}.to_out.weight"] = draw(hidden, 64)
            parts[f"{tail}.1.weight"] = draw(4 * hidden, hidden)
            parts[f"{tail}.3.weight"] = draw(hidden, 4 * hidden)
    tensors |= {f"image_proj.{name}": value for name, value in parts.items()}
    save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """standard.safetensors, plus.safetensors and the image encoder they share."""
    folder = tmp_path_factory.mktemp("adapters")
    write_encoder(folder)
    for kind in ("standard", "plus"):
        write_adapter(folder / f"{kind}.safetensors", kind)
    return folder


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    values = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "cat.png")
    return tmp_path / "cat.png"


@pytest.mark.parametrize("kind", ["standard", pytest.param("plus", marks=pytest.mark.slow)])
def test_pictures_are_those_of_diffusers_and_a_replay_is_the_same(
    cli: Cli, adapters: Path, cat: Path, kind: str
) -> None:
    file = adapters / f"{kind}.safetensors"
    result = cli("generate", "x", *SMALL, "--ip-adapter", f"{file}:0.6", "--ip-image", cat)
    assert result.code == 0, result.err
    assert "only its middle is the prompt" in result.err
    stock = load(TINY, dtype="fp32")
    stock.load_ip_adapter(
        str(adapters), subfolder="", weight_name=file.name, image_encoder_folder="image_encoder",
        local_files_only=True,
    )  # fmt: skip
    stock.set_ip_adapter_scale(0.6)
    stock.set_progress_bar_config(disable=True)
    picture = stock(
        "x", width=64, height=64, num_inference_steps=2, guidance_scale=5.0,
        ip_adapter_image=Image.open(cat), generator=torch.Generator().manual_seed(3),
    ).images[0]  # fmt: skip
    assert abs(pixels(result.paths[0]) - np.asarray(picture).astype(int)).max() <= 1
    if kind == "plus":
        return
    again = cli("generate", "--from", result.paths[0])
    assert (pixels(again.paths[0]) == pixels(result.paths[0])).all()
    muted = cli(
        "generate", "--from", result.paths[0], "--ip-adapter", f"{file}:0", "--ip-image", cat
    )
    plain = cli("generate", "x", *SMALL)
    assert (pixels(muted.paths[0]) == pixels(plain.paths[0])).all()
    assert (pixels(result.paths[0]) != pixels(plain.paths[0])).any()
    Image.new("RGB", (48, 48)).save(cat)
    changed = cli("generate", "--from", result.paths[0])
    assert changed.code == 2
    assert "give --ip-image" in changed.err


def test_two_random_ones_with_two_pictures(cli: Cli, cat: Path) -> None:
    Image.new("RGB", (40, 40), "red").save("red.png")
    result = cli(
        "generate", "x", *SMALL, "--ip-adapter", RANDOM, "--ip-adapter", f"{RANDOM}:0.2",
        "--ip-image", cat, "--ip-image", "red.png", "--vram", 6, "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    values = json.loads(result.out)
    assert [a["scale"] for a in values["settings"]["ip_adapters"]] == [1.0, 0.2]
    units = values["plan"]["phases"][0]["resident_units"]
    assert units["image_encoder"] == "1/1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"--ip-adapter {RANDOM}", "give --ip-image PICTURE"),
        ("--ip-image cat.png", "give --ip-adapter too"),
        (f"--ip-adapter {RANDOM} --ip-image cat.png --ip-image cat.png", "1 --ip-adapter and 2"),
        ("--ip-adapter random:ip --ip-image cat.png", "did you mean 'random:ip-adapter'"),
        ("--ip-adapter absent.safetensors --ip-image cat.png", "hf download h94/IP-Adapter"),
        ("--ip-adapter alone.safetensors --ip-image cat.png", "image_encoder; fetch that folder"),
        ("--ip-adapter old.bin --ip-image cat.png", "is a pickle"),
        ("--ip-adapter beside/face.safetensors --ip-image cat.png", "is a FaceID IP-Adapter"),
        ("--ip-adapter beside/sd15.safetensors --ip-image cat.png", "was made for another model"),
        ("--ip-adapter beside/wide.safetensors --ip-image cat.png", "whose projection_dim is 80"),
        ("--ip-adapter beside/lora.safetensors --ip-image cat.png", "holds no IP-Adapter"),
        ("--ip-adapter beside --ip-image cat.png", "is a folder with 4 .safetensors files"),
    ],
)
def test_refused_before_any_weights(
    cli: Cli, cat: Path, monkeypatch: pytest.MonkeyPatch, flags: str, message: str
) -> None:
    monkeypatch.setattr(
        "sdx_accel.runtime.checkpoints.load", lambda *a, **k: pytest.fail("a model was loaded")
    )
    Path("beside").mkdir()
    write_encoder(Path("beside"))
    write_adapter(Path("alone.safetensors"), "standard")
    write_adapter(Path("beside/face.safetensors"), "faceid")
    write_adapter(Path("beside/sd15.safetensors"), "standard", "random:sd15-tiny")
    write_adapter(Path("beside/wide.safetensors"), "standard", width=80)
    save_file({"unet.x.lora_A.weight": torch.zeros(1, 1)}, "beside/lora.safetensors")
    Path("old.bin").write_bytes(b"x")
    result = cli("generate", "x", "--model", TINY, *flags.split())
    assert result.code == 2
    assert message in result.err
    lines = [line for line in result.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1


def test_the_encoder_of_sd15_serves_vit_h_adapters_for_sdxl(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "sdxl_models").mkdir()
    write_encoder(tmp_path / "models")
    write_encoder(tmp_path / "sdxl_models", width=80)
    wide = write_adapter(tmp_path / "sdxl_models" / "ip.safetensors", "standard", width=80)
    small = write_adapter(tmp_path / "sdxl_models" / "ip_vit-h.safetensors", "standard")
    for file, width in ((wide, 80), (small, 64)):
        found = with_ip_adapters(architecture(TINY), [str(file)])
        assert found.components["image_encoder"].config["projection_dim"] == width
        assert len(found.weight_files["image_encoder"]) == 1
    with pytest.raises(CheckpointError, match="looks at pictures through an image encoder"):
        with_ip_adapters(architecture(TINY), [str(wide), str(small)])
    shutil.rmtree(tmp_path / "models")
    with pytest.raises(CheckpointError, match="projection_dim is 64"):
        with_ip_adapters(architecture(TINY), [str(small)])


def test_public_sizes_of_the_random_image_encoders() -> None:
    for spec, millions in (("random:sdxl", 1845), ("random:sd15", 632)):
        found = with_ip_adapters(architecture(spec), [RANDOM])
        encoder = twin(found, "image_encoder", "float16")
        assert sum(p.numel() for p in encoder.parameters()) / 1e6 == pytest.approx(millions, abs=1)


@pytest.mark.parametrize("kind", ["standard", "plus"])
def test_the_plan_before_loading_is_the_plan_held(
    adapters: Path, cat: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Moving(Executor):
        def __init__(self, *args: Any, moves: bool) -> None:
            super().__init__(*args, moves=True)

    monkeypatch.setattr(budget_session, "Executor", Moving)
    file = str(adapters / f"{kind}.safetensors")
    described = with_ip_adapters(architecture(TINY), [file])
    pipe = load(TINY, dtype="fp32")
    load_ip_adapters(pipe, [(file, 0.5)], described)
    pipe.set_progress_bar_config(disable=True)
    for module in (pipe.unet, pipe.image_encoder):
        for parameter in module.parameters():
            # safetensors maps a file at any address; CPU kernels round by alignment, cards' do not
            parameter.data = parameter.data.clone()
    live = describe_pipeline(pipe)
    assert live.components["unet"].adapters == described.components["unet"].adapters
    shape = twin(described, "unet", "float32")
    assert [unit_bytes(group) for group in split_weights(shape)] == [
        unit_bytes(group) for group in split_weights(pipe.unet)
    ]

    def run() -> Any:
        return pipe(
            "x", width=64, height=64, num_inference_steps=1, ip_adapter_image=[Image.open(cat)],
            generator=torch.Generator().manual_seed(0), output_type="np",
        ).images  # fmt: skip

    pipe.enable_xattn()
    free = run()
    pipe.enable_xattn(vram=8, device="cpu")
    assert (run() == free).all()
    held = pipe.__dict__["_sdx_budget"].plan
    planned = sdx_accel.plan(
        described, vram=8, width=64, height=64, dtype="fp32", machine=Machine.generic()
    )
    assert planned.phases == held.phases
    # looking at the picture is part of the text phase, and everything of it is counted there
    assert planned.phase("text").resident_units["image_encoder"] == "1/1"
    assert planned.binding_phase


def test_an_adapter_added_to_a_held_pipeline_asks_to_plan_again(adapters: Path) -> None:
    pipe = load(TINY, dtype="fp32")
    pipe.enable_xattn(vram=8, device="cpu")
    pipe.load_ip_adapter(
        str(adapters), subfolder="", weight_name="standard.safetensors", local_files_only=True
    )
    assert pipe.unet.encoder_hid_proj is not None
    with pytest.raises(sdx_accel.errors.PlacementError, match="image_encoder was added"):
        pipe("x", width=64, height=64, num_inference_steps=1, ip_adapter_image=[])
