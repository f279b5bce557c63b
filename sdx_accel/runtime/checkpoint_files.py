"""One safetensors or JSON file on disk: read what it says, and name what is wrong with it.

Reads headers only, never tensor data; knows nothing of torch, diffusers or pipelines.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdx_accel.errors import CheckpointError

__all__ = [
    "PICKLE_SUFFIXES",
    "Header",
    "HeaderTensor",
    "neighbours",
    "read_header",
    "read_json",
    "size_text",
]

# formats that run code while they load
PICKLE_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
# safetensors' own limit: a longer header is refused by the library as well
_MAXIMUM_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
_TORCH_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class HeaderTensor:
    """One entry of a safetensors header: dtype as the format spells it, shape, bytes of data."""

    dtype: str
    shape: tuple[int, ...]
    data_bytes: int


@dataclass(frozen=True)
class Header:
    """A whole, consistent safetensors header.

    Attributes:
        path: the file.
        file_bytes: its size.
        tensors: by name, in the file's order.
        metadata: the optional free text entries.
    """

    path: Path
    file_bytes: int
    tensors: dict[str, HeaderTensor]
    metadata: dict[str, str]

    @property
    def dtype(self) -> str | None:
        """torch's name of the floating dtype that holds most bytes; None without floats."""
        totals: dict[str, int] = {}
        for tensor in self.tensors.values():
            if tensor.dtype in _TORCH_NAMES:
                name = _TORCH_NAMES[tensor.dtype]
                totals[name] = totals.get(name, 0) + tensor.data_bytes
        return max(totals, key=lambda name: totals[name]) if totals else None


def size_text(size: int) -> str:
    """A size for people: ``"131 bytes"``, ``"4.2 MiB"``, ``"6.46 GiB"``."""
    if size < 10 * 2**10:
        return f"{size} byte{'' if size == 1 else 's'}"
    if size < 2**30:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**30:.2f} GiB"


def neighbours(folder: Path, limit: int = 8) -> str:
    """What a folder holds, for messages; ``"nothing"`` when it is empty or unreadable."""
    try:
        names = sorted(
            entry.name + ("/" if entry.is_dir() else "")
            for entry in folder.iterdir()
            if not entry.name.startswith(".")
        )
    except OSError:
        return "nothing"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more if names else "nothing"


def read_json(path: Path, purpose: str) -> dict[str, Any]:
    """A JSON object from a UTF-8 file (with or without byte order mark).

    Args:
        path: the file.
        purpose: what it is for, named in the message, for instance ``"the UNet's configuration"``.

    Raises:
        CheckpointError: missing, unreadable, not JSON, or not an object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing ({purpose}); {path.parent.name or path.parent}/ holds: "
            f"{neighbours(path.parent)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} ({purpose}) cannot be read: {error}") from None
    try:
        value = json.loads(text)
    except RecursionError:
        raise CheckpointError(
            f"{path} ({purpose}, {size_text(len(text.encode()))}): invalid JSON, nested too "
            "deeply; fetch the file again"
        ) from None
    except json.JSONDecodeError as error:
        foreign = None if text.lstrip()[:1] in ("{", "[") else _foreign_content(text[:512].encode())
        cause = foreign or (
            f"invalid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        )
        raise CheckpointError(
            f"{path} ({purpose}, {size_text(len(text.encode()))}): {cause}; fetch the file again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} ({purpose}) must hold a JSON object, not {text[:40]!r}")
    return value


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a safetensors file, checked against the file's size.

    Raises:
        CheckpointError: one line with path, size and the likely cause: missing, empty, truncated,
            an HTML page, a Git LFS pointer, a renamed pickle, or a bad header.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder, not a file")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(512)
            length = int.from_bytes(start[:_LENGTH_BYTES], "little")
            # a header always opens with a brace, so a file that does so is judged as safetensors
            plausible = start[_LENGTH_BYTES : _LENGTH_BYTES + 1] in (b"{", b"")
            cause = None if plausible and size >= _LENGTH_BYTES else _foreign_content(start)
            if size == 0:
                raise _broken(path, 0, "empty: the download or copy did not finish")
            if cause is not None:
                raise _broken(path, size, cause)
            if size < _LENGTH_BYTES:
                raise _broken(path, size, "truncated: not even the length of the header is there")
            if length > _MAXIMUM_HEADER_BYTES or not plausible:
                raise _broken(path, size, "bad header: this is not a safetensors file")
            if length > size - _LENGTH_BYTES:
                raise _broken(path, size, f"truncated: the header alone has {size_text(length)}")
            file.seek(_LENGTH_BYTES)
            raw = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(
            f"no such file: {path}; {path.parent} holds: {neighbours(path.parent)}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    return _parse_header(path, size, raw)


def _parse_header(path: Path, size: int, raw: bytes) -> Header:
    """Header from its JSON bytes; every extent is checked against the data that is there."""
    try:
        entries = json.loads(raw.decode("utf-8"))
        metadata = entries.pop("__metadata__", None) or {}
        tensors = {}
        end_of_data = 0
        for name, entry in entries.items():
            shape = tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
            bits = _BITS.get(entry["dtype"])
            expected = end - begin if bits is None else math.prod(shape) * bits // 8
            if not 0 <= begin <= end or end - begin != expected or min(shape, default=0) < 0:
                raise ValueError(f"the extent of {name} contradicts its shape")
            tensors[name] = HeaderTensor(str(entry["dtype"]), shape, end - begin)
            end_of_data = max(end_of_data, end)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(path, size, f"bad header: {error or type(error).__name__}") from None
    there = size - _LENGTH_BYTES - len(raw)
    if there < end_of_data:
        raise _broken(
            path, size, f"truncated: {size_text(end_of_data - there)} of its data are missing"
        )
    if there > end_of_data:
        raise _broken(
            path,
            size,
            f"bad header: {size_text(there - end_of_data)} follow that it does not describe",
        )
    return Header(path, size, tensors, {str(k): str(v) for k, v in metadata.items()})


def _broken(path: Path, size: int, cause: str) -> CheckpointError:
    return CheckpointError(f"{path} ({size_text(size)}): {cause}; fetch the file again")


def _foreign_content(start: bytes) -> str | None:
    """What a file really is, told from its first bytes; None when they are not recognised."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself (`git lfs pull` fetches it)"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<body")):
        return "an HTML page saved under this name, often a login or error page"
    if text.startswith((b"{", b"[")):
        return "JSON text, probably a server's error message"
    if start.startswith(b"gguf") or start.startswith(b"GGUF"):
        return "a GGUF file under another name; only safetensors files are read"
    # zip is torch's pickle container; 0x80 and a protocol number 2–5 is a bare pickle
    if start.startswith(b"PK\x03\x04") or (
        start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"
    ):
        return "a pickle (.ckpt) under another name; pickles can run code, so it is not loaded"
    return None
