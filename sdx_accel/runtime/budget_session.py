"""One pipeline held to one budget: plans each job, carries it out, keeps the books."""

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import HOST_MEMORY, Plan
from sdx_accel.budget.search import SLACK_BYTES
from sdx_accel.budget.units import GIB
from sdx_accel.errors import BudgetError, PlacementError, RefusedError
from sdx_accel.runtime import held
from sdx_accel.runtime.calibration import record_for
from sdx_accel.runtime.denoisers import denoiser_name, size_step, vae_factor
from sdx_accel.runtime.enforce import Enforcer, NoEnforcer
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.meta_models import default_size, describe_pipeline
from sdx_accel.runtime.phase_calls import Job, set_bands, set_tiling
from sdx_accel.runtime.pipeline_parts import pipeline_models
from sdx_accel.runtime.planning import job_of_call
from sdx_accel.runtime.probe import open_card, read_idle_cards, warm_up
from sdx_accel.runtime.session_plans import Place, Planner, Terms
from sdx_patches.text_kv import text_projections
from sdx_patches.vae import bands_of, chosen_bands, copied_bands
from sdx_patches.vae_tiles import tiles_of

__all__ = ["BudgetSession", "Terms"]

_log = logging.getLogger("sdx_accel")


def _refuse_foreign_placement(pipe: Any) -> None:
    """Someone else already decides where weights lie: say which call to drop."""
    if getattr(pipe, "hf_device_map", None):
        raise PlacementError(
            "this pipeline was loaded with a device_map, which already places its weights; load "
            "it without device_map and call enable_xattn(vram=…) instead"
        )
    for name, module in pipe.components.items():
        if not isinstance(module, torch.nn.Module):
            continue
        if held.is_held(module):
            raise PlacementError(
                f"{name} also belongs to a pipeline that is held to a VRAM budget: one budget at a "
                "time; call disable_xattn() on that pipeline first"
            )
        if any(hasattr(part, "_hf_hook") for part in module.modules()):
            raise PlacementError(
                f"{name} has accelerate's offload hooks: drop the call of "
                "enable_model_cpu_offload() or enable_sequential_cpu_offload(); the budget "
                "decides placement"
            )
        if any("group_offloading" in _hook_names(part) for part in module.modules()):
            raise PlacementError(
                f"{name} has group offloading: drop the call of enable_group_offload(); the "
                "budget decides placement"
            )
        if any(p.device.type == "meta" for p in module.parameters()):
            raise PlacementError(f"{name} has no weights (meta device); load it first")


def _hook_names(module: torch.nn.Module) -> set[str]:
    return set(getattr(getattr(module, "_diffusers_hook", None), "hooks", {}))


