"""Model folders and names: what is missing is named before anything loads (cases 105, 133, 136)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime import hub
from sdx_accel.runtime.checkpoints import describe, load
from sdx_accel.runtime.folder_loading import quiet_libraries
from sdx_accel.runtime.random_models import build_random

_TOKENIZER = Path("tokenizer/tokenizer.json")


@pytest.fixture(scope="module", params=["random:sdxl-tiny", "random:sd15-tiny"])
def saved(request, tmp_path_factory):
    """(pipeline, its folder); not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "модель ü 日本 🙂"
    pipe = build_random(request.param, torch.float32)
    with quiet_libraries():
        pipe.save_pretrained(folder)
    return pipe, folder


@pytest.fixture
def copied(saved, tmp_path):
    """A folder of one's own to break."""
    return shutil.copytree(saved[1], tmp_path / "model")


def same_weights(first, second, dtype=torch.float32):
    for name, module in first.components.items():
        if isinstance(module, torch.nn.Module):
            other = dict(getattr(second, name).state_dict())
            for key, tensor in module.state_dict().items():
                assert torch.equal(tensor.to(dtype), other.pop(key)), (name, key)
            assert not other


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [str, Path])
def test_case_136_folder_of_any_name_loads_with_its_weights(saved, kind, dtype):
    pipe, folder = saved
    loaded = load(kind(folder), dtype=dtype, device="cpu")
    assert type(loaded) is type(pipe)
    same_weights(pipe, loaded, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    assert getattr(loaded, "safety_checker", None) is None
    assert not any(module.training for module in loaded.components.values() if _is_module(module))


def _is_module(value):
    return isinstance(value, torch.nn.Module)


# a process of its own, up to 14 s on a slow machine; test_cli_process.py has one for every prompt
@pytest.mark.slow
def test_case_136_works_in_the_c_locale(saved):
    """No own file may depend on the machine's text encoding."""
    code = (
        "import sys; from sdx_accel.runtime.checkpoints import describe, load\n"
        "folder = sys.argv[1]\n"
        "describe(folder); load(folder, device='cpu'); print('loaded')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved[1])],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=False,
    )
    assert done.stdout.decode().strip() == "loaded", done.stderr.decode(errors="replace")


def test_loading_is_silent_and_leaves_the_libraries_as_they_were(saved, capfd):
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    before = [(each.get_verbosity(), each.is_progress_bar_enabled()) for each in libraries]
    load(saved[1], device="cpu")
    after = [(each.get_verbosity(), each.is_progress_bar_enabled()) for each in libraries]
    assert after == before
    assert capfd.readouterr() == ("", "")


def test_describe_reads_configurations_and_headers_only(saved, monkeypatch):
    pipe, folder = saved
    monkeypatch.setattr("safetensors.safe_open", lambda *a, **k: pytest.fail("weights were read"))
    description = describe(folder)
    assert description.pipeline_class == type(pipe).__name__
    assert (description.default_height, description.default_width) == (128, 128)
    assert description.default_dtype == "float32"
    assert description.scheduler[0] == type(pipe.scheduler).__name__
    for name, component in description.components.items():
        files = description.weight_files[name]
        assert sum(size for _, size in files) >= sum(
            4 * p.numel() for p in getattr(pipe, name).parameters()
        )
        assert component.class_name == type(getattr(pipe, name)).__name__


def test_half_variant_is_preferred_for_half_weights_only(saved, copied):
    for path in copied.glob("*/*.safetensors"):
        half = {name: tensor.half() * 2 for name, tensor in load_file(path).items()}
        save_file(half, path.with_suffix(".fp16.safetensors"), metadata={"format": "pt"})
    pipe = saved[0]
    bias = pipe.unet.conv_in.bias
    same_weights(pipe, load(copied, dtype=torch.float32, device="cpu"))
    from sdx_accel.runtime.folder_loading import load_folder

    loaded = load_folder(copied, torch.float16)
    assert torch.equal(loaded.unet.conv_in.bias, bias.half() * 2)
    # and the variant alone serves every dtype
    for path in copied.glob("*/*.safetensors"):
        if ".fp16." not in path.name:
            path.unlink()
    loaded = load(copied, dtype="fp32", device="cpu")
    assert torch.equal(loaded.unet.conv_in.bias, (bias.half() * 2).float())


def test_sharded_weights_and_a_lost_shard(saved, copied):
    for path in (copied / "unet").glob("*.safetensors"):
        path.unlink()
    with quiet_libraries():
        saved[0].unet.save_pretrained(copied / "unet", max_shard_size="2MB")
    shards = sorted((copied / "unet").glob("*.safetensors"))
    assert len(shards) > 1
    assert len(describe(copied).weight_files["unet"]) == len(shards)
    same_weights(saved[0], load(copied, device="cpu"))
    shards[0].unlink()
    with pytest.raises(CheckpointError, match=f"1 of {len(shards)} weight shards"):
        load(copied, device="cpu")


def _remove(name):
    return lambda folder: (folder / name).unlink()


def _write(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def _tokenizer_without_merges(folder):
    (folder / _TOKENIZER).unlink()
    (folder / "tokenizer" / "vocab.json").write_text("{}")


_UNET_FILE = "unet/diffusion_pytorch_model.safetensors"
_BREAKAGES = {
    "unet-weights": (_remove(_UNET_FILE), ["'unet'", "diffusion_pytorch_model.safetensors"]),
    "encoder-weights": (_remove("text_encoder/model.safetensors"), ["'text_encoder'"]),
    "vae-folder": (lambda folder: shutil.rmtree(folder / "vae"), ["'vae'", "has no folder"]),
    "unet-config": (_remove("unet/config.json"), ["unet/config.json is missing"]),
    "index": (_remove("model_index.json"), ["no model_index.json", "unet/"]),
    "scheduler": (_remove("scheduler/scheduler_config.json"), ["scheduler_config.json"]),
    "merges": (_tokenizer_without_merges, ["'tokenizer'", "merges.txt is missing"]),
    "tokenizer": (_remove(_TOKENIZER), ["'tokenizer'", "tokenizer.json is missing"]),
    "bad-config": (_write("unet/config.json", b'{"a": 1,}'), ["unet/config.json", "invalid JSON"]),
    "bad-index": (_write("model_index.json", b"{"), ["model_index.json", "invalid JSON"]),
    "index-is-empty": (_write("model_index.json", b"{}"), ["model_index.json", "_class_name"]),
    "html-config": (_write("vae/config.json", b"<!doctype html>"), ["vae/config.json", "HTML"]),
    "lfs-weights": (_write(_UNET_FILE, b"version https://git-lfs.github.com/spec/v1\n"), ["LFS"]),
    "bad-tokenizer": (_write(_TOKENIZER, b"{"), ["tokenizer.json", "invalid JSON"]),
    "tokenizer-of-nonsense": (_write(_TOKENIZER, b"{}"), ["cannot be loaded"]),
    "config-of-nonsense": (_write("unet/config.json", b'{"block_out_channels": 3}'), ["unet"]),
}


@pytest.mark.parametrize("kind", _BREAKAGES)
def test_case_133_what_is_missing_or_broken_is_named(copied, kind):
    damage, expected = _BREAKAGES[kind]
    damage(copied)
    with pytest.raises(CheckpointError) as caught:
        load(copied, device="cpu")
    message = str(caught.value).replace(os.sep, "/")
    assert all(text in message for text in expected), message
    assert "\n" not in message
    assert "safe_serialization" not in message
    assert ".bin" not in message


def test_weights_of_another_model_are_refused(copied):
    file = copied / _UNET_FILE
    tensors = load_file(file)
    lost = tensors.pop("conv_out.bias")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 weights of unet .*conv_out\.bias"):
        load(copied, device="cpu")
    save_file({**tensors, "conv_out.bias": lost.repeat(2)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="unet"):
        load(copied, device="cpu")


def test_pickled_weights_only_when_asked(saved, copied):
    file = copied / _UNET_FILE
    torch.save(load_file(file), copied / "unet" / "diffusion_pytorch_model.bin")
    file.unlink()
    with pytest.raises(CheckpointError, match="pickles can run code"):
        load(copied, device="cpu")
    same_weights(saved[0], load(copied, device="cpu", allow_pickle=True))


def test_a_component_folder_points_to_its_model(saved):
    with pytest.raises(CheckpointError, match="single component") as caught:
        describe(saved[1] / "unet")
    assert str(saved[1]) in str(caught.value)


def test_index_may_not_name_other_libraries(copied):
    index = json.loads((copied / "model_index.json").read_text())
    index["unet"] = ["os", "system"]
    (copied / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        load(copied, device="cpu")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """HF_HUB_OFFLINE=1 and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stabilityai/stable-diffusion-xl-base-1.0", "HF_HUB_OFFLINE"),
        ("random-sdxl", "did you mean 'random:sdxl'?"),
        ("sdxl-tiny", "did you mean 'random:sdxl-tiny'?"),
        ("no such model!", "no hub id"),
        ("./model", "no such model"),
        ("C:\\models\\x", "no such model"),
        ("a/b/c", "no such model"),
        ("", "empty"),
    ],
)
def test_unknown_names_say_what_to_do(offline, monkeypatch, tmp_path, name, expected):
    monkeypatch.chdir(tmp_path)
    for call in (describe, load):
        with pytest.raises(CheckpointError) as caught:
            call(name)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)


def test_unreachable_hub_is_one_line(monkeypatch, tmp_path):
    def unreachable(*args, **kwargs):
        raise ConnectionError("name resolution failed\nmore")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "cached_folder", lambda name: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match="hub cannot be reached") as caught:
        describe("owner/name")
    assert "\n" not in str(caught.value)


def test_cached_hub_model_loads_without_network(saved, offline, tmp_path):
    """The cache's own layout: models--owner--name/snapshots/commit, refs/main."""
    root = tmp_path / "cache" / "models--owner--name"
    commit = "0" * 40
    shutil.copytree(saved[1], root / "snapshots" / commit)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    assert describe("owner/name").source == "owner/name"
    same_weights(saved[0], load("owner/name", device="cpu"))
    (root / "snapshots" / commit / _UNET_FILE).unlink()
    with pytest.raises(CheckpointError, match="cached copy of 'owner/name' is incomplete"):
        load("owner/name", device="cpu")
    with pytest.raises(CheckpointError, match="did you mean 'owner/name'"):
        load("owner/nam", device="cpu")
