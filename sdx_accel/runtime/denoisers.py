"""What differs between the models that denoise, and between the pipelines around transformers.

Plain data that the planner reads: which pipelines are known, what their sizes are multiples of, how
long their texts are, how they run without and with guidance. Knows class names and configurations;
nothing of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sdx_accel.errors import RefusedError

if TYPE_CHECKING:
    from sdx_accel.runtime.descriptions import ComponentDescription, ModelDescription

__all__ = [
    "DENOISERS",
    "LONG_TEXT",
    "Transformer",
    "denoiser_name",
    "guidance_of",
    "latent_side",
    "long_tokens",
    "refuse_unknown_denoiser",
    "size_limit",
    "size_step",
    "transformer_of",
    "vae_factor",
]

#: components that may be the denoiser, of which a pipeline has one
DENOISERS = ("unet", "transformer")
#: the text encoder whose prompts are as long as the pipeline says; the others read up to 77 tokens
LONG_TEXT = "T5EncoderModel"
_CLIP_TOKENS = 77
_VAE_LEVELS = 4


@dataclass(frozen=True)
class Transformer:
    """A class of transformer, and the pipelines whose calls of it are known.

    Args:
        tokens: by class of pipeline, the tokens that it gives the long text encoder unless told.
        guidance: `batched` for both predictions in one call, `in turn` for one after the other.
        packed: latents a side of what the pipeline packs into one token before the call.
        rounds: whether the pipeline rounds sizes down to what it can do; else it refuses them.
        joined_tokens: how many of the texts' tokens come from CLIP, in front of the long one's.
        sample_size: latents a side where the configuration has no such entry.
    """

    tokens: Mapping[str, int]
    guidance: Literal["batched", "in turn"] = "batched"
    packed: int = 1
    rounds: bool = False
    joined_tokens: int = 0
    sample_size: int | None = None


_TRANSFORMERS = {
    "SD3Transformer2DModel": Transformer(
        dict.fromkeys(
            (
                "StableDiffusion3Pipeline",
                "StableDiffusion3Img2ImgPipeline",
                "StableDiffusion3InpaintPipeline",
            ),
            256,
        ),
        joined_tokens=_CLIP_TOKENS,
    ),
    "FluxTransformer2DModel": Transformer(
        dict.fromkeys(("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline"), 512),
        guidance="in turn",
        packed=2,
        rounds=True,
        sample_size=128,
    ),
    "PixArtTransformer2DModel": Transformer(
        {"PixArtAlphaPipeline": 120, "PixArtSigmaPipeline": 300}
    ),
}


def denoiser_name(components: Mapping[str, Any]) -> str | None:
    """Which of a pipeline's components denoises; None where it has none of a known name."""
    return next((name for name in DENOISERS if name in components), None)


def transformer_of(components: Mapping[str, ComponentDescription]) -> Transformer | None:
    """What is known of a pipeline's transformer; None for UNets and unknown classes."""
    found = components.get("transformer")
    return None if found is None else _TRANSFORMERS.get(found.class_name)


def refuse_unknown_denoiser(description: ModelDescription, unets: tuple[str, ...]) -> None:
    """Refuse a transformer, or a pipeline around a known one, whose calls are not known.

    Args:
        description: of a pipeline with a component `transformer`.
        unets: classes of other denoisers that are built, for the message.

    Raises:
        RefusedError: names the class, and those that are built.
    """
    part = description.components["transformer"]
    known = _TRANSFORMERS.get(part.class_name)
    if known is None:
        what, built = part.class_name, (*unets, *_TRANSFORMERS)
    elif description.pipeline_class not in known.tokens:
        what, built = description.pipeline_class, tuple(known.tokens)
    elif any(adapter["kind"] == "ip_adapter" for adapter in part.adapters):
        what, built = f"image prompts on {part.class_name}", ("LoRAs",)
    else:
        return
    raise RefusedError(
        f"a budget for {what} cannot be planned yet (built: {', '.join(built)}); "
        "enable_xattn() without vram works"
    )


def vae_factor(components: Mapping[str, ComponentDescription]) -> int:
    """Pixels a side of one latent."""
    vae = components.get("vae")
    channels = (vae.config.get("block_out_channels") if vae is not None else None) or ()
    return int(2 ** ((len(channels) or _VAE_LEVELS) - 1))


def size_step(components: Mapping[str, ComponentDescription]) -> int:
    """What heights and widths are multiples of, in pixels: the VAE's factor, patches, adapters."""
    known = transformer_of(components)
    patch = 1
    if known is not None:
        patch = known.packed * int(components["transformer"].config.get("patch_size") or 1)
    # T2I-Adapters fold their picture by a factor of their own, 16 for SDXL
    folds = (
        int(part.config.get("downscale_factor") or 1)
        for name, part in components.items()
        if name.startswith("adapter")
    )
    return math.lcm(vae_factor(components) * patch, *folds)


def size_limit(components: Mapping[str, ComponentDescription]) -> int | None:
    """Most pixels a side that the denoiser has positions for; None where there is no limit."""
    part = components.get("transformer")
    patches = None if part is None else part.config.get("pos_embed_max_size")
    return patches * size_step(components) if isinstance(patches, int) else None


def latent_side(denoiser: ComponentDescription | None) -> Any:
    """Latents a side, one number or two, that a denoiser was made for; None where nobody says."""
    if denoiser is None:
        return None
    given = denoiser.config.get("sample_size")
    known = _TRANSFORMERS.get(denoiser.class_name)
    return known.sample_size if given is None and known is not None else given


def long_tokens(description: ModelDescription) -> int | None:
    """Tokens that a pipeline gives its long text encoder by default; None where it has none."""
    known = transformer_of(description.components)
    return None if known is None else known.tokens.get(description.pipeline_class)


def guidance_of(description: ModelDescription, guided: bool) -> str:
    """How a picture is guided: `batched`, `in turn`, `embedded` in one prediction, or `off`."""
    known = transformer_of(description.components)
    if guided:
        return "batched" if known is None else known.guidance
    part = description.components.get("transformer")
    return "embedded" if part is not None and part.config.get("guidance_embeds") else "off"
