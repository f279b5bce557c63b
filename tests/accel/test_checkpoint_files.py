"""Broken and foreign files are named for what they are, before anything is loaded (case 129)."""

import io
import json
import pickle
import struct

import pytest
import torch
from safetensors.torch import save, save_file

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.checkpoint_files import read_header, read_json, size_text
from sdx_accel.runtime.checkpoints import describe, load
from sdx_accel.runtime.loras import load_loras


def _zip_pickle():
    buffer = io.BytesIO()
    torch.save({"state_dict": {"x": torch.zeros(8)}}, buffer)
    return buffer.getvalue()


def _entries(**tensors):
    raw = json.dumps(tensors).encode()
    return struct.pack("<Q", len(raw)) + raw


_GOOD = save({"weight": torch.arange(4096, dtype=torch.float32), "b": torch.zeros(3)})
_LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 6938078334\n"
)
_BROKEN = {
    "truncated-data": (_GOOD[:-100], "truncated"),
    "truncated-header": (_GOOD[:40], "truncated"),
    "truncated-length": (_GOOD[:5], "truncated"),
    "html": (b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>" * 9, "HTML"),
    "html-spaces": (b"\n\n  <html lang=en>", "HTML"),
    "lfs": (_LFS, "Git LFS pointer"),
    "empty": (b"", "empty"),
    "pickle-zip": (_zip_pickle(), "pickle"),
    "pickle-bare": (pickle.dumps({"x": [1.0] * 99}, protocol=4), "pickle"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(64), "GGUF"),
    "json": (b'{"error": "Repository not found"}', "JSON"),
    "noise": (bytes(range(256)) * 4, "bad header"),
    "zeros": (bytes(4096), "bad header"),
    "huge-length": (struct.pack("<Q", 2**40) + b"{" + bytes(99), "bad header"),
    "no-json": (struct.pack("<Q", 8) + b"{not js}", "bad header"),
    "no-utf8": (struct.pack("<Q", 8) + b"{\xff\xfe\xfd\xfc\xfb\xfa}", "bad header"),
    "trailing": (_GOOD + b"more", "bad header"),
    "wrong-extent": (
        _entries(x={"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}) + bytes(8),
        "bad header",
    ),
    "no-shape": (_entries(x={"dtype": "F32", "data_offsets": [0, 0]}), "bad header"),
    "negative": (_entries(x={"dtype": "F32", "shape": [0], "data_offsets": [0, -4]}), "bad header"),
}


@pytest.mark.parametrize("kind", _BROKEN)
def test_case_129_each_broken_file_gets_one_line(tmp_path, kind):
    data, cause = _BROKEN[kind]
    file = tmp_path / "модель ü.safetensors"
    file.write_bytes(data)
    for call in (
        read_header,
        describe,
        lambda path: load(path, device="cpu"),
        lambda path: load_loras(_TakesLoras(), [(path, 1.0)]),
    ):
        with pytest.raises(CheckpointError) as caught:
            call(file)
        message = str(caught.value)
        assert cause in message
        assert str(file) in message
        assert size_text(len(data)) in message
        assert "\n" not in message
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("verb", ["generate", "doctor"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("truncated-data", "model.safetensors"),
        ("html", "model.safetensors"),
        ("lfs", "model.safetensors"),
        ("noise", "model.safetensors"),
        ("empty", "model.safetensors"),
        ("pickle-zip", "model.safetensors"),
        ("pickle-bare", "model.safetensors"),
        ("pickle-zip", "model.ckpt"),
        ("pickle-bare", "model.pt"),
    ],
)
def test_case_129_the_command_line_says_so_and_loads_nothing(
    cli, tmp_path, monkeypatch, kind, name, verb
):
    def loaded(*args, **kwargs):
        raise AssertionError("something was loaded")

    monkeypatch.setattr("sdx_accel.runtime.checkpoints.load", loaded)
    monkeypatch.setattr("torch.load", loaded)
    data, cause = _BROKEN[kind]
    file = tmp_path / name
    file.write_bytes(data)
    line = ("generate", "x", "--model", file) if verb == "generate" else ("doctor", "-m", file)
    result = cli(*line)
    assert result.code == 2
    (said,) = [line for line in result.err.splitlines() if cause in line]
    assert name in said
    assert "Traceback" not in result.err
    assert not (tmp_path / "outputs").exists()


class _TakesLoras:
    """The little of a pipeline that is looked at before a file is read."""

    def load_lora_weights(self):
        raise AssertionError("work was started")

    def get_list_adapters(self):
        return {}


def test_every_truncation_of_a_good_file_is_noticed(tmp_path):
    file = tmp_path / "cut.safetensors"
    small = save({"a": torch.zeros(3), "b": torch.ones(2, dtype=torch.float16)})
    file.write_bytes(small)
    assert set(read_header(file).tensors) == {"a", "b"}
    for length in range(len(small)):
        file.write_bytes(small[:length])
        with pytest.raises(CheckpointError, match=r"truncated|empty"):
            read_header(file)


def test_header_of_a_good_file(tmp_path):
    file = tmp_path / "good.safetensors"
    tensors = {
        "half": torch.zeros(3, 5, dtype=torch.float16),
        "brain": torch.zeros(2, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.0),
        "numbers": torch.arange(100),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    header = read_header(file)
    assert header.file_bytes == file.stat().st_size
    assert header.metadata == {"format": "pt"}
    assert {name: entry.shape for name, entry in header.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert header.tensors["half"].data_bytes == 30
    assert header.dtype == "float16"


def test_lengths_that_look_like_pickles_are_still_safetensors(tmp_path):
    """A header of 0x280 bytes starts with the very bytes of a pickle of protocol 2."""
    file = tmp_path / "good.safetensors"
    for protocol in (2, 3, 4, 5):
        length = 0x80 + (protocol << 8)
        raw = b"{}".ljust(length)
        file.write_bytes(struct.pack("<Q", length) + raw)
        assert read_header(file).tensors == {}


def test_files_that_are_not_there(tmp_path):
    (tmp_path / "real.safetensors").write_bytes(_GOOD)
    with pytest.raises(CheckpointError, match=r"no such file.*real\.safetensors"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="is a folder"):
        read_header(tmp_path)
    with pytest.raises(CheckpointError, match=r"did you mean .*real\.safetensors"):
        load(str(tmp_path / "reel.safetensors"))
    with pytest.raises(CheckpointError, match="does not exist"):
        load(str(tmp_path / "no" / "such.safetensors"))


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".bin", ".pth"])
def test_pickles_are_never_opened(tmp_path, suffix):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was loaded",))

    file = tmp_path / f"model{suffix}"
    file.write_bytes(pickle.dumps(Bomb()))
    for call in (describe, load, lambda path: load_loras(_TakesLoras(), [(path, 1.0)])):
        with pytest.raises(CheckpointError, match="pickle, which can run code"):
            call(file)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"{", "invalid JSON at line 1"),
        (b"[]", "must hold a JSON object"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"<html>", "HTML page"),
        (_LFS, "Git LFS"),
        (b"", "invalid JSON"),
    ],
)
def test_json_files(tmp_path, data, expected):
    file = tmp_path / "config.json"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=expected) as caught:
        read_json(file, "the configuration of x")
    assert str(file) in str(caught.value)


def test_json_with_byte_order_mark(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes('\ufeff{"a": "ü"}\r\n'.encode())
    assert read_json(file, "x") == {"a": "ü"}


def test_sizes_for_people():
    assert [size_text(n) for n in (131, 4 * 2**20, 7 * 2**30)] == [
        "131 bytes",
        "4.0 MiB",
        "7.00 GiB",
    ]
