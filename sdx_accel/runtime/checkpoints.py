"""From the name of a model to its description or to a pipeline on the CPU.

Decides what a name means (the demo model, random weights, folder, single file, hub id) and goes to
the network only for a hub id that is not cached. Knows nothing of GPUs, plans or patches.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime import hub, single_files
from sdx_accel.runtime.architectures import architecture, is_random_spec
from sdx_accel.runtime.checkpoint_folders import describe_folder
from sdx_accel.runtime.descriptions import ComponentDescription, ModelDescription
from sdx_accel.runtime.dtypes import dtype_for
from sdx_accel.runtime.folder_loading import load_folder
from sdx_accel.runtime.meta_models import describe_pipeline, meta_component
from sdx_accel.runtime.random_models import build_random
from sdx_accel.runtime.schedulers import check_scheduler, make_scheduler
from sdx_accel.runtime.shipped import demo_folder, is_demo

__all__ = [
    "ComponentDescription",
    "ModelDescription",
    "describe",
    "describe_pipeline",
    "dtype_for",
    "load",
    "meta_component",
]


def describe(
    source: str | os.PathLike[str], *, config: str | os.PathLike[str] | None = None
) -> ModelDescription:
    """What a model is, from configurations and file headers only: no weights, no GPU.

    Args:
        source: ``"demo"`` (the model of this package), ``"random:sdxl"`` and its like, a diffusers
            folder, a single .safetensors file, or a hub id (the local cache first; its .json files
            are fetched when online). A folder named demo is ``"./demo"``.
        config: for a single file, the diffusers folder (or its model_index.json) whose
            configurations it follows; SDXL and SD 1.5 are recognised without it.

    Raises:
        CheckpointError: unknown, missing or broken; the message says what to do.
    """
    known = is_random_spec(source) or is_demo(source)
    path = None if known else local_path(source)
    if config is not None and (path is None or path.is_dir()):
        raise CheckpointError(
            f"--config {os.fspath(config)!r} belongs to a single-file model, and {source} is none; "
            "leave it out"
        )
    if is_random_spec(source):
        return architecture(str(source))
    if is_demo(source):
        return describe_folder(demo_folder(), str(source))
    if path is None:
        return describe_folder(hub.configurations(str(source)), str(source))
    try:
        if path.is_dir():
            return describe_folder(path, str(source))
        return single_files.describe_file(path, config)
    except PermissionError as error:
        raise CheckpointError(
            f"{error.filename or path} may not be read ({error.strerror}); check its permissions"
        ) from error


def load(
    source: str | os.PathLike[str],
    *,
    dtype: Any = "auto",
    config: str | os.PathLike[str] | None = None,
    scheduler: str | None = None,
    device: Any = None,
    allow_pickle: bool = False,
) -> Any:
    """A ready pipeline on the CPU.

    Components are read one after the other straight into `dtype`, so the host never holds two
    copies of more than one of them. SD 1.5's safety checker is left out.

    Args:
        source: as in `describe`.
        dtype: ``"auto"``, ``"fp16"``, ``"bf16"``, ``"fp32"`` or a `torch.dtype`; see `dtype_for`.
        config: as in `describe`.
        scheduler: short name of `schedulers.SCHEDULERS`; None keeps the model's own.
        device: where it will run, which decides what ``"auto"`` means; nothing is moved there.
        allow_pickle: accept .bin weights of a folder; they can run code while they load.

    Returns:
        A `diffusers.DiffusionPipeline`.

    Raises:
        CheckpointError: unknown, missing or broken; found before weights are read.
        RefusedError: unknown dtype, device or scheduler.
    """
    torch_dtype, _ = dtype_for(device, dtype)
    if scheduler is not None:
        check_scheduler(scheduler)
    if is_random_spec(source):
        pipe = build_random(str(source), torch_dtype)
    elif is_demo(source):
        pipe = load_folder(demo_folder(), torch_dtype)
    else:
        path = local_path(source)
        if path is None:
            folder = hub.snapshot(str(source), torch_dtype)
            pipe = load_folder(folder, torch_dtype, allow_pickle=allow_pickle)
        elif path.is_dir():
            pipe = load_folder(path, torch_dtype, allow_pickle=allow_pickle)
        else:
            pipe = single_files.load_file(path, torch_dtype, config)
    if scheduler is not None:
        pipe.scheduler = make_scheduler(scheduler, pipe.scheduler.config)
    return pipe


def local_path(source: str | os.PathLike[str]) -> Path | None:
    """The file or folder that `source` names, or None where it can only be a hub id.

    Raises:
        CheckpointError: it looks like a path, and nothing is there.
    """
    text = os.fspath(source)
    if not text.strip():
        raise CheckpointError("the model's name is empty; name a folder, a file or a hub id")
    path = Path(text).expanduser()
    if os.path.exists(path):
        return path
    if isinstance(source, os.PathLike) or _looks_like_path(text):
        raise CheckpointError(hub.missing_path_message(path))
    return None


def _looks_like_path(text: str) -> bool:
    """Hub ids are ``name`` or ``owner/name``; anything else is meant as a path."""
    return (
        text.startswith((".", "/", "~"))
        or "\\" in text
        or ":" in text
        or text.count("/") > 1
        or text.endswith("/")
        or Path(text).suffix.lower() in single_files.SUFFIXES
    )
