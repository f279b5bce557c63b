"""Single-file checkpoints in the original layout: recognised by their header, loaded offline.

Knows how SD 1.5 and SDXL files name their tensors; configurations come from a local folder.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoint_files import PICKLE_SUFFIXES, Header, read_header
from sdx_accel.runtime.checkpoint_folders import (
    INDEX,
    check_small_parts,
    describe_folder,
    read_index,
)
from sdx_accel.runtime.descriptions import ModelDescription
from sdx_accel.runtime.file_kinds import WHOLE_MODEL, seems_to_be
from sdx_accel.runtime.folder_loading import (
    dtype_argument,
    first_line,
    fit_tokenizers,
    quiet_libraries,
)
from sdx_accel.runtime.hub import cached_folder

__all__ = ["SUFFIXES", "describe_file", "load_file", "recognise"]

SUFFIXES = (".safetensors", ".gguf", *PICKLE_SUFFIXES)

_UNET = "model.diffusion_model."
# family → (random spec with the same architecture, hub ids whose configurations serve)
_FAMILIES = {
    "SDXL": ("random:sdxl", ("stabilityai/stable-diffusion-xl-base-1.0",)),
    "SD 1.5": (
        "random:sd15",
        ("stable-diffusion-v1-5/stable-diffusion-v1-5", "runwayml/stable-diffusion-v1-5"),
    ),
}


def recognise(header: Header) -> str:
    """``"SDXL"`` or ``"SD 1.5"``.

    Raises:
        CheckpointError: something else; the message says what it seems to be.
    """
    names = header.tensors.keys()

    def has(*prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in names)

    whole = has(_UNET) and has("first_stage_model.")
    if whole and has("conditioner.embedders.1.model."):
        return "SDXL"
    if whole and has("cond_stage_model.transformer."):
        return "SD 1.5"
    seems = seems_to_be(names)
    first = next(iter(names), "nothing")
    raise CheckpointError(
        f"{header.path} is {seems}"
        if seems and seems != WHOLE_MODEL
        else f"{header.path} is no SDXL or SD 1.5 checkpoint (its first tensor is {first!r}); "
        "other models load from their diffusers folder"
    )


def describe_file(path: Path, config: str | os.PathLike[str] | None = None) -> ModelDescription:
    """`ModelDescription` of a single file from its header and `config`, or the public tables.

    Raises:
        CheckpointError: broken, of another kind, or a `config` that is no diffusers folder.
    """
    header = _header(path)
    family = recognise(header)
    spec = _FAMILIES[family][0]
    base = describe_folder(config_folder(config), str(path)) if config else architecture(spec)
    channels = header.tensors.get(f"{_UNET}input_blocks.0.0.weight")
    expected = base.components["unet"].config.get("in_channels", 4)
    if channels is not None and len(channels.shape) != 4:
        raise CheckpointError(
            f"{path} is damaged: its first convolution has shape "
            f"{list(channels.shape)}; fetch it again"
        )
    if channels is not None and channels.shape[1] != expected:
        raise CheckpointError(
            f"{path} is a {family} model with {channels.shape[1]} input channels (inpainting or "
            f"editing), but the configuration has {expected}; give its own with --config FOLDER"
        )
    return replace(
        base,
        source=str(path),
        default_dtype=header.dtype or base.default_dtype,
        weight_files={"": [(str(path), header.file_bytes)]},
    )


def load_file(path: Path, dtype: Any, config: str | os.PathLike[str] | None = None) -> Any:
    """A pipeline on the CPU from a single file; never touches the network.

    Args:
        path: a .safetensors file in the original layout.
        dtype: `torch.dtype` of all modules.
        config: a diffusers folder (or its model_index.json) with configurations and tokenizers;
            without it the family's public folder must be in the local hub cache.

    Raises:
        CheckpointError: broken, of another kind, or no configuration at hand.
    """
    import diffusers

    description = describe_file(path, config)
    if path.suffix != ".safetensors":
        # diffusers tells the format by the name
        raise CheckpointError(f"{path}: rename the file so that it ends in .safetensors")
    family = recognise(_header(path))
    folder = config_folder(config) if config else _cached_config(path, family)
    class_name, parts = read_index(folder)
    check_small_parts(folder, parts)
    pipeline_class: Any = getattr(diffusers, class_name, None)
    if class_name != description.pipeline_class or not hasattr(pipeline_class, "from_single_file"):
        raise CheckpointError(f"{folder / INDEX} names {class_name}, which cannot load {path}")
    extra = {}
    if family == "SD 1.5":
        extra = {
            "safety_checker": None,
            "feature_extractor": None,
            "requires_safety_checker": False,
        }
    with quiet_libraries():
        try:
            pipe = pipeline_class.from_single_file(
                str(path),
                config=str(folder),
                local_files_only=True,
                **{dtype_argument(): dtype},
                **extra,
            )
        except NotImplementedError as error:
            # torch's answer to moving a module whose weights never arrived
            raise CheckpointError(
                f"{path} lacks weights that the configuration in {folder} asks for; the file is "
                "incomplete or of another architecture"
            ) from error
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} does not fit the configuration in {folder}: {first_line(error)}"
            ) from error
    for name, module in pipe.components.items():
        parameters: Any = getattr(module, "named_parameters", list)()
        lost = [key for key, parameter in parameters if parameter.is_meta]
        if lost:
            raise CheckpointError(
                f"{len(lost)} weights of {name} are not in {path} (the first: {lost[0]}); "
                f"it does not fit the configuration in {folder}"
            )
    fit_tokenizers(pipe)
    return pipe


def config_folder(config: str | os.PathLike[str]) -> Path:
    """The diffusers folder that --config names, directly or by its model_index.json.

    Raises:
        CheckpointError: neither.
    """
    path = Path(config).expanduser()
    if path.is_file() and path.name == INDEX:
        return path.parent
    if path.is_dir():
        return path
    raise CheckpointError(
        f"--config {path} "
        + ("is not" if path.exists() else "does not exist; it must be")
        + f" a diffusers folder or its {INDEX}"
    )


def _header(path: Path) -> Header:
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path} is a pickle, which can run code while it loads; use the .safetensors version"
        )
    return read_header(path)


def _cached_config(path: Path, family: str) -> Path:
    names = _FAMILIES[family][1]
    for name in names:
        folder = cached_folder(name)
        if folder is not None:
            return folder
    raise CheckpointError(
        f"{path} is a {family} checkpoint, which holds no tokenizer: give a diffusers folder of "
        f"that family with --config FOLDER, or fetch its small files once with "
        f"`hf download {names[0]} --include '*.json' '*.txt'`"
    )
