"""Single-file checkpoints: recognised by their header, loaded without network (cases 105, 131)."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import describe, load
from sdx_accel.runtime.folder_loading import quiet_libraries
from sdx_accel.runtime.random_models import build_random, build_random_component

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}


def _original_unet_name(name: str, layers: int) -> str:
    """A UNet tensor's name in the original layout."""
    plain = {
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
        "mid_block.attentions.0": "middle_block.1",
    }
    for ours, theirs in plain.items():
        if name.startswith(ours + "."):
            return theirs + name.removeprefix(ours)
    parts = name.split(".")
    if parts[0] == "mid_block":
        block, inner = f"middle_block.{2 * int(parts[2])}", parts[3:]
        return f"{block}.{_RESNET[inner[0]]}.{inner[1]}"
    level, kind, index, inner = int(parts[1]), parts[2], int(parts[3]), parts[4:]
    down = parts[0] == "down_blocks"
    if kind == "downsamplers":
        return f"input_blocks.{(level + 1) * (layers + 1)}.0.op.{inner[-1]}"
    if kind == "upsamplers":
        return f"output_blocks.{level * (layers + 1) + layers}.UP.conv.{inner[-1]}"
    position = (1 if down else 0) + level * (layers + 1) + index
    block = f"{'input' if down else 'output'}_blocks.{position}"
    if kind == "attentions":
        return ".".join([block, "1", *inner])
    return f"{block}.0.{_RESNET[inner[0]]}.{inner[1]}"


def _original_vae_name(name: str, levels: int) -> str:
    parts = name.split(".")
    if "mid_block" in parts:
        side, _, kind, index, *inner = parts
        if kind == "resnets":
            return f"{side}.mid.block_{int(index) + 1}.{'.'.join(inner)}"
        for ours, theirs in _VAE_ATTENTION.items():
            if ".".join(inner).startswith(ours + "."):
                return f"{side}.mid.attn_1.{theirs}.{inner[-1]}"
    if len(parts) > 2 and parts[1] in ("down_blocks", "up_blocks"):
        side, way, level, kind, index, *inner = parts
        way = way.removesuffix("_blocks")
        level = str(levels - 1 - int(level)) if way == "up" else level
        if kind == "resnets":
            inner = ["nin_shortcut" if part == "conv_shortcut" else part for part in inner]
            return f"{side}.{way}.{level}.block.{index}.{'.'.join(inner)}"
        return f"{side}.{way}.{level}.{way}sample.conv.{inner[-1]}"
    return name.replace("conv_norm_out", "norm_out")


def _open_clip(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {}
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        name = name.removeprefix("text_model.")
        if name.startswith("encoder.layers."):
            number, inner = name.removeprefix("encoder.layers.").split(".", 1)
            inner = inner.replace("layer_norm1", "ln_1").replace("layer_norm2", "ln_2")
            inner = inner.replace("mlp.fc1", "mlp.c_fc").replace("mlp.fc2", "mlp.c_proj")
            inner = inner.replace("self_attn.out_proj", "attn.out_proj")
            if "self_attn." in inner:
                layers.setdefault(number, {})[inner.removeprefix("self_attn.")] = tensor
            else:
                out[f"transformer.resblocks.{number}.{inner}"] = tensor
        elif name == "text_projection.weight":
            out["text_projection"] = tensor.T.contiguous()
        elif name == "embeddings.position_embedding.weight":
            out["positional_embedding"] = tensor
        else:
            name = name.replace("embeddings.token_embedding", "token_embedding")
            out[name.replace("final_layer_norm", "ln_final")] = tensor
    for number, parts in layers.items():
        for kind in ("weight", "bias"):
            joined = torch.cat([parts[f"{letter}_proj.{kind}"] for letter in "qkv"])
            out[f"transformer.resblocks.{number}.attn.in_proj_{kind}"] = joined
    return out


def merge(pipe, path: Path) -> None:
    """Write a pipeline as one file in the original layout."""
    tensors = {}
    unet = pipe.unet.state_dict()
    layers = pipe.unet.config.layers_per_block
    for name, tensor in unet.items():
        new = _original_unet_name(name, layers)
        if ".UP." in new:
            level = name.split(".")[1]
            attention = any(key.startswith(f"up_blocks.{level}.attentions") for key in unet)
            new = new.replace("UP", "2" if attention else "1")
        tensors["model.diffusion_model." + new] = tensor
    levels = len(pipe.vae.config.block_out_channels)
    for name, tensor in pipe.vae.state_dict().items():
        new = _original_vae_name(name, levels)
        if ".attn_1." in new and new.endswith("weight") and tensor.ndim == 2:
            tensor = tensor[:, :, None, None]
        tensors["first_stage_model." + new] = tensor
    xl = hasattr(pipe, "text_encoder_2")
    first = "conditioner.embedders.0.transformer." if xl else "cond_stage_model.transformer."
    for name, tensor in pipe.text_encoder.state_dict().items():
        tensors[f"{first}text_model.{name.removeprefix('text_model.')}"] = tensor
    if xl:
        for name, tensor in _open_clip(pipe.text_encoder_2.state_dict()).items():
            tensors["conditioner.embedders.1.model." + name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


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
