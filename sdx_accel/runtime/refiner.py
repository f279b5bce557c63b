"""The SDXL refiner: described, checked against its base, loaded, and joined to it.

Only its UNet is loaded: text encoder and VAE are the base's, which has the same ones. A diffusers
folder, a hub id, or `random:sdxl-refiner` (`-tiny` for the tiny base) with seeded random weights.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from sdx_accel.errors import CheckpointError, RefusedError
from sdx_accel.runtime import hub
from sdx_accel.runtime.architectures import architecture, is_random_spec
from sdx_accel.runtime.checkpoint_files import read_json
from sdx_accel.runtime.checkpoint_folders import INDEX, find_weights
from sdx_accel.runtime.checkpoints import describe, local_path
from sdx_accel.runtime.descriptions import ComponentDescription, ModelDescription
from sdx_accel.runtime.folder_loading import load_module, quiet_libraries
from sdx_accel.runtime.random_models import build_random_component
from sdx_accel.runtime.schedulers import make_scheduler

__all__ = ["REFINER_SPECS", "check_stages", "join_refiner", "with_refiner"]

_BASE = "StableDiffusionXLPipeline"
_CLASS = "StableDiffusionXLRefinedPipeline"
# the public refiner's config.json, and its tiny twin for the tiny base
_UNET = {
    "sample_size": 128,
    "block_out_channels": [384, 768, 1536, 1536],
    "down_block_types": [
        "DownBlock2D",
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "DownBlock2D",
    ],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": 4,
    "attention_head_dim": [6, 12, 24, 24],
    "cross_attention_dim": 1280,
    "projection_class_embeddings_input_dim": 1280 + 5 * 256,
}
_TINY_UNET = {
    **_UNET,
    "sample_size": 16,
    "block_out_channels": [32, 64, 64, 64],
    "transformer_layers_per_block": 1,
    "attention_head_dim": [1, 2, 2, 2],
    "cross_attention_dim": 96,
    "projection_class_embeddings_input_dim": 96 + 5 * 8,
}
# spec → the base whose other values it shares
_RANDOM = {
    "random:sdxl-refiner": ("random:sdxl", _UNET),
    "random:sdxl-refiner-tiny": ("random:sdxl-tiny", _TINY_UNET),
}
REFINER_SPECS = tuple(_RANDOM)


def with_refiner(description: ModelDescription, source: str) -> ModelDescription:
    """The description of SDXL with a refiner after it.

    Args:
        description: of an SDXL model that makes pictures from texts.
        source: a diffusers folder, a hub id or one of `REFINER_SPECS`.

    Raises:
        RefusedError: the model is no SDXL base.
        CheckpointError: the refiner is missing, broken, or made for another model.
    """
    if description.pipeline_class != _BASE:
        raise RefusedError(
            f"--refiner works after an SDXL base model; {description.source} is a "
            f"{description.pipeline_class}"
        )
    unet, files = _describe(source)
    encoder = description.components["text_encoder_2"]
    theirs, ours = unet.config.get("cross_attention_dim"), encoder.config.get("hidden_size")
    if theirs != ours:
        raise CheckpointError(
            f"--refiner {source} is no refiner for {description.source}: its UNet reads texts of "
            f"width {theirs}, and the base's second text encoder makes them {ours} wide"
        )
    return replace(
        description,
        pipeline_class=_CLASS,
        components={**description.components, "refiner": unet},
        weight_files={**description.weight_files, **({"refiner": files} if files else {})},
    )


def join_refiner(pipe: Any, source: str, description: ModelDescription) -> Any:
    """The pipeline that runs a base and its refiner, on the CPU.

    Args:
        pipe: the base's `StableDiffusionXLPipeline`.
        source: as given to `with_refiner`.
        description: from `with_refiner`.

    Raises:
        CheckpointError: the refiner's weights are missing or broken.
    """
    from sdx_accel.runtime.refined_pipeline import StableDiffusionXLRefinedPipeline

    component = description.components["refiner"]
    # an aesthetic score takes the place of the picture's two target sizes
    text = description.components["text_encoder_2"].config["projection_dim"]
    room = component.config["projection_class_embeddings_input_dim"] - text
    return StableDiffusionXLRefinedPipeline(
        **pipe.components,
        refiner=_load(source, component, pipe.unet.dtype),
        force_zeros_for_empty_prompt=pipe.config.force_zeros_for_empty_prompt,
        add_watermarker=pipe.watermark is not None,
        requires_aesthetics_score=room == 5 * component.config["addition_time_embed_dim"],
        refiner_force_zeros=_zeros(source),
    )


def check_stages(
    description: ModelDescription, scheduler: str | None, steps: int, start: float
) -> None:
    """Refuse settings that leave the base or the refiner without a step.

    Args:
        description: the model's, with its own scheduler.
        scheduler: a short name, or None for the model's own.
        steps: of both together.
        start: how much of the noise the base removes.

    Raises:
        RefusedError: naming what to change.
    """
    import diffusers

    name, config = description.scheduler
    made = (
        getattr(diffusers, name).from_config(config)
        if scheduler is None
        else make_scheduler(scheduler, config)
    )
    made.set_timesteps(steps)
    total = made.config.num_train_timesteps
    cutoff = round(total - start * total)
    early = sum(int(step) >= cutoff for step in made.timesteps)
    late = len(made.timesteps) - early
    if early and late:
        return
    idle, change = ("base", "a larger") if not early else ("refiner", "a smaller")
    raise RefusedError(
        f"--steps {steps} with --refiner-start {start:g} leaves the {idle} no step to do; use more "
        f"steps or {change} --refiner-start"
    )


def _describe(source: str) -> tuple[ComponentDescription, list[tuple[str, int]]]:
    if is_random_spec(source):
        if source not in _RANDOM:
            close = difflib.get_close_matches(source, REFINER_SPECS, n=1, cutoff=0.0)
            raise CheckpointError(f"no refiner named {source!r}; did you mean {close[0]!r}?")
        base, changes = _RANDOM[source]
        config = {**architecture(base).components["unet"].config, **changes}
        return ComponentDescription("refiner", "diffusers", "UNet2DConditionModel", config), []
    try:
        found = describe(source)
    except CheckpointError as error:
        raise CheckpointError(f"--refiner {source}: {error}") from None
    if "unet" not in found.components or "XL" not in found.pipeline_class:
        raise CheckpointError(
            f"--refiner {source} is a {found.pipeline_class}; an SDXL refiner is needed"
        )
    return replace(found.components["unet"], name="refiner"), found.weight_files.get("unet", [])


def _load(source: str, component: ComponentDescription, dtype: Any) -> Any:
    if is_random_spec(source):
        return build_random_component(component, dtype)
    import torch

    folder = local_path(source) or hub.snapshot(source, dtype)
    place = folder / "unet"
    weights = find_weights(place, "diffusers", half=dtype is torch.float16)
    with quiet_libraries():
        return load_module(place, "refiner", "diffusers", component.class_name, weights, dtype)


def _zeros(source: str) -> bool:
    """Whether the refiner takes zeros for an absent negative prompt; the public one does not."""
    if is_random_spec(source):
        return False
    folder = local_path(source) or hub.configurations(source)
    index = read_json(folder / INDEX, "the list of components")
    return bool(index.get("force_zeros_for_empty_prompt", True))
