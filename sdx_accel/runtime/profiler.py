"""From a model's configurations and a job to what the planner needs; no weights, no GPU."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from sdx_accel.budget.allocator import Event
from sdx_accel.budget.profile import Component, JobProfile, PhaseProfile, Unit
from sdx_accel.errors import RefusedError
from sdx_accel.runtime import trace
from sdx_accel.runtime.descriptions import ModelDescription
from sdx_accel.runtime.meta_models import meta_component
from sdx_accel.runtime.weights import split_weights, unit_bytes

__all__ = ["Job", "profile_job"]

TOKENS = 77
_DENOISERS = ("unet",)
_TRACED_DENOISERS = ("UNet2DConditionModel",)
# sizes that the tile search of quality "near" tries, largest first, in pixels
TILES = (1536, 1024, 768, 512, 384)


@dataclass(frozen=True)
class Job:
    """What a run will do.

    Args:
        height, width: picture size in pixels.
        batch: pictures computed at once.
        guided: whether the denoiser runs on two predictions a picture (guidance above 1).
        encode: whether a picture goes through the VAE's encoder first.
        tile: edge in pixels of the VAE's tiles, None for the whole picture at once.
    """

    height: int
    width: int
    batch: int = 1
    guided: bool = True
    encode: bool = False
    tile: int | None = None


@dataclass(frozen=True)
class _Traced:
    events: tuple[Event, ...]
    curve: tuple[float, ...]


def profile_job(
    description: ModelDescription,
    job: Job,
    dtypes: Mapping[str, str],
    modules: Mapping[str, torch.nn.Module] | None = None,
) -> JobProfile:
    """Trace a job.

    Args:
        description: the model's configurations.
        job: sizes and settings.
        dtypes: dtype name of each component's weights, e.g. {"unet": "float16", …}.
        modules: the live models, when there are any: their weights are counted as they are,
            adapters included. Without them weights are counted from the configurations.

    Returns:
        The job's `JobProfile`.

    Raises:
        RefusedError: the denoiser is of a kind whose memory cannot be traced yet.
    """
    kinds = {name: _phases_of(name, description, job) for name in description.components}
    components = []
    for name, used_in in kinds.items():
        if used_in:
            module = (modules or {}).get(name)
            # not `or`: a compiled module answers bool() with its len()
            module = _meta(description, name, dtypes[name]) if module is None else module
            units = tuple(Unit(group[0][0], unit_bytes(group)) for group in split_weights(module))
            components.append(Component(name, units, used_in))
    names = [p for p in ("text", "encode", "denoise", "decode") if _used(p, components)]
    phases = tuple(_phase(p, description, job, dtypes, components) for p in names)
    return JobProfile(
        model=description.source,
        job=asdict(job),
        numerics={
            **{c.name: dtypes[c.name] for c in components},
            "vae_compute": _vae_dtype(description, dtypes),
            "vae_mode": f"tiles of {job.tile} px" if job.tile else "whole picture",
            "guidance": "batched" if job.guided else "off",
        },
        components=tuple(components),
        phases=phases,
    )


def _used(phase: str, components: list[Component]) -> bool:
    return any(phase in component.phases for component in components)


def _phases_of(name: str, description: ModelDescription, job: Job) -> tuple[str, ...]:
    if name.startswith("text_encoder") or name == "image_encoder":
        return ("text",)
    if name == "safety_checker":
        return ("decode",)
    if name == "vae":
        return ("encode", "decode") if job.encode else ("decode",)
    if name in _DENOISERS:
        kind = description.components[name].class_name
        if kind not in _TRACED_DENOISERS:
            raise RefusedError(
                f"a budget for {kind} cannot be planned yet "
                f"(built: {', '.join(_TRACED_DENOISERS)}); "
                "enable_xattn() without vram works"
            )
        return ("denoise",)
    raise RefusedError(
        f"a budget for a pipeline with {name!r} cannot be planned yet; "
        "enable_xattn() without vram works"
    )


def _vae_dtype(description: ModelDescription, dtypes: Mapping[str, str]) -> str:
    """The dtype the VAE computes in: checkpoints with `force_upcast` overflow in fp16."""
    vae = description.components.get("vae")
    if vae is None:
        return "none"
    upcast = vae.config.get("force_upcast", True) and dtypes["vae"] == "float16"
    is_xl = "XL" in description.pipeline_class
    return "float32" if upcast and is_xl else dtypes["vae"]


@lru_cache(maxsize=16)
def _meta_json(text: str, name: str, dtype: str) -> Any:
    description = ModelDescription.from_dict(json.loads(text))
    return meta_component(description.components[name], dtype)


def _meta(description: ModelDescription, name: str, dtype: str) -> Any:
    return _meta_json(description.to_json(), name, dtype)


def _phase(
    phase: str,
    description: ModelDescription,
    job: Job,
    dtypes: Mapping[str, str],
    components: list[Component],
) -> PhaseProfile:
    text = description.to_json()
    dtype_items = tuple(sorted(dtypes.items()))
    carries: tuple[str, ...] = ()
    if phase in ("encode", "decode") and _vae_dtype(description, dtypes) != dtypes["vae"]:
        carries = ("vae",)
    traced = _traced(phase, text, _relevant(phase, job), dtype_items)
    return PhaseProfile(phase, traced.events, traced.curve, carries)


def _relevant(phase: str, job: Job) -> Job:
    """The job with everything neutral that the phase does not see, so that traces are reused."""
    if phase == "text":
        return Job(0, 0, job.batch, job.guided)
    if phase == "denoise":
        return replace(job, encode=False, tile=None)
    return replace(job, guided=True, encode=phase == "encode")


@lru_cache(maxsize=64)
def _traced(phase: str, text: str, job: Job, dtype_items: tuple[tuple[str, str], ...]) -> _Traced:
    description = ModelDescription.from_dict(json.loads(text))
    dtypes = dict(dtype_items)
    build = {"text": _text, "denoise": _denoise, "encode": _vae, "decode": _vae}[phase]
    call, modules, inputs, carried = build(description, job, dtypes)
    fixed = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    events, curve = trace.record(
        call, fixed=fixed, inputs=inputs, repeat=2 if phase == "denoise" else 1
    )
    return _Traced(_with_carried(carried, events), curve)


_Call = tuple[Callable[[], Any], list[torch.nn.Module], list[torch.Tensor], list[int]]


def _empty(*shape: int, dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _text(description: ModelDescription, job: Job, dtypes: Mapping[str, str]) -> _Call:
    encoders = [
        _meta(description, name, dtypes[name])
        for name in description.components
        if name.startswith("text_encoder")
    ]
    ids = torch.empty((job.batch, TOKENS), dtype=torch.long, device="meta")

    def call() -> Any:
        return [e(ids, output_hidden_states=True) for e in encoders for _ in range(1 + job.guided)]

    return call, encoders, [ids], []


def _latent_shape(description: ModelDescription, job: Job) -> tuple[int, int]:
    levels = len(description.components["vae"].config.get("block_out_channels", [0] * 4))
    return job.height >> (levels - 1), job.width >> (levels - 1)


def _denoise(description: ModelDescription, job: Job, dtypes: Mapping[str, str]) -> _Call:
    unet = _meta(description, "unet", dtypes["unet"])
    dtype, batch = dtypes["unet"], job.batch * (1 + job.guided)
    sample = _empty(batch, unet.config.in_channels, *_latent_shape(description, job), dtype=dtype)
    width = unet.config.cross_attention_dim
    context = _empty(batch, TOKENS, width if isinstance(width, int) else max(width), dtype=dtype)
    added = None
    if unet.config.addition_embed_type == "text_time":
        ids = 6
        pooled = (
            unet.config.projection_class_embeddings_input_dim
            - ids * unet.config.addition_time_embed_dim
        )
        added = {
            "text_embeds": _empty(batch, pooled, dtype=dtype),
            "time_ids": _empty(batch, ids, dtype=dtype),
        }
    step = torch.empty((), device="meta")

    def call() -> Any:
        # the pipeline doubles the latents, predicts, then mixes the two halves
        noise = unet(
            torch.cat([sample[: job.batch]] * (1 + job.guided)) if job.guided else sample,
            step,
            encoder_hidden_states=context,
            added_cond_kwargs=added,
            return_dict=False,
        )[0]
        return noise + noise

    return call, [unet], [sample, context], []


def _vae(description: ModelDescription, job: Job, dtypes: Mapping[str, str]) -> _Call:
    dtype = _vae_dtype(description, dtypes)
    vae = _meta(description, "vae", dtype)
    # the module is shared between traces: tiling is set either way
    if job.tile:
        set_tiling(vae, job.tile)
    else:
        vae.disable_tiling()
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
    return decode, [vae], [_latent], carried


def _with_carried(carried: list[int], events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Events with the cast weights in front; identities below zero never clash with the trace's."""
    return (*((1, -1 - i, n) for i, n in enumerate(carried)), *events)


def set_tiling(vae: Any, tile: int) -> None:
    """Classic tiling with a tile of `tile` pixels: diffusers' own default is the whole picture."""
    vae.enable_tiling()
    vae.tile_sample_min_size = tile
    vae.tile_latent_min_size = tile >> (len(vae.config.block_out_channels) - 1)