class BudgetSession:
    """The state behind `pipe.enable_xattn(vram=…)`.

    Args:
        pipe: a diffusers pipeline, patched already.
        terms: the budget as asked, and what goes with it.
        device: where to compute.

    Raises:
        PlacementError: offload hooks or a device map are in the way.
        RefusedError: a model whose memory cannot be planned yet.
    """

    def __init__(self, pipe: Any, terms: Terms, device: torch.device) -> None:
        _refuse_foreign_placement(pipe)
        self.device = device
        self._pipe_class = type(pipe)
        description = describe_pipeline(pipe)
        # a safety checker and the like run where the pipeline puts them; only models with a
        # description are placed
        denoiser = denoiser_name(description.components)
        missing = [] if denoiser else ["unet or transformer"]
        missing += [] if "vae" in description.components else ["vae"]
        if missing or denoiser is None:
            raise RefusedError(
                f"this pipeline has no {' and no '.join(missing)}: a budget cannot be planned for "
                "it; enable_xattn() without vram works"
            )
        self._denoiser = denoiser
        modules = pipeline_models(pipe)
        self._audited: Plan | None = None
        # the models whose text may be kept, as they were last looked at
        self._reading: set[str] = set()
        #: driver-visible bytes of this process: "idle", "context", "libraries"
        self.readings: dict[str, int | None] = {}
        enforcer = NoEnforcer()
        place = Place(Machine.generic(), notes=("not enforced on CPU",))
        if device.type == "cuda":
            place, enforcer = self._start_card(modules)
        self.executor = Executor(modules, device, enforcer, moves=device.type == "cuda")
        # bands that a copy of a held model has kept are as good as ours: nobody else ends them
        self.executor.banded = copied_bands(modules.get("vae"))
        self._planner = Planner(terms, place, description, self.executor.modules)
        # planned before anything is held, so that a refusal leaves the pipeline as it was
        self._default = self._plan(self._default_job())
        # a pipeline that is dropped while held must not leave its cap to the process
        self._current = self._default
        self._job = self._default_job()
        self.executor.replan = self._replan
        self._undo = held.hold_models(self.executor)
        self._dropped = weakref.finalize(pipe, _abandon, self._undo, self.executor)
        self._dropped.atexit = False
        self._generation = self.executor.generation
        # the session must not keep its pipeline alive
        self._pipe = weakref.ref(pipe)
        held.hold_pipeline(pipe, self.executor, self._before_call, self._after_call)
        self._announce(self._default)
        if self._default.feasible:
            self._hold(self._default)
        else:
            self.executor.take()

    def _start_card(self, modules: dict[str, torch.nn.Module]) -> tuple[Place, Enforcer]:
        read_idle_cards()
        card = open_card(self.device)
        self.readings = {"idle": card.idle_bytes, "context": card.process_bytes()}
        warm_up(card.device, [next(m.parameters()).dtype for m in modules.values()])
        record = record_for(card)
        card.settle()
        self.readings["libraries"] = card.process_bytes()
        resident = sum(
            p.numel() * p.element_size()
            for module in modules.values()
            for p in module.parameters()
            if p.device.type == "cuda"
        )
        others = torch.cuda.memory_allocated(card.device) - resident
        machine, notes = card.machine(record), tuple[str, ...]()
        if others > SLACK_BYTES:
            notes = (f"already in use by other tensors of this process: {others / GIB:.2f} GiB",)
            machine = replace(machine, non_torch_bytes=machine.non_torch_bytes + others)
        place = Place(machine, card.key, card.free_bytes, card.is_disturbed, notes)
        return place, Enforcer(card)

    @property
    def plan(self) -> Plan:
        """The plan of the last job, or of the model's default size before the first."""
        return self._current

    @property
    def terms(self) -> Terms:
        """What is held to."""
        return self._planner.terms

    @property
    def machine(self) -> Machine:
        """The card, as it was when the terms were accepted."""
        return self._planner.place.machine

    def change(self, terms: Terms) -> None:
        """Another budget for the same pipeline; nothing is installed twice."""
        before = self._planner
        place = before.place.as_now()
        self._planner = Planner(terms, place, before.description, self.executor.modules)
        try:
            self._default = self._plan(self._default_job())
        except BaseException:
            self._planner = before
            raise
        self._current = self._default
        # what phases took under another budget says nothing of this one
        self.executor.audit.records.clear()
        self._announce(self._default)
        if self._default.feasible:
            self._hold(self._default)

    def _default_job(self) -> Job:
        description = self._planner.description
        height, width = default_size(description.components)
        return self._with_text(Job(height, width, guided=not description.embeds_guidance))

    def _with_text(self, job: Job) -> Job:
        """Looked at for each job: a part that was compiled since reads the text by itself."""
        modules = self.executor.modules
        reading = {name for name, module in modules.items() if text_projections(module)}
        if reading != self._reading:
            # plans split the weights of these models by it
            self._planner.describe(self._planner.description)
            self._reading = reading
        return replace(job, text_kv="unet" in reading)

    def _plan(self, job: Job, quality: str | None = None) -> Plan:
        return self._planner.plan(self._as_set_up(job), quality)

    def _as_set_up(self, job: Job) -> Job:
        """The job with what the user has switched on in the VAE, which is planned as it is."""
        vae = self.executor.modules.get("vae")
        tile = _users_tile(vae)
        if tile is not None and tile < max(job.height, job.width):
            job = replace(job, tile=tile, stock_tiles=True)
        if vae is not None and not self.executor.banded and chosen_bands(vae):
            job = replace(job, bands=bands_of(vae))
        return job

    def _announce(self, plan: Plan) -> None:
        _log.info("%s", plan.explain())

    def _hold(self, plan: Plan) -> None:
        self._current = plan
        vae = self.executor.modules.get("vae")
        tile = None if plan.job.get("stock_tiles") else plan.job.get("tile")
        if vae is not None and tile != tiles_of(vae):
            set_tiling(vae, tile)
        bands = plan.job.get("bands")
        if vae is not None and bands != bands_of(vae):
            set_bands(vae, bands)
            self.executor.banded = chosen_bands(vae)
        self.executor.hold(plan)

    def _before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.executor.generation != self._generation:
            # adapters or a cast have changed what the weights take
            self._planner.describe(describe_pipeline(self._pipe()))
            self._generation = self.executor.generation
        self._refuse_swapped()
        config = self.executor.modules[self._denoiser].config
        components = self._planner.description.components
        scale = vae_factor(components)
        job = job_of_call(self._pipe_class, config, scale, args, kwargs, components)
        job = self._with_text(job)
        if not _plannable(job, size_step(components)):
            return  # the pipeline's own checks say what is wrong with such a call
        self._planner.look()
        plan = self._plan(job)
        if not plan.feasible:
            raise BudgetError(f"{plan.shortfall()}{self._alternatives(job)}", plan)
        if plan not in (self.executor.plan, self._default):
            self._announce(plan)
        self._job = job
        self._hold(plan)

    def _replan(self, phase: str, more: int) -> Plan:
        """Memory was refused in a phase: hold a plan that leaves it more, where there is one."""
        plan = self._planner.spare(self._as_set_up(self._job), phase, more)
        if plan.feasible:
            self._hold(plan)
        return plan

    def _after_call(self) -> None:
        """Say what each phase took: once a plan, and again whenever a prediction was too low."""
        records = self.executor.audit.records.values()
        low = [
            r for r in records if r.measured_peak_gib and r.measured_peak_gib > r.predicted_peak_gib
        ]
        if self.executor.plan != self._audited or low:
            for record in records:
                _log.info("%s", record)
        self._audited = self.executor.plan
        self._planner.learn(self._as_set_up(self._job), self._current, list(records))

    def _refuse_swapped(self) -> None:
        parts = pipeline_models(self._pipe())
        for name in {**self.executor.modules, **parts}:
            module, now = self.executor.modules.get(name), parts.get(name)
            if now is not module and (
                module is None or getattr(now, "_orig_mod", None) is not module
            ):
                what = "added" if module is None else "replaced"
                raise PlacementError(
                    f"{name} was {what} while the pipeline is held to a VRAM budget: call "
                    "disable_xattn(), and enable_xattn(vram=…) again to plan with the new one"
                )

    def _alternatives(self, job: Job) -> str:
        """The nearest changes that fit, in words."""
        if self._plan(job).binding_phase == HOST_MEMORY:
            return "; give ram a larger amount or leave it out"
        found = [f"; try vram={self.plan_smallest(job):g}"]
        if self.terms.quality == "exact" and self._plan(job, "near").feasible:
            found.append("or quality='near' (VAE in tiles)")
        for share in (0.75, 0.5):
            smaller = replace(
                job,
                height=int(job.height * share) // 64 * 64 or 64,
                width=int(job.width * share) // 64 * 64 or 64,
            )
            if self._plan(smaller).feasible:
                found.append(f"or {smaller.width} × {smaller.height} pixels")
                break
        return ", ".join(found)

    def plan_smallest(self, job: Job) -> float:
        """Smallest budget in GiB for a job."""
        return self._plan(job).smallest_budget_gib

    def release(self) -> None:
        """Exactly the objects, classes and devices that were there before."""
        self._dropped.detach()
        if (pipe := self._pipe()) is not None:
            held.let_go(pipe)
        self._undo()
        # the executor must not keep its session
        self.executor.replan = None
        self.executor.release()
        set_tiling(self.executor.modules["vae"], None)
        if self.executor.banded:
            set_bands(self.executor.modules["vae"], None)


def _plannable(job: Job, scale: int) -> bool:
    sizes = (job.height, job.width)
    whole = all(isinstance(n, int) and n > 0 and n % scale == 0 for n in sizes)
    return whole and job.batch > 0


def _abandon(undo: Callable[[], None], executor: Executor) -> None:
    """The pipeline was dropped while held: its models, which may live on, become stock again."""
    undo()
    executor.replan = None
    set_tiling(executor.modules["vae"], None)
    if executor.banded:
        set_bands(executor.modules["vae"], None)
    executor.abandon()


def _users_tile(vae: Any) -> int | None:
    """The edge in pixels of the tiles that a user has switched on."""
    if vae is None or tiles_of(vae) is not None or not getattr(vae, "use_tiling", False):
        return None
    edge: int | None = getattr(vae, "tile_sample_min_size", None)
    return edge
