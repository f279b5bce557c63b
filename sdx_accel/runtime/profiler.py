"""From a model's configurations and a job to what the planner needs; no weights, no GPU."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from sdx_accel.budget.allocator import Event
from sdx_accel.budget.profile import PHASES, Component, JobProfile, PhaseProfile, Unit
from sdx_accel.errors import CheckpointError, RefusedError, SdxError
from sdx_accel.runtime import trace
from sdx_accel.runtime.denoisers import (
    DENOISERS,
    guidance_of,
    long_tokens,
    refuse_unknown_denoiser,
    vae_factor,
)
from sdx_accel.runtime.descriptions import ModelDescription
from sdx_accel.runtime.folder_loading import first_line
from sdx_accel.runtime.meta_models import component_class
from sdx_accel.runtime.phase_calls import TOKENS, Job, phase_call, twin, vae_dtype
from sdx_accel.runtime.stream_order import Layout, Order, UnitTrace, is_compiled, layout, remember
from sdx_accel.runtime.t2i_adapters import ADAPTER, adapter_names
from sdx_accel.runtime.weights import unit_bytes
from sdx_kernels.tuning.table_digest import table_digest
from sdx_patches.text_kv import text_projections
from sdx_patches.vae_tiles import equal_spans

__all__ = ["Job", "profile_job"]

# the models of the denoising loop by the start of their name, and the classes that are traced
_DENOISERS = {
    "unet": "UNet2DConditionModel",
    "controlnet": "ControlNetModel",
    "refiner": "UNet2DConditionModel",
}
# the autoencoder that can be run in tiles of one size
_EQUAL_TILES = "AutoencoderKL"
# largest edges that the tile search of quality "near" tries, largest first, in pixels
TILES = (1536, 1024, 768, 512, 384)


@dataclass(frozen=True)
class _Traced:
    events: tuple[Event, ...]
    curve: tuple[float, ...]
    orders: Mapping[str, Order]


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
    for name in modules or ():
        _refuse_unknown(description, name)
    if "transformer" in description.components:
        refuse_unknown_denoiser(description, (_DENOISERS["unet"],))
        job = replace(job, tokens=job.tokens or long_tokens(description))
    if adapter_names(description.components):
        # their pipelines encode no picture
        job = replace(job, encode=False)
    kinds = {name: _phases_of(name, description, job) for name in description.components}
    used = [p for p in PHASES if any(p in phases for phases in kinds.values())]
    traced = {p: _trace(p, description, job, dtypes) for p in used}
    orders = {name: order for t in traced.values() for name, order in t.orders.items()}
    components = [
        _component(name, description, job, dtypes, used_in, orders.get(name, ()), modules)
        for name, used_in in kinds.items()
        if used_in
    ]
    phases = tuple(_phase(p, traced[p], description, dtypes, kinds["vae"]) for p in used)
    return JobProfile(
        model=description.source,
        job=asdict(job),
        numerics={
            **{c.name: dtypes[c.name] for c in components},
            "vae_compute": vae_dtype(description, dtypes),
            "vae_mode": _vae_mode(description, job),
            "guidance": guidance_of(description, job.guided),
            "attention_table": table_digest(),
        },
        components=tuple(components),
        phases=phases,
    )


def _refuse_unknown(description: ModelDescription, name: str) -> None:
    """A live model of a class that no twin can be built of, such as one private to its pipeline."""
    component = description.components[name]
    try:
        component_class(component)
    except CheckpointError:
        raise RefusedError(
            f"a budget for {component.class_name} ({name}) cannot be planned yet; enable_xattn() "
            "without vram works"
        ) from None


def _vae_mode(description: ModelDescription, job: Job) -> str:
    if job.tile and (job.stock_tiles or description.components["vae"].class_name != _EQUAL_TILES):
        return f"tiles of {job.tile} px"
    if job.tile:
        factor = vae_factor(description.components)
        sides = (equal_spans(n // factor, job.tile // factor) for n in (job.width, job.height))
        width, height = (spans[0][1] * factor for spans in sides)
        return f"equal tiles of {width} × {height} px"
    return "whole picture" if job.bands is None else f"bands of rows ({job.bands})"


def _component(
    name: str,
    description: ModelDescription,
    job: Job,
    dtypes: Mapping[str, str],
    phases: tuple[str, ...],
    order: Order,
    modules: Mapping[str, torch.nn.Module] | None,
) -> Component:
    live = (modules or {}).get(name)
    # not `or`: a compiled module answers bool() with its len()
    module = twin(description, name, dtypes[name]) if live is None else live
    if is_compiled(module):
        # nobody sees its units run
        order = ()
    reads = name == "unet" or name.startswith("controlnet")
    text = text_projections(module) if job.text_kv and reads and order else []
    if live is None:
        found = _twin_layout(name, module, order, tuple(text))
    else:
        found = layout(name, live, order, text)
        remember(live, order, text)
    return Component(
        name,
        tuple(Unit(group[0][0], unit_bytes(group)) for group in found.groups),
        phases,
        found.units,
        found.text_chunks,
        _kept_text_bytes(job, module, text, found),
    )


@lru_cache(maxsize=16)
def _twin_layout(name: str, module: torch.nn.Module, order: Order, text: tuple[str, ...]) -> Layout:
    # twins never change, and the search for tiles asks again and again
    return layout(name, module, order, text)


def _kept_text_bytes(job: Job, module: torch.nn.Module, text: Sequence[str], found: Layout) -> int:
    """Bytes of the text's keys and values for all layers, as the job keeps them."""
    if not found.text_chunks:
        return 0
    layers: list[Any] = [module.get_submodule(path) for path in text]
    itemsize = next(module.parameters()).element_size()
    return job.batch * (1 + job.guided) * TOKENS * itemsize * sum(n.out_features for n in layers)


