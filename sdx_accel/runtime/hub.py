"""Models by hub id: the local cache first, the network only when it must and may.

Knows huggingface_hub; never asks it for anything when HF_HUB_OFFLINE is set.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.architectures import RANDOM_PREFIX, RANDOM_SPECS
from sdx_accel.runtime.checkpoint_files import neighbours
from sdx_accel.runtime.checkpoint_folders import INDEX, check_folder, find_weights
from sdx_accel.runtime.shipped import DEMO

__all__ = [
    "cached_folder",
    "configurations",
    "missing_path_message",
    "part_configuration",
    "part_snapshot",
    "snapshot",
]

# what to do about one model that is not there; the names of whole models are of no help then
_PART = "give its folder, or fetch it once while online"
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def cached_folder(name: str) -> Path | None:
    """The newest cached snapshot of a hub id that has a model_index.json, or None. No network."""
    from huggingface_hub import snapshot_download

    if not _ID.fullmatch(name):
        return None
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if (folder / INDEX).is_file() else None


def configurations(name: str) -> Path:
    """A folder with at least the .json files of a hub id.

    Raises:
        CheckpointError: not cached and offline, or not on the hub.
    """
    return cached_folder(name) or _fetch(name, lambda: _download(name, ["*.json", "*/*.json"]))


def snapshot(name: str, dtype: Any) -> Path:
    """A folder with everything that a pipeline needs, cached or downloaded.

    Args:
        name: hub id.
        dtype: `torch.dtype`; for fp16 the smaller fp16 files are fetched where they exist.

    Raises:
        CheckpointError: incomplete and offline, or not on the hub.
    """
    import torch

    half = dtype is torch.float16
    folder = cached_folder(name)
    incomplete = None
    if folder is not None:
        try:
            check_folder(folder, half=half)
            return folder
        except CheckpointError as error:
            incomplete = error
    if incomplete is not None and _offline():
        raise CheckpointError(
            f"the cached copy of {name!r} is incomplete and HF_HUB_OFFLINE forbids fetching the "
            f"rest: {incomplete}"
        )
    return _fetch(name, lambda: _download_pipeline(name, half))


def part_configuration(name: str) -> Path:
    """A folder with the config.json of a hub id that is one model, such as a ControlNet.

    Raises:
        CheckpointError: not cached and offline, or not on the hub.
    """
    return _cached_part(name) or _fetch(name, lambda: _download(name, ["config.json"]), _PART)


def part_snapshot(name: str, half: bool) -> Path:
    """A folder with the configuration and weights of a hub id that is one model.

    Args:
        name: hub id.
        half: prefer the fp16 files.

    Raises:
        CheckpointError: incomplete and offline, or not on the hub.
    """
    folder = _cached_part(name)
    if folder is not None and (_offline() or _has_weights(folder, half)):
        return folder
    patterns = ["config.json", *_weight_patterns(name, half)]
    return _fetch(name, lambda: _download(name, patterns), _PART)


def _cached_part(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    if not _ID.fullmatch(name):
        return None
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if (folder / "config.json").is_file() else None


def _has_weights(folder: Path, half: bool) -> bool:
    try:
        find_weights(folder, "diffusers", half=half)
    except CheckpointError:
        return False
    return True


def _weight_patterns(name: str, half: bool) -> list[str]:
    """The fp16 files where there are some and they are wanted, else the plain ones."""
    plain = "diffusion_pytorch_model.safetensors"
    if half:
        from huggingface_hub import HfApi

        fp16 = "diffusion_pytorch_model.fp16.safetensors"
        try:
            if HfApi().file_exists(name, fp16):
                return [fp16]
        except (OSError, ValueError):
            pass  # the download itself says what is wrong
    return [plain, "diffusion_pytorch_model-*.safetensors", f"{plain}.index.json"]


def missing_path_message(path: Path) -> str:
    """One line for a path that is not there, with the closest names beside it."""
    parent = path.parent
    if not os.path.isdir(parent):
        return f"no such model: {path}; the folder {parent} does not exist"
    if not os.access(parent, os.R_OK | os.X_OK):
        return f"no such model: {path}; the folder {parent} may not be read, check its permissions"
    try:
        names = [entry.name for entry in parent.iterdir()]
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, n=1)
    hint = (
        f"did you mean {parent / close[0]}?" if close else f"{parent} holds: {neighbours(parent)}"
    )
    return f"no such model: {path}; {hint}"


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _download(name: str, patterns: list[str]) -> str:
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, allow_patterns=patterns))


def _download_pipeline(name: str, half: bool) -> str:
    from diffusers import DiffusionPipeline

    if half:
        try:
            return str(DiffusionPipeline.download(name, variant="fp16", use_safetensors=True))
        except (ValueError, OSError):
            pass  # many models have no fp16 files; the plain ones serve as well
    return str(DiffusionPipeline.download(name, use_safetensors=True))


def _fetch(name: str, download: Any, hint: str | None = None) -> Path:
    """Run a download and turn each way it fails into one line."""
    if not _ID.fullmatch(name):
        raise CheckpointError(
            f"no file or folder {name!r} here, and it is no hub id (owner/name); "
            f"{hint or _suggestion(name)}"
        )
    if _offline():
        raise CheckpointError(
            f"no file or folder {name!r} here, the model is not in the local cache, and "
            f"HF_HUB_OFFLINE forbids fetching it; {hint or _suggestion(name)}"
        )
    try:
        return Path(download())
    except (OSError, ValueError, RuntimeError) as error:
        kind = type(error).__name__
        if "Gated" in kind:
            cause = "the model is gated: accept its licence on the hub, then `hf auth login`"
        elif "NotFound" in kind and "LocalEntry" not in kind:
            cause = "there is no such model on the hub, or it is private (`hf auth login`)"
        else:
            cause = f"it is not in the local cache and the hub cannot be reached ({kind})"
        raise CheckpointError(
            f"no file or folder {name!r} here, and {cause}; {hint or _suggestion(name)}"
        ) from None


def _suggestion(name: str) -> str:
    """The closest known names: the demo model, random specs and cached models."""
    known = [*RANDOM_SPECS, *(spec.removeprefix(RANDOM_PREFIX) for spec in RANDOM_SPECS)]
    close = difflib.get_close_matches(
        name.lower(), [DEMO, *known, *_cached_names()], n=1, cutoff=0.5
    )
    if close:
        best = close[0] if close[0] not in known or ":" in close[0] else RANDOM_PREFIX + close[0]
        return f"did you mean {best!r}?"
    return "give a folder, a .safetensors file, or try demo, the model of this package"


def _cached_names() -> list[str]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    except (CacheNotFound, OSError, ValueError):
        return []
