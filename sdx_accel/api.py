"""The one place that joins patches, budget and runtime; what the attached methods call."""

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

import sdx_patches
from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Plan
from sdx_accel.budget.units import parse_vram
from sdx_accel.errors import RefusedError
from sdx_accel.runtime.assembly import assembled
from sdx_accel.runtime.budget_session import BudgetSession, Terms
from sdx_accel.runtime.calibration import known_record
from sdx_accel.runtime.checkpoints import describe
from sdx_accel.runtime.descriptions import ModelDescription
from sdx_accel.runtime.enforce import PhaseRecord
from sdx_accel.runtime.held import SESSION as _SESSION
from sdx_accel.runtime.history import History, cell_of, plan_with_peaks
from sdx_accel.runtime.host_memory import limits, parse_ram, resolve_ram
from sdx_accel.runtime.kernel_cache import ensure_kernel_cache
from sdx_accel.runtime.meta_models import describe_pipeline
from sdx_accel.runtime.phase_calls import twin
from sdx_accel.runtime.planning import check_quality, plan_job
from sdx_accel.runtime.probe import open_card, read_idle_cards
from sdx_accel.runtime.profiler import Job
from sdx_accel.runtime.reports import Report
from sdx_patches.session import components
from sdx_patches.text_kv import text_projections
from sdx_patches.vae import copied_bands, disable_bands

__all__ = [
    "Report",
    "model_disable_xattn",
    "model_enable_xattn",
    "model_xattn_report",
    "pipeline_disable_xattn",
    "pipeline_enable_xattn",
    "pipeline_xattn_report",
    "plan",
]

_log = logging.getLogger("sdx_accel")
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")

# switching on and off swaps classes and members of models that pipelines may share: one thread at a
# time in the whole process, which may call again from within (a log handler, a callback)
_turn = threading.RLock()


