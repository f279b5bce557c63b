"""Single-file checkpoints: recognised by their header, loaded without network (cases 105, 131)."""

import dataclasses
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageChops
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import describe, load
from sdx_accel.runtime.folder_loading import quiet_libraries
from sdx_accel.runtime.random_models import build_random, build_random_component

ROOT = Path(__file__).resolve().parents[2]


def _written_by() -> Callable[..., None]:
    """The notebooks' converter; no package, so found by its path."""
    path = ROOT / "notebooks" / "original_layout.py"
    spec = importlib.util.spec_from_file_location("original_layout", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write


merge = _written_by()


@pytest.fixture(scope="module", params=["random:sdxl-tiny", "random:sd15-tiny"])
def merged(request, tmp_path_factory):
    """(pipeline, its folder, its single file)"""
    folder = tmp_path_factory.mktemp("single")
    pipe = build_random(request.param, torch.float32)
    with quiet_libraries():
        pipe.save_pretrained(folder / "model")
    merge(pipe, folder / "model.safetensors")
    return pipe, folder / "model", folder / "model.safetensors"


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Any connection fails the test; the hub cache is empty."""

    def refuse(self, address):
        raise AssertionError(f"a connection to {address} was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: pytest.fail(f"looked up {a[0]}"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("named", ["folder", "model_index.json"])
def test_case_131_single_file_loads_offline_with_a_local_config(merged, no_network, named):
    pipe, folder, file = merged
    config = folder if named == "folder" else folder / "model_index.json"
    loaded = load(file, dtype="fp32", device="cpu", config=config)
    assert type(loaded) is type(pipe)
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        if not hasattr(pipe, name):
            continue
        expected = getattr(pipe, name).state_dict()
        actual = getattr(loaded, name).state_dict()
        assert actual.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(actual[key], tensor), (name, key)
    pictures = [
        each(
            "a lighthouse",
            num_inference_steps=1,
            height=64,
            width=64,
            output_type="np",
            generator=torch.Generator().manual_seed(0),
        ).images
        for each in (pipe, loaded)
    ]
    # tensors of a mapped file are not aligned to 64 bytes: the CPU then sums in another order
    # (1e-6 measured)
    assert abs(pictures[0] - pictures[1]).max() < 1e-4
    assert loaded.tokenizer("a ü").input_ids == pipe.tokenizer("a ü").input_ids


def test_case_131_the_command_line_draws_offline_with_a_local_config(merged, no_network, cli):
    _, folder, file = merged
    line = ("generate", "a lighthouse", "--width", 64, "--height", 64, "--steps", 1, "--seed", 3)
    made = cli(*line, "--model", file, "--config", folder)
    assert made.code == 0, made.err
    stock = cli(*line, "--model", folder)
    with Image.open(made.paths[0]) as ours, Image.open(stock.paths[0]) as expected:
        # as above: one tone where a sum is rounded the other way
        assert max(high for _, high in ImageChops.difference(ours, expected).getextrema()) <= 1
    # the same picture again names the same file and configuration
    again = cli("generate", "--from", made.paths[0])
    assert again.code == 0, again.err
    assert again.paths[0].read_bytes() == made.paths[0].read_bytes()
    planned = cli("plan", "--model", file, "--config", folder, "--vram", 8)
    assert planned.code == 0, planned.err
    refused = cli(*line, "--model", file)
    assert refused.code == 2
    assert "--config FOLDER" in refused.err


def test_case_131_without_config_the_message_names_the_option(merged, no_network):
    with pytest.raises(CheckpointError, match="--config FOLDER"):
        load(merged[2], device="cpu")


def test_case_131_config_that_is_no_folder(merged, no_network, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load(merged[2], device="cpu", config=tmp_path / "absent")
    yaml = tmp_path / "v1.yaml"
    yaml.write_text("model: {}")
    with pytest.raises(CheckpointError, match=r"model_index\.json"):
        load(merged[2], device="cpu", config=yaml)


def test_describe_single_file_with_and_without_config(merged, no_network):
    pipe, folder, file = merged
    plain = describe(file)
    assert plain.pipeline_class == type(pipe).__name__
    assert plain.default_dtype == "float32"
    assert plain.weight_files == {"": [(str(file), file.stat().st_size)]}
    # without a configuration the public architecture is assumed
    assert plain.components["unet"].config["block_out_channels"][0] == 320
    exact = describe(file, config=folder)
    assert exact.components["unet"].config["block_out_channels"][0] == 32
    assert exact.default_height == 128


def test_config_of_another_architecture_is_refused_in_one_line(merged, tmp_path):
    pipe, folder, file = merged
    other = tmp_path / "other"
    pipe.save_config(other)
    for name in ("unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        if (folder / name).is_dir():
            (other / name).mkdir()
            for path in (folder / name).glob("*.json"):
                (other / name / path.name).write_bytes(path.read_bytes())
    (other / "scheduler").mkdir()
    pipe.scheduler.save_pretrained(other / "scheduler")
    config = json.loads((other / "unet" / "config.json").read_text())
    config["block_out_channels"] = [64, 64, *config["block_out_channels"][2:]]
    (other / "unet" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="does not fit the configuration") as caught:
        load(file, device="cpu", config=other)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["model.diffusion_model.out.2.bias", "first_stage_model.decoder.conv_in.weight"]
)
def test_single_file_with_a_missing_weight_is_refused(merged, tmp_path, name):
    _, folder, file = merged
    tensors = load_safetensors(file)
    del tensors[name]
    save_file(tensors, tmp_path / "short.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks weights|are not in"):
        load(tmp_path / "short.safetensors", device="cpu", config=folder)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["lora_unet_down_blocks_0.lora_down.weight"], "--lora"),
        (["unet.mid_block.x.lora_A.weight"], "--lora"),
        (["down_blocks.0.resnets.0.conv1.weight"], "UNet alone"),
        (["first_stage_model.encoder.conv_in.weight"], "VAE alone"),
        (["control_model.time_embed.0.weight"], "ControlNet"),
        (["model.diffusion_model.double_blocks.0.x"], "Flux"),
        (["model.diffusion_model.x", "first_stage_model.x", "cond_stage_model.model.x"], "SD 2"),
        (["layers.0.weight"], "no SDXL or SD 1.5"),
    ],
)
def test_other_single_files_are_named_for_what_they_are(tmp_path, names, expected):
    file = tmp_path / "file.safetensors"
    save_file({name: torch.zeros(1) for name in names}, file)
    for call in (describe, load):
        with pytest.raises(CheckpointError, match=expected):
            call(file)


def test_inpainting_file_needs_its_own_config(tmp_path):
    file = tmp_path / "inpaint.safetensors"
    save_file(
        {
            "model.diffusion_model.input_blocks.0.0.weight": torch.zeros(4, 9, 3, 3),
            "first_stage_model.x": torch.zeros(1),
            "cond_stage_model.transformer.x": torch.zeros(1),
        },
        file,
    )
    with pytest.raises(CheckpointError, match="9 input channels"):
        describe(file)


_WIDE = {"block_out_channels": [128, 384, 384], "attention_head_dim": [4, 12, 12]}
_MEASURE = """
import sys
from pathlib import Path
from sdx_accel.runtime.checkpoints import load
small, source, config, dtype = sys.argv[1:]
load(small, device="cpu")  # imports and pools that every load needs
def status(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if key in l)
    return int(line.split()[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
before = status("VmRSS")
pipe = load(source, config=config or None, dtype=dtype, device="cpu")
print(status("VmHWM") - before, next(pipe.unet.parameters()).dtype)
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """(tiny folder, folder and single file of a pipeline of about 190 MiB, most of it UNet)"""
    root = tmp_path_factory.mktemp("wide")
    pipe = build_random("random:sdxl-tiny", torch.float32)
    part = architecture("random:sdxl-tiny").components["unet"]
    part = dataclasses.replace(part, config={**part.config, **_WIDE})
    with quiet_libraries():
        pipe.save_pretrained(root / "tiny")
        pipe.unet = build_random_component(part, torch.float32)
        pipe.register_to_config(unet=("diffusers", "UNet2DConditionModel"))
        pipe.save_pretrained(root / "wide")
    merge(pipe, root / "wide.safetensors")
    return root / "tiny", root / "wide", root / "wide.safetensors"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", [pytest.param("folder", marks=pytest.mark.slow), "file"])
def test_case_105_loading_holds_no_second_copy(wide, kind):
    """An fp32 file loaded in 16 bits: peak ≤ file + largest component as loaded + 32 MiB."""
    tiny, folder, file = wide
    source, config = (folder, "") if kind == "folder" else (file, folder)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tiny), str(source), str(config), "bf16"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak, loaded = done.stdout.split()
    assert loaded == "torch.bfloat16"
    on_disk = file.stat().st_size
    assert on_disk > 150 * 2**20
    largest = (folder / "unet" / "diffusion_pytorch_model.safetensors").stat().st_size // 2
    assert int(peak) <= on_disk + largest + 32 * 2**20
