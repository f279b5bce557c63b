"""The call of each known transformer in a denoising loop, on modules without weights.

Knows what pipelines give their transformers; measures nothing and builds no modules.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sdx_accel.runtime.phase_calls import Job

__all__ = ["transformer_call"]

# what a pipeline's step is: what it computes, and the tensors that live through it
_Step = tuple[Callable[[], Any], list[torch.Tensor]]


def transformer_call(model: Any, job: "Job", latents: tuple[int, int], clip_tokens: int) -> _Step:
    """One step of the denoising loop.

    Args:
        model: a transformer on the meta device, of a class in `denoisers`.
        job: sizes and settings; its `tokens` are those of the long text.
        latents: (height, width) of the picture's latents.
        clip_tokens: tokens of other texts in front of the long one.

    Returns:
        The computation, and the tensors that live through it.
    """
    build = {
        "SD3Transformer2DModel": _joint,
        "FluxTransformer2DModel": _flux,
        "PixArtTransformer2DModel": _pixart,
    }[type(model).__name__]
    return build(model, job, latents, clip_tokens + (job.tokens or 0))


def _empty(model: Any, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=model.dtype, device="meta")


def _doubled(sample: torch.Tensor, job: "Job") -> torch.Tensor:
    # the pipelines double the latents, predict, then mix the two halves
    return torch.cat([sample] * 2) if job.guided else sample


def _joint(model: Any, job: "Job", latents: tuple[int, int], tokens: int) -> _Step:
    config, batch = model.config, job.batch * (1 + job.guided)
    sample = _empty(model, job.batch, config.in_channels, *latents)
    text = _empty(model, batch, tokens, config.joint_attention_dim)
    pooled = _empty(model, batch, config.pooled_projection_dim)
    time = torch.empty((), device="meta")

    def call() -> Any:
        noise = model(
            hidden_states=_doubled(sample, job),
            timestep=time.expand(batch),
            encoder_hidden_states=text,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return noise + noise

    return call, [sample, text, pooled]


def _flux(model: Any, job: "Job", latents: tuple[int, int], tokens: int) -> _Step:
    config, batch = model.config, job.batch
    # the pipeline packs 2 × 2 latents into one token
    length = (latents[0] // 2) * (latents[1] // 2)
    sample = _empty(model, batch, length, config.in_channels)
    # a second text where a negative prompt is given: the two predictions come in turn
    texts = [
        _empty(model, batch, tokens, config.joint_attention_dim) for _ in range(1 + job.guided)
    ]
    pooled = [_empty(model, batch, config.pooled_projection_dim) for _ in texts]
    ids = [_empty(model, n, 3) for n in (tokens, length)]
    strength = torch.empty(batch, device="meta") if config.guidance_embeds else None
    time = torch.empty((), device="meta")

    def call() -> Any:
        predicted = [
            model(
                hidden_states=sample,
                timestep=time.expand(batch).to(sample.dtype) / 1000,
                guidance=strength,
                pooled_projections=vector,
                encoder_hidden_states=text,
                txt_ids=ids[0],
                img_ids=ids[1],
                return_dict=False,
            )[0]
            for text, vector in zip(texts, pooled, strict=True)
        ]
        return sum(predicted) + predicted[0]

    return call, [sample, *texts, *pooled, *ids]


def _pixart(model: Any, job: "Job", latents: tuple[int, int], tokens: int) -> _Step:
    config, batch = model.config, job.batch * (1 + job.guided)
    sample = _empty(model, job.batch, config.in_channels, *latents)
    text = _empty(model, batch, tokens, config.caption_channels)
    mask = torch.empty(batch, tokens, dtype=torch.long, device="meta")
    time = torch.empty((), dtype=torch.long, device="meta")
    added: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
    if model.use_additional_conditions:
        added = {"resolution": _empty(model, batch, 2), "aspect_ratio": _empty(model, batch, 1)}

    def call() -> Any:
        noise = model(
            _doubled(sample, job),
            encoder_hidden_states=text,
            encoder_attention_mask=mask,
            timestep=time.expand(batch),
            added_cond_kwargs=added,
            return_dict=False,
        )[0]
        # the other half of the channels is a learned variance that the pipelines cut off
        return noise.chunk(2, dim=1)[0] + noise.chunk(2, dim=1)[0]

    return call, [sample, text, mask]