def _in_turn(method: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Have a thread wait until no other switches anything on or off."""

    @wraps(method)
    def waiting(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        with _turn:
            return method(*args, **kwargs)

    return waiting


def _speak() -> None:
    """Let plans and notes reach stderr unless the application has set up logging itself."""
    if logging.getLogger().handlers:
        return
    for log in (_log, logging.getLogger("sdx_kernels")):
        if not log.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(message)s"))
            log.addHandler(handler)
            log.setLevel(logging.INFO)
            log.propagate = False


# who has called enable_xattn() and is still there
_owners: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
# tells these owners from those who call sdx_patches.patch() and restore it themselves
_PREFIX = "enable_xattn:"


def _owner(root: Any) -> str:
    return f"{_PREFIX}{type(root).__name__}@{id(root):x}"


def _patch(root: Any, attention_op: Any, fused: bool) -> sdx_patches.PatchSession:
    owner = _owner(root)
    session = sdx_patches.patch(root, owner=owner, attention_op=attention_op, fused=fused)
    _owners[owner] = root
    return session


def _restore(root: Any) -> None:
    """Restore for `root`, and for owners that were dropped: nobody else can do it for them."""
    owner = _owner(root)
    ours = {name for name in sdx_patches.owners(root) if name.startswith(_PREFIX)}
    # the own name always: a copy's patches carry no name, and any call restores them
    for name in {owner, *(name for name in ours if name not in _owners)}:
        sdx_patches.restore(root, owner=name)
    _owners.pop(owner, None)
    # bands of a budget's that a copy of a held model has kept
    for part in components(root).values():
        if copied_bands(part):
            disable_bands(part)


def _check_switches(**switches: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise RefusedError(f"{name} is True or False, got {value!r}")


def _known_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise RefusedError(f"device {device!r} is none that torch knows") from None


def _device(device: Any) -> torch.device:
    if device is not None:
        chosen = _known_device(device)
        if chosen.type not in ("cpu", "cuda"):
            raise RefusedError(
                f"device {chosen}: budgets are held on NVIDIA cards (cuda) and planned on the CPU "
                "(cpu); leave device out, or call enable_xattn() without vram"
            )
        _check_cuda(chosen)
    else:
        chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type == "cuda" and chosen.index is None:
        # the card of this moment: it stays the same whatever torch.cuda.set_device() says later
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def _check_cuda(chosen: torch.device) -> None:
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise RefusedError(
            f"device {chosen} asked, but torch {torch.__version__} sees no CUDA device; "
            "`sdx-accel doctor` says why"
        )


def _without_budget(device: Any) -> None:
    """Check a `device` that no budget uses, and say that it changes nothing."""
    if device is not None:
        _check_cuda(_known_device(device))
        _log.info(
            "device is where a budget computes, and without vram there is none: it changes "
            "nothing; move the pipeline with .to(%r)",
            str(device),
        )


def _disabled() -> bool:
    if os.environ.get("SDX_DISABLE", "") in ("", "0"):
        return False
    _log.info("SDX_DISABLE is set: enable_xattn() does nothing")
    return True


@_in_turn
def pipeline_enable_xattn(
    pipe: Any,
    attention_op: Any = None,
    *,
    vram: float | str | None = None,
    ram: float | str | None = None,
    device: Any = None,
    quality: str = "exact",
    fused: bool = True,
    learn: bool = True,
) -> None:
    """`DiffusionPipeline.enable_xattn`: see `sdx_accel._attach` for the arguments.

    Raises:
        RefusedError: an argument that cannot be honoured; nothing is changed then.
        PlacementError: offload hooks or a device map compete with the budget.
    """
    _speak()
    if _disabled():
        return
    check_quality(quality)
    if torch.cuda.is_available():
        ensure_kernel_cache()
    if vram is None and ram is not None:
        raise RefusedError("ram limits what a plan may keep in host memory: give vram as well")
    _check_switches(fused=fused, learn=learn)
    terms = None if vram is None else _terms(vram, ram, quality, learn, fused)
    if terms is None:
        _without_budget(device)
    chosen = None if terms is None else _device(device)
    if terms is not None:
        # before anything starts CUDA: the idle card is what the budget is counted from
        read_idle_cards()
    patches = _patch(pipe, attention_op, fused)
    if terms is None or chosen is None:
        return
    try:
        _hold(pipe, terms, chosen)
    except BaseException:
        patches.rollback()
        if _owner(pipe) not in sdx_patches.owners(pipe):
            _owners.pop(_owner(pipe), None)
        raise


def _terms(
    vram: float | str, ram: float | str | None, quality: str, learn: bool, fused: bool
) -> Terms:
    return Terms(parse_vram(vram), quality, None if ram is None else parse_ram(ram), learn, fused)


def _hold(pipe: Any, terms: Terms, device: torch.device) -> None:
    """Hold a patched pipeline to a budget; one that was held before stays so if this raises."""
    session: BudgetSession | None = pipe.__dict__.get(_SESSION)
    if session is not None and session.device == device:
        session.change(terms)
        return
    if session is not None:
        del pipe.__dict__[_SESSION]
        session.release()
    try:
        pipe.__dict__[_SESSION] = BudgetSession(pipe, terms, device)
    except BaseException:
        if session is not None:
            pipe.__dict__[_SESSION] = BudgetSession(pipe, session.terms, session.device)
        raise


@_in_turn
def pipeline_disable_xattn(pipe: Any) -> None:
    """`DiffusionPipeline.disable_xattn`: nothing happens where nothing was enabled."""
    session: BudgetSession | None = getattr(pipe, "__dict__", {}).pop(_SESSION, None)
    if session is not None:
        session.release()
    _restore(pipe)


@_in_turn
def pipeline_xattn_report(pipe: Any) -> Report:
    """`DiffusionPipeline.xattn_report`."""
    session: BudgetSession | None = getattr(pipe, "__dict__", {}).get(_SESSION)
    layers, fused = tuple(sdx_patches.layers(pipe)), sdx_patches.fused(pipe)
    if session is None:
        return Report(layers, (), None, fused=fused)
    done = session.executor.audit.records
    phases = tuple(
        done.get(phase.name, PhaseRecord(phase.name, phase.predicted_peak_gib, None))
        for phase in session.plan.phases
    )
    return Report(layers, phases, session.plan, tuple(session.executor.retries), fused)


@_in_turn
def model_enable_xattn(
    model: Any,
    attention_op: Any = None,
    *,
    vram: float | str | None = None,
    ram: float | str | None = None,
    device: Any = None,
    quality: str = "exact",
    fused: bool = True,
    learn: bool = True,
) -> None:
    """`ModelMixin.enable_xattn`: attention only; a budget belongs to a pipeline.

    Raises:
        RefusedError: `vram`, `ram` or `device` was given.
    """
    _speak()
    if vram is not None or ram is not None or device is not None:
        raise RefusedError("a VRAM budget belongs to a pipeline: call pipe.enable_xattn(vram=…)")
    if _disabled():
        return
    check_quality(quality)
    _check_switches(fused=fused, learn=learn)
    if torch.cuda.is_available():
        ensure_kernel_cache()
    _patch(model, attention_op, fused)


@_in_turn
def model_disable_xattn(model: Any) -> None:
    """`ModelMixin.disable_xattn`."""
    _restore(model)


@_in_turn
def model_xattn_report(model: Any) -> Report:
    """`ModelMixin.xattn_report`."""
    return Report(tuple(sdx_patches.layers(model)), (), None, fused=sdx_patches.fused(model))


def _machine(device: Any) -> tuple[Machine, str]:
    """The card's record and the key of its calibration; the generic record has no key."""
    on_cpu = device is not None and torch.device(device).type == "cpu"
    if on_cpu or not torch.cuda.is_available():
        return Machine.generic(), ""
    card = open_card(torch.device(device or "cuda"))
    return card.machine(known_record(card)), card.key


def _keeps_text(model: Any, description: ModelDescription, dtype: str) -> bool:
    """Whether the denoiser's keys and values of the text can be kept over the steps."""
    if "unet" not in description.components:
        return False
    live = getattr(model, "unet", None)
    return bool(text_projections(twin(description, "unet", dtype) if live is None else live))


def plan(
    model: Any,
    *,
    vram: float | str = "auto",
    ram: float | str | None = None,
    height: int | None = None,
    width: int | None = None,
    batch: int = 1,
    guidance: float = 5.0,
    dtype: str = "auto",
    quality: str = "exact",
    device: Any = None,
    image: bool = False,
    config: Any = None,
    loras: Sequence[str | os.PathLike[str]] = (),
    embeddings: Sequence[str] = (),
    ip_adapters: Sequence[str] = (),
    refiner: str | None = None,
    controlnets: Sequence[str] = (),
    machine: Machine | None = None,
    learn: bool = True,
    fused: bool = True,
) -> Plan:
    """What a job would need and where everything would lie; loads no weights, needs no GPU.

    Args:
        model: what `--model` takes (a `random:` spec, a folder, a single file, a hub id), or a
            pipeline, or a `ModelDescription`.
        vram: GiB, "auto", "80%" or -N; the last three need a GPU or a `machine` with sizes.
        ram: host memory that the weights may take, in the same forms; None is no limit.
        height, width: pixels; the model's own size by default.
        batch: pictures computed at once.
        guidance: above 1 the denoiser runs on two predictions a picture, unless guidance is an
            input of it.
        dtype: "auto" (fp16), "fp16", "bf16" or "fp32".
        quality: "exact" or "near".
        device: the CUDA device to plan for; the current one by default.
        image: whether a picture is encoded first (img2img, inpainting).
        config: configuration for a single-file checkpoint.
        loras: LoRA files. These and the next four are for models by name or description: a
            pipeline is planned with what is on it.
        embeddings: textual inversion files.
        ip_adapters: IP-Adapter files, or `random:ip-adapter`.
        refiner: an SDXL refiner: folder, hub id or random spec.
        controlnets: folders, hub ids or `random:controlnet`.
        machine: a record to plan with instead of reading the card.
        learn: leave room for what earlier runs on this card took beyond their plans.
        fused: as of `enable_xattn`: the VAE works in bands of rows by itself.

    Returns:
        The plan; look at `feasible`.

    Raises:
        RefusedError: an argument that makes no sense, or a model that cannot be planned.
        CheckpointError: a file that is missing, broken, or was made for another model.
        SizeError: height or width is one that the model cannot do.
        TypeError: `model` is something else, a single model for instance.
    """
    if isinstance(model, ModelDescription):
        description = model
    elif isinstance(model, (str, os.PathLike)):
        description = describe(os.fspath(model), config=config)
    elif isinstance(getattr(model, "components", None), dict):
        description = describe_pipeline(model)
    else:
        raise TypeError(
            f"expected a diffusers pipeline or what --model takes, got {type(model).__name__}; "
            "pass the pipeline itself, or a model's folder, file or hub id"
        )
    description = assembled(
        description,
        loras=loras,
        embeddings=embeddings,
        ip_adapters=ip_adapters,
        refiner=refiner,
        controlnets=controlnets,
        kind="image" if image else "text",
    )
    names = {"auto": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    if dtype not in names:
        raise RefusedError(f"dtype {dtype!r} is not one of {', '.join(names)}")
    job = Job(
        height=description.default_height if height is None else height,
        width=description.default_width if width is None else width,
        batch=batch,
        guided=guidance > 1 and not description.embeds_guidance,
        encode=image,
        text_kv=_keeps_text(model, description, names[dtype]),
    )
    chosen, key = (machine, "") if machine is not None else _machine(device)
    dtypes = dict.fromkeys(description.components, names[dtype])
    allowed, note = (None, None) if ram is None else resolve_ram(parse_ram(ram), limits())
    request = parse_vram(vram)

    def make(card: Machine, floors: Mapping[str, int]) -> Plan:
        notes = (note,) if note else ()
        return plan_job(
            description,
            job,
            dtypes,
            card,
            request,
            quality,
            notes=notes,
            floors=floors,
            ram=allowed,
            fused=fused,
            vae=getattr(model, "vae", None),
        )

    peaks = {}
    if key and learn:
        peaks = History().peaks(cell_of(key, description, job, dtypes, quality))
    return plan_with_peaks(make, chosen, peaks)