def _phases_of(name: str, description: ModelDescription, job: Job) -> tuple[str, ...]:
    if name.startswith("text_encoder") or name == "image_encoder":
        return ("text",)
    if name == "safety_checker":
        return ("decode",)
    if name == "vae":
        return ("encode", "decode") if job.encode else ("decode",)
    if name == "transformer":
        return ("denoise",)
    if description.components[name].class_name == ADAPTER:
        return ("encode",)
    traced = next((kind for start, kind in _DENOISERS.items() if name.startswith(start)), None)
    if traced is not None:
        kind = description.components[name].class_name
        if kind != traced:
            built = ", ".join(dict.fromkeys(_DENOISERS.values()))
            raise RefusedError(
                f"a budget for {kind} cannot be planned yet (built: {built}); "
                "enable_xattn() without vram works"
            )
        return ("refine",) if name == "refiner" else ("denoise",)
    raise RefusedError(
        f"a budget for a pipeline with {name!r} cannot be planned yet; "
        "enable_xattn() without vram works"
    )


def _trace(
    phase: str, description: ModelDescription, job: Job, dtypes: Mapping[str, str]
) -> _Traced:
    parts = _relevant_parts(phase, description)
    dtype_items = tuple(sorted((name, dtypes[name]) for name in parts.components))
    return _traced(phase, parts.to_json(), _relevant(phase, job), dtype_items)


def _phase(
    phase: str,
    traced: _Traced,
    description: ModelDescription,
    dtypes: Mapping[str, str],
    vae_phases: tuple[str, ...],
) -> PhaseProfile:
    upcast = vae_dtype(description, dtypes) != dtypes["vae"]
    carries = ("vae",) if phase in vae_phases and upcast else ()
    return PhaseProfile(phase, traced.events, traced.curve, carries)


def _relevant_parts(phase: str, description: ModelDescription) -> ModelDescription:
    """The description of what the phase runs, so that another ControlNet keeps the other traces."""
    # what an image prompt is looked at for depends on its adapter, which is part of the UNet
    prompted = ("image_encoder", "unet") if "image_encoder" in description.components else ()
    starts = {
        "text": ("text_encoder", *prompted),
        "denoise": (*DENOISERS, "controlnet", "vae", "image_encoder", "adapter"),
        "refine": ("refiner", "vae"),
        "encode": ("vae", "adapter"),
        "decode": ("vae", "adapter"),
    }[phase]
    family = next((name for name in ("XL", "PixArt") if name in description.pipeline_class), "")
    parts = {name: c for name, c in description.components.items() if name.startswith(starts)}
    return ModelDescription("", family, parts, "", 0, 0, ("", {}))


def _relevant(phase: str, job: Job) -> Job:
    """The job with everything neutral that the phase does not see, so that traces are reused."""
    if phase == "text":
        return Job(0, 0, job.batch, job.guided, tokens=job.tokens)
    if phase in ("denoise", "refine"):
        return replace(job, encode=False, tile=None, bands=None, text_kv=False, stock_tiles=False)
    return replace(job, guided=True, encode=phase == "encode", text_kv=False, tokens=None)


@lru_cache(maxsize=64)
def _traced(phase: str, text: str, job: Job, dtype_items: tuple[tuple[str, str], ...]) -> _Traced:
    description = ModelDescription.from_dict(json.loads(text))
    dtypes = dict(dtype_items)
    # a transformer leaves nothing to its next step: at three sizes each, SD 3, Flux and PixArt
    # reserve the same to the MiB in one step, two and three, and a step of Flux takes 1 s to trace
    twice = phase in ("denoise", "refine") and "transformer" not in description.components
    try:
        call, modules, inputs, carried = phase_call(phase, description, job, dtypes)
        fixed = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        units = UnitTrace(_roots(phase, description, modules))
        with units.watch():
            events, curve = trace.record(
                call,
                fixed=fixed,
                inputs=inputs,
                repeat=1 + twice,
                work=units.count,
            )
    except SdxError:
        raise
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError) as error:
        # a model of a known class may want inputs that only its own pipeline knows how to make
        raise RefusedError(
            f"a budget for this pipeline cannot be planned yet: its phase {phase!r} does not run "
            f"by itself ({first_line(error)}); enable_xattn() without vram works"
        ) from error
    return _Traced(_with_carried(carried, events), curve, units.orders())


def _roots(
    phase: str, description: ModelDescription, modules: Sequence[torch.nn.Module]
) -> dict[str, torch.nn.Module]:
    """The models of a `phase_call` by name, as far as their weights can be streamed."""
    starts = {"text": ("text_encoder",), "denoise": DENOISERS, "refine": ("refiner",)}
    later = {"text": "image_encoder", "denoise": "controlnet"}
    names = [name for name in description.components if name.startswith(starts.get(phase, ()))]
    if phase in later:
        names += [name for name in description.components if name.startswith(later[phase])]
    # an image encoder that no adapter asks for is not run
    return dict(zip(names, modules, strict=False))


def _with_carried(carried: list[int], events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Events with the cast weights in front; identities below zero never clash with the trace's."""
    return (*((1, -1 - i, n) for i, n in enumerate(carried)), *events)
