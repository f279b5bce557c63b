"""From a request to a plan: reads jobs off calls, tries the choices that quality allows."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from sdx_accel.budget.advice import advice
from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Plan
from sdx_accel.budget.profile import JobProfile
from sdx_accel.budget.search import make_plan
from sdx_accel.budget.units import GIB, VramRequest
from sdx_accel.errors import RefusedError, SizeError
from sdx_accel.runtime.denoisers import latent_side, size_limit, size_step
from sdx_accel.runtime.descriptions import ComponentDescription, ModelDescription
from sdx_accel.runtime.phase_calls import twin
from sdx_accel.runtime.profiler import TILES, Job, profile_job
from sdx_accel.runtime.t2i_adapters import adapter_names
from sdx_accel.runtime.transformer_jobs import transformer_job
from sdx_patches.vae import unsupported

__all__ = ["QUALITIES", "check_quality", "job_of_call", "plan_job"]

QUALITIES = ("exact", "near")
# what a picture is taken to need where two plans are compared: the pipelines' defaults are 20 to 50
STEPS = 20
# what a decode in bands has to spare before it is spoken of: 45 ms at 12 GB/s, and at 1024² it
# takes up to 25 ms longer than a whole one (H200, fp16)
WORTH_GIB = 0.5


def check_quality(quality: str) -> None:
    """Refuse a tier that does not exist or is not built.

    Raises:
        RefusedError: lists the tiers that are built.
    """
    if quality not in QUALITIES:
        raise RefusedError(f"quality {quality!r} is not built; built: {', '.join(QUALITIES)}")


def plan_job(
    description: ModelDescription,
    job: Job,
    dtypes: Mapping[str, str],
    machine: Machine,
    request: VramRequest,
    quality: str = "exact",
    modules: Mapping[str, torch.nn.Module] | None = None,
    notes: tuple[str, ...] = (),
    floors: Mapping[str, int] | None = None,
    ram: int | None = None,
    fused: bool = True,
    vae: Any = None,
) -> Plan:
    """Plan a job.

    Args:
        description: the model's configurations.
        job: sizes and settings; its `tile` and `bands` are kept when set.
        dtypes: dtype names of the components' weights.
        machine: the card.
        request: the budget as asked.
        quality: "exact" or "near"; only "near" may tile the VAE, and may take other bands where
            that moves less.
        modules: live models, whose weights are then counted as they are.
        notes: sentences to print with the plan.
        floors: bytes by phase that it was seen to take above its prediction.
        ram: most bytes of host memory that the weights may take.
        fused: whether the VAE works in bands of rows wherever it can; otherwise only where it does
            not fit as a whole.
        vae: the live autoencoder of a pipeline that is planned by its configurations.

    Returns:
        The plan, feasible or not, with what half a GiB more would buy.

    Raises:
        RefusedError: unknown quality, a relative budget without a card, an untraceable model.
        SizeError: a size that the VAE does not divide.
    """
    check_quality(quality)
    _check_job(description, job)
    budget, note = request.resolve(machine.total_bytes, machine.free_bytes)
    notes = (*notes, note) if note else notes
    chosen = bool(job.tile or job.bands)
    live = vae if modules is None else modules.get("vae")
    in_bands = not job.bands and _bands_work(description, dtypes, live)
    if in_bands and fused:
        job = replace(job, bands="fast")

    profiles: dict[Job, JobProfile] = {}

    def attempt(changed: Job, budget: int) -> Plan:
        if changed not in profiles:
            profiles[changed] = profile_job(description, changed, dtypes, modules)
        return make_plan(profiles[changed], machine, budget, notes=notes, floors=floors, ram=ram)

    def may_change(plan: Plan) -> bool:
        return in_bands and not chosen and plan.binding_phase in ("encode", "decode")

    def choose(budget: int) -> Plan:
        best = attempt(job, budget)
        if chosen:
            return best
        if may_change(best):
            best = _with_bands(
                best, lambda bands: attempt(replace(job, bands=bands), budget), quality
            )
        if quality == "exact":
            return best
        tiles = [t for t in TILES if t < max(job.height, job.width)]
        for tile in tiles:
            if best.feasible and not best.moved_gib_per_picture:
                break
            candidate = attempt(replace(job, tile=tile), budget)
            # fewer, larger tiles have fewer seams: a smaller tile must buy something
            if _rank(candidate) < _rank(best):
                best = candidate
        # the smallest tile needs least: that it was not worth taking here changes no floor
        return _with_floor(best, attempt(replace(job, tile=tiles[-1]), budget)) if tiles else best

    best = choose(budget)
    words = advice(choose, best)
    first = attempt(job, budget)
    if best.feasible and best.job == first.job and may_change(first):
        words += _near_gain(best, attempt(replace(job, bands="low"), budget))
    return replace(best, advice=words + _other_bits(best, first))


def _other_bits(plan: Plan, first: Plan) -> tuple[str, ...]:
    """Which numerics differ from those of a run without a budget, whose bits are other ones."""
    return tuple(
        f"other last digits than without a budget: {name} is {value}, not {first.numerics[name]}"
        for name, value in plan.numerics.items()
        if plan.feasible and value != first.numerics.get(name)
    )


def _bands_work(description: ModelDescription, dtypes: Mapping[str, str], live: Any) -> bool:
    vae = twin(description, "vae", dtypes["vae"]) if live is None else live
    return not unsupported(getattr(vae, "_orig_mod", vae))


def _with_bands(first: Plan, attempt: Callable[[str], Plan], quality: str) -> Plan:
    """The decode as it is without a budget where that fits, else others; the floor is of "low".

    Another way to decode changes the last bits of the picture, so in `exact` the first is kept
    while it fits, with weights moved out for it if need be: a picture has the same bits at every
    budget from there on, though at the first of them it may move more than another did. In `near`
    what moves less is taken.
    """
    low = attempt("low")
    keep = first.feasible and (quality == "exact" or not first.moved_gib_per_picture)
    best = first if keep else min(first, attempt("fast"), low, key=_rank)
    return _with_floor(best, low)


def _near_gain(first: Plan, low: Plan) -> tuple[str, ...]:
    """What `near` would spare a plan that moves weights out for the decode."""
    spared = first.moved_gib_per_picture - low.moved_gib_per_picture
    if not low.feasible or _rank(low) >= _rank(first) or spared < WORTH_GIB:
        return ()
    return (
        f"quality near: at least {spared:.2f} GiB less to move for each new prompt (the decode in "
        "bands of rows or tiles)",
    )


def _with_floor(plan: Plan, other: Plan) -> Plan:
    """`plan`, with the smallest budget of another choice where that is smaller."""
    if other.smallest_budget_gib >= plan.smallest_budget_gib:
        return plan
    return replace(
        plan, smallest_budget_gib=other.smallest_budget_gib, binding_phase=other.binding_phase
    )


def _check_job(description: ModelDescription, job: Job) -> None:
    multiple, most = size_step(description.components), size_limit(description.components)
    for name, pixels in (("height", job.height), ("width", job.width)):
        if pixels < multiple or pixels % multiple:
            below = max(pixels // multiple, 1) * multiple
            nearest = f"{below}" if below > pixels else f"{below} or {below + multiple}"
            raise SizeError(
                f"{name} {pixels} is none that this model can do: it has to be a multiple of "
                f"{multiple}; the nearest: {nearest}"
            )
        if most is not None and pixels > most:
            raise SizeError(
                f"{name} {pixels} is more than this model can do: its positions end at {most}"
            )
    if job.batch < 1:
        raise RefusedError(f"a batch of {job.batch} pictures: at least 1 is needed")


def _rank(plan: Plan) -> tuple[bool, float, float]:
    # where nothing fits, the reader wants the smallest budget that any choice works with; that
    # figure is rounded, the peak of a plan that does not fit is not
    if not plan.feasible:
        return True, plan.smallest_budget_gib, plan.predicted_peak_gib
    moving = plan.moved_gib_per_picture * GIB / plan.machine.link_bytes_per_s
    return False, moving + STEPS * plan.seconds_per_step, 0.0


def _first_size(picture: Any) -> tuple[int, int] | None:
    """(width, height) of a picture argument: PIL, array, tensor or a list of them."""
    while isinstance(picture, (list, tuple)) and picture:
        picture = picture[0]
    if hasattr(picture, "size") and isinstance(picture.size, tuple):
        return int(picture.size[0]), int(picture.size[1])
    shape = getattr(picture, "shape", None)
    if shape is None or len(shape) < 2:
        return None
    channels_last = not isinstance(picture, torch.Tensor)
    height, width = shape[-3:-1] if channels_last and len(shape) >= 3 else shape[-2:]
    return int(width), int(height)


def _is_latents(picture: Any, unet_config: Any) -> bool:
    """Whether an `image` is another pipeline's latents, which are not encoded again."""
    channels = getattr(unet_config, "out_channels", 4)
    return isinstance(picture, torch.Tensor) and picture.dim() == 4 and picture.shape[1] == channels


