"""Turns the text of single flags into values, and refuses what is not built yet.

Knows the flags' spelling; knows nothing of models, torch or files' contents.
"""

import re
from enum import StrEnum
from typing import Any

from sdx_accel.budget import units
from sdx_accel.errors import RefusedError
from sdx_accel.runtime import host_memory

__all__ = [
    "Dtype",
    "Format",
    "Quality",
    "parse_device",
    "parse_ram",
    "parse_vram",
    "refuse_unbuilt",
]

_QUALITIES = ("exact", "near")


class Dtype(StrEnum):
    """Values of --dtype."""

    AUTO = "auto"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


class Quality(StrEnum):
    """Values of --quality."""

    EXACT = "exact"
    NEAR = "near"
    FAST = "fast"


class Format(StrEnum):
    """Values of --format."""

    PNG = "png"
    JPG = "jpg"
    JPEG = "jpeg"
    WEBP = "webp"


def parse_vram(text: str) -> str:
    """Check a budget's spelling and return it without blanks, in lower case.

    Args:
        text: GiB ("8", "8GiB"), "auto" (what is free), "80%" of the card, or "-1" (free minus 1).

    Raises:
        RefusedError: anything else, or zero.
    """
    units.parse_vram(text)
    return text.strip().lower()


def parse_ram(text: str) -> str:
    """Check an amount of host memory as `parse_vram` checks a budget.

    Raises:
        RefusedError: anything else, or zero.
    """
    host_memory.parse_ram(text)
    return text.strip().lower()


def parse_device(text: str) -> str:
    """Check a device's spelling: auto, cpu, cuda or cuda:N.

    Raises:
        RefusedError: anything else.
    """
    value = text.strip().lower()
    if value not in ("auto", "cpu", "cuda") and not re.fullmatch(r"cuda:\d+", value):
        raise RefusedError(f"--device {text!r} is not built; built: auto, cpu, cuda, cuda:N")
    return value


def refuse_unbuilt(flags: dict[str, Any]) -> None:
    """Refuse flags whose feature does not exist yet, naming those that do.

    Args:
        flags: values by flag name, None where a flag was not given.

    Raises:
        RefusedError: the first such flag.
    """
    quality = flags.get("quality")
    if quality is not None and quality not in _QUALITIES:
        raise RefusedError(f"--quality {quality} is not built yet; built: {', '.join(_QUALITIES)}")
