"""ControlNets: described, checked against the UNet they steer, and loaded, one at a time.

A diffusers folder, a hub id, or `random:controlnet`: seeded random weights in the shape that fits
the model at hand, so that anyone can check memory and speed without a download.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdx_accel.errors import CheckpointError, RefusedError
from sdx_accel.runtime import hub
from sdx_accel.runtime.architectures import is_random_spec
from sdx_accel.runtime.checkpoint_files import read_json
from sdx_accel.runtime.checkpoint_folders import INDEX, find_weights
from sdx_accel.runtime.checkpoints import local_path
from sdx_accel.runtime.descriptions import ComponentDescription, ModelDescription
from sdx_accel.runtime.folder_loading import load_module, quiet_libraries
from sdx_accel.runtime.meta_models import component_class, public_config
from sdx_accel.runtime.pipeline_parts import numbered
from sdx_accel.runtime.random_models import build_random_component

__all__ = ["RANDOM_CONTROLNET", "load_controlnet", "with_controlnets"]

RANDOM_CONTROLNET = "random:controlnet"
# the shapes of what a ControlNet adds to the UNet, and what it attends to
_SHARED = ("cross_attention_dim", "block_out_channels", "layers_per_block", "addition_embed_type")
# what UNets of these families attend to
_FAMILIES = {768: "SD 1.5", 1024: "SD 2", 1280: "an SDXL refiner", 2048: "SDXL"}
_TASKS = {"text": "", "image": "Img2Img", "inpaint": "Inpaint"}


def with_controlnets(
    description: ModelDescription, sources: list[str], kind: str
) -> ModelDescription:
    """The description of a pipeline with ControlNets added.

    Args:
        description: of a Stable Diffusion or SDXL model.
        sources: folders, hub ids or `random:controlnet`.
        kind: `text`, `image` or `inpaint`: what the pictures are made from.

    Raises:
        RefusedError: the model takes no ControlNet.
        CheckpointError: one is missing, broken, or made for another model.
    """
    components = dict(description.components)
    files = dict(description.weight_files)
    for index, source in enumerate(sources):
        name = numbered("controlnet", index)
        found, weights = _describe(source, name, description)
        components[name] = found
        if weights:
            files[name] = weights
    return replace(
        description,
        pipeline_class=_pipeline_class(description, kind),
        components=components,
        weight_files=files,
    )


def load_controlnet(source: str, component: ComponentDescription, dtype: Any) -> Any:
    """One ControlNet on the CPU.

    Args:
        source: as given to `with_controlnets`.
        component: what that made of it.
        dtype: `torch.dtype` of its weights.

    Raises:
        CheckpointError: its weights are missing or broken.
    """
    if is_random_spec(source):
        return build_random_component(component, dtype)
    import torch

    half = dtype is torch.float16
    path = local_path(source)
    folder = hub.part_snapshot(source, half) if path is None else _folder(path)
    weights = find_weights(folder, "diffusers", half=half)
    with quiet_libraries():
        return load_module(
            folder, component.name, "diffusers", component.class_name, weights, dtype
        )


def _pipeline_class(description: ModelDescription, kind: str) -> str:
    family = "StableDiffusionXL" if "XL" in description.pipeline_class else "StableDiffusion"
    rest = description.pipeline_class.removeprefix(family).removesuffix("Pipeline")
    if not description.pipeline_class.startswith(family) or rest not in _TASKS.values():
        raise RefusedError(
            f"--controlnet works with Stable Diffusion 1.5, 2 and SDXL models; {description.source}"
            f" is a {description.pipeline_class}"
        )
    return f"{family}ControlNet{_TASKS[kind]}Pipeline"


def _describe(
    source: str, name: str, description: ModelDescription
) -> tuple[ComponentDescription, list[tuple[str, int]]]:
    unet = description.components.get("unet")
    if unet is None:
        raise RefusedError(f"--controlnet: {description.source} has no UNet that it could steer")
    if is_random_spec(source):
        if source != RANDOM_CONTROLNET:
            raise CheckpointError(
                f"no ControlNet named {source!r}; did you mean {RANDOM_CONTROLNET!r}? It takes "
                "its shape from the model"
            )
        return ComponentDescription(name, "diffusers", "ControlNetModel", _shape_of(unet)), []
    try:
        path = local_path(source)
        folder = hub.part_configuration(source) if path is None else _folder(path)
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(
            text if text.startswith("--") else f"--controlnet {source}: {text}"
        ) from None
    config = read_json(folder / "config.json", "the configuration of a ControlNet")
    kind = config.get("_class_name")
    if kind != "ControlNetModel":
        raise CheckpointError(
            f"--controlnet {source} is a {kind or 'model without a class name'}; built: "
            "ControlNetModel"
        )
    found = ComponentDescription(name, "diffusers", kind, public_config(config))
    _check_fit(source, found, unet, description.source)
    try:
        files = [(str(file), size) for file, size in find_weights(folder, "diffusers").files]
    except CheckpointError:
        if path is not None:
            raise
        files = []  # fetched when the pictures are made
    return found, files


def _folder(path: Path) -> Path:
    """The folder with a ControlNet's config.json: the one named, or the part of a whole model."""
    if path.is_file():
        raise CheckpointError(
            f"--controlnet {path} is a single file; name a diffusers folder (config.json and "
            "diffusion_pytorch_model.safetensors) or a hub id"
        )
    if (path / INDEX).is_file() and (path / "controlnet" / "config.json").is_file():
        return path / "controlnet"
    if (path / INDEX).is_file():
        raise CheckpointError(
            f"--controlnet {path} is a whole model without a ControlNet; give it with --model"
        )
    return path


def _shape_of(unet: ComponentDescription) -> dict[str, Any]:
    """The configuration of a ControlNet for a UNet: everything that both classes know."""
    known = inspect.signature(
        component_class(ComponentDescription("", "diffusers", "ControlNetModel", {})).__init__
    ).parameters
    config = {key: value for key, value in unet.config.items() if key in known}
    # an inpainting UNet takes more channels; its ControlNet sees the latents only
    return {**config, "in_channels": unet.config.get("out_channels", 4)}


def _check_fit(
    source: str, found: ComponentDescription, unet: ComponentDescription, model: str
) -> None:
    channels = found.config.get("conditioning_channels", 3)
    if channels != 3:
        raise CheckpointError(
            f"--controlnet {source} follows pictures with {channels} channels; built: 3 (RGB)"
        )
    for key in _SHARED:
        theirs, ours = _value(found, key), _value(unet, key)
        if theirs != ours:
            hint = f"; use a ControlNet for {_family(ours)}" if key == _SHARED[0] else ""
            raise CheckpointError(
                f"--controlnet {source} was made for another model: its {key} is "
                f"{_shown(theirs, key)}, and that of {model} is {_shown(ours, key)}{hint}"
            )


def _value(component: ComponentDescription, key: str) -> Any:
    """A configuration's value, or its class's default where the file leaves it out."""
    if key in component.config:
        value = component.config[key]
    else:
        value = inspect.signature(component_class(component).__init__).parameters[key].default
    return list(value) if isinstance(value, (list, tuple)) else value


def _family(width: Any) -> str:
    return _FAMILIES.get(width, "that model") if isinstance(width, int) else "that model"


def _shown(value: Any, key: str) -> str:
    name = _FAMILIES.get(value) if key == _SHARED[0] and isinstance(value, int) else None
    return f"{value} ({name})" if name else f"{value}"