def job_of_call(
    pipe_class: type,
    unet_config: Any,
    scale: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    components: Mapping[str, ComponentDescription] | None = None,
) -> Job:
    """What a pipeline call will compute.

    Args:
        pipe_class: the pipeline's own class; its `__call__` gives names and defaults.
        unet_config: the denoiser's configuration.
        scale: pixels a latent, usually 8.
        args, kwargs: the call's arguments, without `self`.
        components: the pipeline's models, which tell what a transformer's pipeline does otherwise.
    """
    signature = inspect.signature(pipe_class.__call__)
    bound = signature.bind_partial(None, *args, **kwargs)
    bound.apply_defaults()
    values = bound.arguments
    transformer = (components or {}).get("transformer")
    size = unet_config.sample_size if transformer is None else latent_side(transformer)
    rows, columns = size if isinstance(size, (tuple, list)) else (size, size)
    picture = values.get("image")
    width, height = values.get("width"), values.get("height")
    guide = values.get("control_image")
    looking = any(name in pipe_class.__name__ for name in ("ControlNet", "Adapter"))
    if looking and "control_image" not in signature.parameters:
        # what these call `image` is only looked at by the ControlNet or the adapter
        picture, guide = None, picture
    from_picture = _first_size(guide if picture is None else picture)
    follows = guide is not None or "height" not in signature.parameters
    if from_picture and follows and (height is None or width is None):
        # a T2I-Adapter's pipeline rounds down to what the adapter divides
        step = size_step(components) if components and adapter_names(components) else scale
        width, height = (n // step * step for n in from_picture)
    encode = picture is not None
    given = values.get("latents")
    given = picture if given is None and _is_latents(picture, unet_config) else given
    if isinstance(given, torch.Tensor) and given.dim() == 4:
        # the pipelines compute at the size of the latents, whatever height and width say
        height, width = (n * scale for n in given.shape[-2:])
        # a mask is encoded with its picture all the same
        encode = encode and (given is not picture or values.get("mask_image") is not None)
    prompt, embeds = values.get("prompt"), values.get("prompt_embeds")
    batch = len(prompt) if isinstance(prompt, (list, tuple)) else 1
    if prompt is None and embeds is not None:
        batch = embeds.shape[0]
    guidance = values.get("guidance_scale")
    guided = guidance is None or guidance > 1
    if getattr(unet_config, "time_cond_proj_dim", None) is not None:
        guided = False
    job = Job(
        height=rows * scale if height is None else height,
        width=columns * scale if width is None else width,
        batch=batch * (values.get("num_images_per_prompt") or 1),
        guided=guided,
        encode=encode,
    )
    return transformer_job(job, values, components or {})
