"""What is added to a model by flags: LoRAs, ControlNets and the pictures that go with them.

Knows the flags' spelling and how they belong together; opens no file.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from sdx_accel.errors import RefusedError

__all__ = [
    "PARTS",
    "ControlNet",
    "Embedding",
    "IpAdapter",
    "Lora",
    "absolute",
    "adapter_settings",
    "parse_embedding",
    "parse_lora",
    "parse_scaled",
]


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA file or folder and how strongly it is applied.

    Args:
        path: as the user wrote it.
        scale: 1.0 is the strength it was trained with.
    """

    path: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ControlNet:
    """A ControlNet, how strongly it steers, and the picture that it follows.

    Args:
        path: folder, hub id or `random:controlnet`.
        scale: 1.0 adds what it was trained to add, 0 nothing.
        image: absolute path of the picture; None only where nothing but memory is asked for.
    """

    path: str
    scale: float = 1.0
    image: str | None = None


@dataclass(frozen=True, slots=True)
class IpAdapter:
    """An IP-Adapter, how strongly its picture counts, and the picture that is its prompt.

    Args:
        path: .safetensors file, folder with one, or `random:ip-adapter`.
        scale: 1.0 as strongly as the text, 0 not at all.
        image: absolute path of the picture; None only where nothing but memory is asked for.
    """

    path: str
    scale: float = 1.0
    image: str | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """A textual inversion and the word that stands for it in prompts.

    Args:
        path: .safetensors file.
        token: the word.
    """

    path: str
    token: str


#: a job's fields that hold several parts, and the class of each
PARTS: dict[str, type[Any]] = {
    "loras": Lora,
    "controlnets": ControlNet,
    "ip_adapters": IpAdapter,
    "embeddings": Embedding,
}


def adapter_settings(given: dict[str, Any], recorded: Any, only_plan: bool) -> dict[str, Any]:
    """The fields of `PARTS` that the flags set.

    Args:
        given: flags by name.
        recorded: the job that is made again, or None; its parts can get other pictures.
        only_plan: no picture will be made, so that parts may lack theirs.

    Raises:
        RefusedError: a part without a name or picture, or a picture without its part.
    """
    settings: dict[str, Any] = {}
    if "lora" in given:
        loras = [parse_lora(text) for text in given["lora"]]
        settings["loras"] = [{**asdict(lora), "path": absolute(lora.path)} for lora in loras]
    for field, flag, picture_flag in (
        ("controlnets", "--controlnet", "--control-image"),
        ("ip_adapters", "--ip-adapter", "--ip-image"),
    ):
        name, picture = (text[2:].replace("-", "_") for text in (flag, picture_flag))
        if name not in given and picture not in given:
            continue
        before = parts = getattr(recorded, field, ())
        if name in given:
            parts = [PARTS[field](*parse_scaled(flag, text)) for text in given[name]]
        if len(before) == len(parts):
            # made again with another strength, say: the pictures stay
            parts = [replace(new, image=old.image) for new, old in zip(parts, before, strict=True)]
        settings[field] = _pair(flag, picture_flag, parts, given.get(picture, ()), only_plan)
    return settings


def parse_lora(text: str) -> Lora:
    """Read PATH or PATH:SCALE of --lora.

    Raises:
        RefusedError: the path is empty or the scale is not finite.
    """
    return Lora(*parse_scaled("--lora", text))


def parse_embedding(text: str) -> tuple[str, str | None]:
    """Read FILE or FILE:TOKEN of --embedding; the file's own name may hold colons.

    Returns:
        (path, token or None).

    Raises:
        RefusedError: the path or the token is empty.
    """
    path, colon, token = text.rpartition(":")
    drive = os.name == "nt" and len(path) == 1
    if not colon or drive or os.path.exists(os.path.expanduser(text)) or "/" in token:
        path, token = text, ""
        colon = ""
    if not path.strip() or (colon and not token.strip()):
        raise RefusedError(
            f"--embedding {text!r}: write --embedding FILE or --embedding FILE:TOKEN"
        )
    return path, token or None


def parse_scaled(flag: str, text: str) -> tuple[str, float]:
    """Read PATH or PATH:SCALE; a colon inside a path, or after a drive letter, is no scale.

    Args:
        flag: for messages.
        text: what the user wrote.

    Returns:
        (path, scale).

    Raises:
        RefusedError: the path is empty or the scale is not finite.
    """
    path, colon, tail = text.rpartition(":")
    try:
        scale = float(tail) if colon else None
    except ValueError:
        scale = None
    # a file that is really called "style:2", or drive C's file "2", is a path
    if scale is None or os.path.exists(text) or (os.name == "nt" and len(path) == 1):
        path, scale = text, 1.0
    if not path.strip():
        raise RefusedError(f"{flag} {text!r} names no file; write {flag} PATH or {flag} PATH:SCALE")
    if not math.isfinite(scale):
        raise RefusedError(f"{flag} {text}: the scale has to be a finite number, such as 0.8")
    return path, scale


def _pair(
    flag: str,
    picture_flag: str,
    parts: Sequence[Any],
    pictures: Sequence[str],
    optional: bool,
) -> list[dict[str, Any]]:
    """Give each part its picture, in the order of the command line.

    Args:
        flag: the parts' flag, such as --controlnet.
        picture_flag: the pictures' flag, such as --control-image.
        parts: with `path` and `image`; parts of a replay have a picture already.
        pictures: paths; none keeps what the parts have.
        optional: whether parts may stay without pictures, because only memory is asked for.

    Returns:
        The parts as JSON-ready values.

    Raises:
        RefusedError: pictures without parts, parts without pictures, or another number of them.
    """
    if pictures and not parts:
        raise RefusedError(f"{picture_flag} belongs to {flag}; give {flag} too")
    if pictures and len(pictures) != len(parts):
        raise RefusedError(
            f"{len(parts)} {flag} and {len(pictures)} {picture_flag}: give one {picture_flag} for "
            f"each {flag}, in the same order"
        )
    values = [asdict(part) for part in parts]
    for value in values:
        # a hub id or a spec stays as it is
        if os.path.exists(os.path.expanduser(value["path"])):
            value["path"] = absolute(value["path"])
    for value, picture in zip_longest(values, pictures):
        if picture is not None:
            value["image"] = absolute(picture)
        if value["image"] is None and not optional:
            raise RefusedError(
                f"{flag} {value['path']} needs a picture: give {picture_flag} PICTURE"
            )
    return values


def absolute(path: str) -> str:
    """A path that holds in another folder too; a shell leaves a quoted tilde alone."""
    return os.path.abspath(os.path.expanduser(path))
