"""From a model's configurations and a job to what the planner needs; no weights, no GPU."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch

from sdx_accel.budget.allocator import Event
from sdx_accel.budget.profile import PHASES, Component, JobProfile, PhaseProfile, Unit
from sdx_accel.errors import CheckpointError, RefusedError, SdxError
from sdx_accel.runtime import trace
from sdx_accel.runtime.descriptions import ModelDescription
from sdx_accel.runtime.folder_loading import first_line
from sdx_accel.runtime.meta_models import component_class
from sdx_accel.runtime.phase_calls import Job, phase_call, twin, vae_dtype
from sdx_accel.runtime.weights import split_weights, unit_bytes

__all__ = ["Job", "profile_job"]

# the models of the denoising loop by the start of their name, and the classes that are traced
_DENOISERS = {
    "unet": "UNet2DConditionModel",
    "controlnet": "ControlNetModel",
    "refiner": "UNet2DConditionModel",
}
# sizes that the tile search of quality "near" tries, largest first, in pixels
TILES = (1536, 1024, 768, 512, 384)


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
    for name in modules or ():
        _refuse_unknown(description, name)
    kinds = {name: _phases_of(name, description, job) for name in description.components}
    components = []
    for name, used_in in kinds.items():
        if used_in:
            module = (modules or {}).get(name)
            # not `or`: a compiled module answers bool() with its len()
            module = twin(description, name, dtypes[name]) if module is None else module
            units = tuple(Unit(group[0][0], unit_bytes(group)) for group in split_weights(module))
            components.append(Component(name, units, used_in))
    names = [p for p in PHASES if _used(p, components)]
    phases = tuple(_phase(p, description, job, dtypes, components) for p in names)
    return JobProfile(
        model=description.source,
        job=asdict(job),
        numerics={
            **{c.name: dtypes[c.name] for c in components},
            "vae_compute": vae_dtype(description, dtypes),
            "vae_mode": _vae_mode(job),
            "guidance": "batched" if job.guided else "off",
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


def _vae_mode(job: Job) -> str:
    if job.tile:
        return f"tiles of {job.tile} px"
    return "whole picture" if job.bands is None else f"bands of rows ({job.bands})"


def _used(phase: str, components: list[Component]) -> bool:
    return any(phase in component.phases for component in components)


def _phases_of(name: str, description: ModelDescription, job: Job) -> tuple[str, ...]:
    if name.startswith("text_encoder") or name == "image_encoder":
        return ("text",)
    if name == "safety_checker":
        return ("decode",)
    if name == "vae":
        return ("encode", "decode") if job.encode else ("decode",)
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


def _phase(
    phase: str,
    description: ModelDescription,
    job: Job,
    dtypes: Mapping[str, str],
    components: list[Component],
) -> PhaseProfile:
    parts = _relevant_parts(phase, description)
    text = parts.to_json()
    dtype_items = tuple(sorted((name, dtypes[name]) for name in parts.components))
    carries: tuple[str, ...] = ()
    if phase in ("encode", "decode") and vae_dtype(description, dtypes) != dtypes["vae"]:
        carries = ("vae",)
    traced = _traced(phase, text, _relevant(phase, job), dtype_items)
    return PhaseProfile(phase, traced.events, traced.curve, carries)


def _relevant_parts(phase: str, description: ModelDescription) -> ModelDescription:
    """The description of what the phase runs, so that another ControlNet keeps the other traces."""
    # what an image prompt is looked at for depends on its adapter, which is part of the UNet
    prompted = ("image_encoder", "unet") if "image_encoder" in description.components else ()
    starts = {
        "text": ("text_encoder", *prompted),
        "denoise": ("unet", "controlnet", "vae", "image_encoder"),
        "refine": ("refiner", "vae"),
        "encode": ("vae",),
        "decode": ("vae",),
    }[phase]
    family = "XL" if "XL" in description.pipeline_class else ""
    parts = {name: c for name, c in description.components.items() if name.startswith(starts)}
    return ModelDescription("", family, parts, "", 0, 0, ("", {}))


def _relevant(phase: str, job: Job) -> Job:
    """The job with everything neutral that the phase does not see, so that traces are reused."""
    if phase == "text":
        return Job(0, 0, job.batch, job.guided)
    if phase in ("denoise", "refine"):
        return replace(job, encode=False, tile=None, bands=None)
    return replace(job, guided=True, encode=phase == "encode")


@lru_cache(maxsize=64)
def _traced(phase: str, text: str, job: Job, dtype_items: tuple[tuple[str, str], ...]) -> _Traced:
    description = ModelDescription.from_dict(json.loads(text))
    dtypes = dict(dtype_items)
    try:
        call, modules, inputs, carried = phase_call(phase, description, job, dtypes)
        fixed = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        events, curve = trace.record(
            call, fixed=fixed, inputs=inputs, repeat=2 if phase in ("denoise", "refine") else 1
        )
    except SdxError:
        raise
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError) as error:
        # a model of a known class may want inputs that only its own pipeline knows how to make
        raise RefusedError(
            f"a budget for this pipeline cannot be planned yet: its phase {phase!r} does not run "
            f"by itself ({first_line(error)}); enable_xattn() without vram works"
        ) from error
    return _Traced(_with_carried(carried, events), curve)


def _with_carried(carried: list[int], events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Events with the cast weights in front; identities below zero never clash with the trace's."""
    return (*((1, -1 - i, n) for i, n in enumerate(carried)), *events)
