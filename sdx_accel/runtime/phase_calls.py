"""What each phase of a picture computes, as calls on modules without weights.

Knows which tensors a pipeline holds while it runs; measures nothing and places nothing.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from sdx_accel.runtime.adapter_twins import STANDARD, ip_projections
from sdx_accel.runtime.denoisers import LONG_TEXT, transformer_of, vae_factor
from sdx_accel.runtime.descriptions import ComponentDescription, ModelDescription, jsonable
from sdx_accel.runtime.meta_models import meta_component
from sdx_accel.runtime.t2i_adapters import (
    adapter_call,
    adapter_names,
    features_of,
    pictures_of,
)
from sdx_accel.runtime.transformer_calls import transformer_call
from sdx_patches.vae import bands_of, disable_bands, enable_bands
from sdx_patches.vae_tiles import disable_tiles, enable_tiles

__all__ = ["Job", "PhaseCall", "phase_call", "set_bands", "set_tiling", "twin", "vae_dtype"]

# of a prompt; encoders with less room are given fewer, what the UNet reads is planned with all
TOKENS = 77
# numbers of original size, crop and target size; a refiner has one score in place of the target
TIME_IDS, REFINER_IDS = 6, 5
# what a UNet calls the features of T2I-Adapters
_FEATURES = "down_intrablock_additional_residuals"


@dataclass(frozen=True)
class Job:
    """What a run will do.

    Args:
        height, width: picture size in pixels.
        batch: pictures computed at once.
        guided: whether the denoiser runs on two predictions a picture (guidance above 1).
        encode: whether a picture goes through the VAE's encoder first.
        tile: largest edge in pixels of the VAE's tiles, None for the whole picture at once.
        bands: "fast" or "low" for a VAE that works in bands of rows; None = it does not, or, of a
            plan that is still to be made, whatever is best.
        text_kv: whether the text's keys and values may be kept over the steps.
        tokens: length of the text that a T5 encoder reads; None = as the pipeline has it, or none.
        stock_tiles: whether the tiles are those of diffusers' own loop, which a user has switched
            on; ours are of one size.
    """

    height: int
    width: int
    batch: int = 1
    guided: bool = True
    encode: bool = False
    tile: int | None = None
    bands: str | None = None
    text_kv: bool = False
    tokens: int | None = None
    stock_tiles: bool = False


#: the computation, its modules, the tensors that live through it, bytes of weights cast for it
PhaseCall = tuple[Callable[[], Any], list[torch.nn.Module], list[torch.Tensor], list[int]]


def phase_call(
    phase: str, description: ModelDescription, job: Job, dtypes: Mapping[str, str]
) -> PhaseCall:
    """The computation of one phase on the meta device.

    Args:
        phase: `text`, `encode`, `denoise`, `refine` or `decode`.
        description: the model's configurations.
        job: sizes and settings.
        dtypes: dtype name of each component's weights.
    """
    build = {
        "text": _text,
        "encode": _encode,
        "denoise": _denoise,
        "refine": _refine,
        "decode": _vae,
    }[phase]
    return build(description, job, dtypes)


def vae_dtype(description: ModelDescription, dtypes: Mapping[str, str]) -> str:
    """The dtype the VAE computes in: checkpoints with `force_upcast` overflow in fp16."""
    vae = description.components.get("vae")
    if vae is None:
        return "none"
    upcast = vae.config.get("force_upcast", True) and dtypes["vae"] == "float16"
    is_xl = "XL" in description.pipeline_class
    return "float32" if upcast and is_xl else dtypes["vae"]


@lru_cache(maxsize=16)
def _twin(text: str, dtype: str) -> Any:
    return meta_component(ComponentDescription(**json.loads(text)), dtype)


def twin(description: ModelDescription, name: str, dtype: str) -> Any:
    """One component of a description without weights; shared, so not to be changed."""
    component = jsonable(asdict(description.components[name]))
    return _twin(json.dumps(component, sort_keys=True), dtype)


def _empty(*shape: int, dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _text(description: ModelDescription, job: Job, dtypes: Mapping[str, str]) -> PhaseCall:
    names = [name for name in description.components if name.startswith("text_encoder")]
    encoders = [twin(description, name, dtypes[name]) for name in names]
    long = [description.components[name].class_name == LONG_TEXT for name in names]
    # a longer prompt than the positions of the encoder is an error, also without weights
    lengths = [
        (job.tokens or TOKENS)
        if is_long
        else min(TOKENS, getattr(encoder.config, "max_position_embeddings", TOKENS))
        for encoder, is_long in zip(encoders, long, strict=True)
    ]
    ids = torch.empty((job.batch, max(lengths, default=0)), dtype=torch.long, device="meta")
    masks: dict[str, torch.Tensor] = {}
    if "PixArt" in description.pipeline_class:
        # its texts end where the prompt does; of a mask without values, transformers asks whether
        # it is needed, unless it has been made into one of scores
        masks["attention_mask"] = _empty(
            job.batch, 1, *(lengths[:1] * 2), dtype=dtypes["text_encoder"]
        )

    images, look = _image_encoder(description, job, dtypes)

    def call() -> Any:
        texts = [
            # of a long text, pipelines take the last state only
            encoder(ids[:, :length], output_hidden_states=not is_long, **masks)
            for encoder, length, is_long in zip(encoders, lengths, long, strict=True)
            for _ in range(1 + job.guided)
        ]
        return texts, look()

    return call, [*encoders, *images], [ids], []


def _image_encoder(
    description: ModelDescription, job: Job, dtypes: Mapping[str, str]
) -> tuple[list[torch.nn.Module], Callable[[], Any]]:
    """(the encoder of image prompts if there is one, what it computes)."""
    projections = _projections(description)
    if "image_encoder" not in description.components or not projections:
        return [], lambda: None
    encoder = twin(description, "image_encoder", dtypes["image_encoder"])
    side = encoder.config.image_size

    def look() -> Any:
        found = []
        for projection in projections:
            picture = _empty(1, 3, side, side, dtype=dtypes["image_encoder"])
            if projection["class"] == STANDARD:
                found.append(encoder(picture).image_embeds)
                continue
            # the pipelines also show it an empty picture, guided or not
            for shown in (picture, torch.zeros_like(picture)):
                found.append(encoder(shown, output_hidden_states=True).hidden_states[-2])
        return found

    return [encoder], look


def _projections(description: ModelDescription) -> list[dict[str, Any]]:
    unet = description.components.get("unet")
    return [] if unet is None else ip_projections(unet.adapters)


def _image_embeds(description: ModelDescription, batch: int, dtype: str) -> list[torch.Tensor]:
    """What the UNet is given for each image prompt: one vector, or the encoder's sequence."""
    encoder = description.components.get("image_encoder")
    config = encoder.config if encoder is not None else {}
    sequence = (config.get("image_size", 224) // config.get("patch_size", 14)) ** 2 + 1
    return [
        _empty(batch, 1, p["arguments"]["image_embed_dim"], dtype=dtype)
        if p["class"] == STANDARD
        else _empty(batch, 1, sequence, p["arguments"]["embed_dims"], dtype=dtype)
        for p in _projections(description)
    ]


def _latent_shape(description: ModelDescription, job: Job) -> tuple[int, int]:
    factor = vae_factor(description.components)
    return job.height // factor, job.width // factor


def _refine(description: ModelDescription, job: Job, dtypes: Mapping[str, str]) -> PhaseCall:
    """The same loop with the second UNet, which only reads texts."""
    part = replace(description.components["refiner"], name="unet")
    kept = {"unet": part, "vae": description.components["vae"]}
    alone = replace(description, components=kept)
    return _denoise(alone, job, {"unet": dtypes["refiner"]}, REFINER_IDS)


def _denoise(
    description: ModelDescription, job: Job, dtypes: Mapping[str, str], ids: int = TIME_IDS
) -> PhaseCall:
    if (known := transformer_of(description.components)) is not None:
        model = twin(description, "transformer", dtypes["transformer"])
        latents = _latent_shape(description, job)
        predict, living = transformer_call(model, job, latents, known.joined_tokens)
        return predict, [model], living, []
    unet = twin(description, "unet", dtypes["unet"])
    dtype, batch = dtypes["unet"], job.batch * (1 + job.guided)
    sample = _empty(batch, unet.config.in_channels, *_latent_shape(description, job), dtype=dtype)
    width = unet.config.cross_attention_dim
    context = _empty(batch, TOKENS, width if isinstance(width, int) else max(width), dtype=dtype)
    added: dict[str, Any] | None = None
    if unet.config.addition_embed_type == "text_time":
        pooled = (
            unet.config.projection_class_embeddings_input_dim
            - ids * unet.config.addition_time_embed_dim
        )
        added = {
            "text_embeds": _empty(batch, pooled, dtype=dtype),
            "time_ids": _empty(batch, ids, dtype=dtype),
        }
    prompts = _image_embeds(description, batch, dtype)
    if prompts:
        added = {**(added or {}), "image_embeds": prompts}
    inner = unet.config.time_cond_proj_dim
    strength = None if inner is None else _empty(batch, inner, dtype=dtype)
    step = torch.empty((), device="meta")
    features, seen = _adapters(description, job, dtypes)[1:]
    control, nets, pictures = _controlnets(description, job, dtypes)
    # a pipeline holds the last step's residuals until the ControlNet has made new ones
    guides: dict[str, Any] = {}

    def call() -> Any:
        # the pipeline doubles the latents, predicts, then mixes the two halves
        doubled = torch.cat([sample[: job.batch]] * (1 + job.guided)) if job.guided else sample
        guides.update(control(doubled, step, context, added))
        # the UNet takes the features out of this list as it adds them
        levels = {_FEATURES: [feature.clone() for feature in features]} if features else {}
        noise = unet(
            doubled,
            step,
            encoder_hidden_states=context,
            timestep_cond=strength,
            added_cond_kwargs=added,
            return_dict=False,
            **guides,
            **levels,
        )[0]
        return noise + noise

    living = [sample, context, *pictures, *prompts, *features, *seen]
    return call, [unet, *nets], living, []


def _adapters(
    description: ModelDescription, job: Job, dtypes: Mapping[str, str]
) -> tuple[list[torch.nn.Module], list[torch.Tensor], list[torch.Tensor]]:
    """(the T2I-Adapters, their features, the pictures that they have looked at)."""
    names = adapter_names(description.components)
    nets = [twin(description, name, dtypes[name]) for name in names]
    pictures = pictures_of(nets, (job.height, job.width), job.batch)
    return nets, features_of(nets, pictures, job.guided), pictures


def _encode(description: ModelDescription, job: Job, dtypes: Mapping[str, str]) -> PhaseCall:
    """What is made of given pictures before the loop: latents, or an adapter's features."""
    nets, _, pictures = _adapters(description, job, dtypes)
    if not nets:
        return _vae(description, job, dtypes)
    return adapter_call(nets, pictures, job.guided), nets, pictures, []


def _controlnets(
    description: ModelDescription, job: Job, dtypes: Mapping[str, str]
) -> tuple[Callable[..., dict[str, Any]], list[torch.nn.Module], list[torch.Tensor]]:
    """(what they give the UNet, the ControlNets, the pictures they follow)."""
    names = [name for name in description.components if name.startswith("controlnet")]
    nets = [twin(description, name, dtypes[name]) for name in names]
    batch = job.batch * (1 + job.guided)
    pictures = [_empty(batch, 3, job.height, job.width, dtype=dtypes[name]) for name in names]
    if not names:
        return lambda *_: {}, [], []
    from diffusers.models.controlnets.multicontrolnet import MultiControlNetModel

    # what the pipelines put around several; around one they put nothing
    whole = nets[0] if len(nets) == 1 else MultiControlNetModel(nets)
    conditions: Any = pictures[0] if len(nets) == 1 else pictures
    scales: Any = 1.0 if len(nets) == 1 else [1.0] * len(nets)
    channels = nets[0].config.in_channels

    def control(sample: Any, step: Any, context: Any, added: Any) -> dict[str, Any]:
        # inpainting UNets take more channels than the latents have
        down, middle = whole(
            sample[:, :channels],
            step,
            encoder_hidden_states=context,
            controlnet_cond=conditions,
            conditioning_scale=scales,
            added_cond_kwargs=added,
            return_dict=False,
        )
        return {
            "down_block_additional_residuals": down,
            "mid_block_additional_residual": middle,
        }

    return control, nets, pictures


def _vae(description: ModelDescription, job: Job, dtypes: Mapping[str, str]) -> PhaseCall:
    dtype = vae_dtype(description, dtypes)
    vae = twin(description, "vae", dtype)
    # the module is shared between traces: tiling and bands are set either way
    set_tiling(vae, None if job.stock_tiles else job.tile)
    vae.use_tiling = job.tile is not None
    if job.tile and job.stock_tiles:
        vae.tile_sample_min_size = job.tile
        vae.tile_latent_min_size = job.tile // vae_factor(description.components)
    set_bands(vae, job.bands)
    latents = vae.config.latent_channels
    height, width = _latent_shape(description, job)

    def decode() -> Any:
        picture = vae.decode(_latent, return_dict=False)[0]
        return (picture * 0.5 + 0.5).clamp(0, 1)

    def encode() -> Any:
        return vae.encode(_picture, return_dict=False)[0].mode()

    _latent = _empty(job.batch, latents, height, width, dtype=dtype)
    _picture = _empty(job.batch, 3, job.height, job.width, dtype=dtype)
    carried = []
    if dtype != dtypes["vae"]:
        carried = [p.numel() * p.element_size() for p in vae.parameters()]
    if job.encode:
        return encode, [vae], [_picture], carried
    # the pipeline's call holds them to its end
    _, features, pictures = _adapters(description, job, dtypes)
    return decode, [vae], [_latent, *features, *pictures], carried


def set_bands(vae: Any, bands: str | None) -> None:
    """Have the VAE work in bands of rows, "fast" or "low", or as it does by itself or its patch."""
    disable_bands(vae)
    if bands is not None and bands != bands_of(vae):
        enable_bands(vae, low=bands == "low")


def set_tiling(vae: Any, tile: int | None) -> None:
    """Have the VAE work in equal tiles of at most `tile` pixels, or as it did before."""
    if tile is None:
        disable_tiles(vae)
    else:
        enable_tiles(vae, tile)
