"""What a call of a transformer's pipeline will compute, where that differs from a UNet's.

Knows arguments and their defaults; plans nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sdx_accel.runtime.denoisers import size_step, transformer_of
from sdx_accel.runtime.descriptions import ComponentDescription
from sdx_accel.runtime.phase_calls import Job

__all__ = ["transformer_job"]

# PixArt's tables of sizes, by the latents a side that a model was made for
_BINS = {32: "256", 64: "512", 128: "1024", 256: "2048"}


def transformer_job(
    job: Job, values: Mapping[str, Any], components: Mapping[str, ComponentDescription]
) -> Job:
    """The job of a call, as the pipeline around a transformer makes it.

    Args:
        job: as read from the arguments that UNets' pipelines have too.
        values: the call's arguments by name, defaults included.
        components: the pipeline's models.
    """
    known = transformer_of(components)
    if known is None:
        return job
    job = replace(job, tokens=_tokens(values, known.joined_tokens), guided=_guided(job, values))
    if values.get("use_resolution_binning"):
        return _binned(job, components["transformer"].config.get("sample_size"))
    # what is no number is for the pipeline to refuse
    if known.rounds and isinstance(job.height, int) and isinstance(job.width, int):
        step = size_step(components)
        return replace(job, height=job.height // step * step, width=job.width // step * step)
    return job


def _tokens(values: Mapping[str, Any], joined: int) -> int | None:
    embeds = values.get("prompt_embeds")
    if embeds is not None:
        return max(1, int(embeds.shape[1]) - joined)
    tokens = values.get("max_sequence_length")
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def _guided(job: Job, values: Mapping[str, Any]) -> bool:
    if "true_cfg_scale" not in values:
        return job.guided
    # here `guidance_scale` is an input of the model, and this the second prediction
    asked = values.get("negative_prompt") is not None or (
        values.get("negative_prompt_embeds") is not None
        and values.get("negative_pooled_prompt_embeds") is not None
    )
    return asked and values["true_cfg_scale"] > 1


def _binned(job: Job, side: Any) -> Job:
    """At the size of PixArt's table that it computes; the picture is resized afterwards."""
    from diffusers.image_processor import PixArtImageProcessor
    from diffusers.pipelines.pixart_alpha import pipeline_pixart_alpha, pipeline_pixart_sigma

    name = f"ASPECT_RATIO_{_BINS.get(side)}_BIN"
    bins = getattr(pipeline_pixart_sigma, name, getattr(pipeline_pixart_alpha, name, None))
    if bins is None:
        return job  # the pipeline says that it has no table
    found = PixArtImageProcessor.classify_height_width_bin(job.height, job.width, ratios=bins)
    return replace(job, height=int(found[0]), width=int(found[1]))
