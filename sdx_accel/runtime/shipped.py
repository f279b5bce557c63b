"""The model that comes with the package: its name, and where its files are.

Knows a name and a folder; reads nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from sdx_accel.errors import CheckpointError

__all__ = ["DEMO", "demo_folder", "is_demo", "name_of"]

DEMO = "demo"


def is_demo(source: object) -> bool:
    """Whether `source` names the demo model; a folder of that name is ``"./demo"`` or a Path."""
    return isinstance(source, str) and source == DEMO


def demo_folder() -> Path:
    """The demo model's diffusers folder.

    Raises:
        CheckpointError: this installation came without it.
    """
    folder = _folder()
    if not (folder / "model_index.json").is_file():
        raise CheckpointError(
            f"the demo model's files are not in {folder}; install sdx-accel again, or name "
            "another model"
        )
    return folder


def name_of(place: str) -> str:
    """What people call the model of a loaded pipeline: its folder or hub id, or ``"demo"``."""
    return DEMO if os.path.realpath(place) == str(_folder()) else place


def _folder() -> Path:
    return Path(__file__).resolve().parents[1] / "demo" / "model"
