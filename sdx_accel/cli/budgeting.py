"""Asks the planner about a job, and refuses what does not fit. Knows no weights and no pipeline."""

import math
from typing import Any

from sdx_accel.budget.plan import HOST_MEMORY
from sdx_accel.cli.job import Job
from sdx_accel.cli.prepare import Prepared
from sdx_accel.errors import BudgetError

__all__ = ["budget_note", "budget_of", "plan_job", "refuse_infeasible"]

# what the plan is shown for on a machine without a GPU when no budget is given
SHOWN_BUDGET_GIB = 8.0
_DTYPE_FLAGS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def plan_job(
    prepared: Prepared,
    device: str,
    dtype: str,
    quality: str | None = None,
    *,
    learn: bool = True,
) -> Any:
    """The `Plan` of one picture of a job, from configurations only.

    Args:
        prepared: from `prepare`; `num` does not matter, pictures are made one after the other.
        device: "cpu" or "cuda:N".
        dtype: "auto" or one of the dtypes that the weights can have.
        quality: instead of the job's.
        learn: whether what earlier runs took beyond their plans is planned for.
    """
    import sdx_accel

    job = prepared.job
    return sdx_accel.plan(
        prepared.description,
        vram=budget_of(job, device),
        height=job.height,
        width=job.width,
        batch=1,
        guidance=job.guidance,
        dtype=_DTYPE_FLAGS.get(dtype, dtype),
        quality=quality or job.quality,
        device=device,
        image=job.image is not None,
        ram=job.ram,
        learn=learn,
    )


def budget_of(job: Job, device: str) -> str | float:
    """What is planned for: without a GPU nothing is free or total, so a fixed size is shown.

    Args:
        job: the settings; `vram` None means auto on a GPU.
        device: "cpu" or "cuda:N".

    Returns:
        What `sdx_accel.plan` and `enable_xattn` take as `vram`.
    """
    if device == "cpu":
        return SHOWN_BUDGET_GIB if job.vram is None or _is_relative(job.vram) else job.vram
    return job.vram or "auto"


def budget_note(job: Job, device: str) -> str | None:
    """A sentence when the budget that was asked for is not the one that is planned for.

    Args:
        job: the settings.
        device: "cpu" or "cuda:N".
    """
    if device != "cpu" or job.vram is None or not _is_relative(job.vram):
        return None
    why = "the CPU was asked for" if job.device == "cpu" else "there is no GPU here"
    return (
        f"--vram {job.vram} is relative to a GPU, and {why}: the plan is shown for "
        f"{SHOWN_BUDGET_GIB:g} GiB"
    )


def _is_relative(vram: str) -> bool:
    return vram[0] in "a-" or vram[-1] == "%"


def refuse_infeasible(plan: Any, prepared: Prepared, device: str) -> None:
    """Refuse a job that does not fit, naming the nearest changes that do.

    Args:
        plan: from `plan_job`.
        prepared: what it was made for.
        device: "cpu" or "cuda:N".

    Raises:
        BudgetError: with the plan.
    """
    job = prepared.job
    # on the CPU nothing is enforced: only a limit that the user named is refused there
    named = job.ram if plan.binding_phase == HOST_MEMORY else job.vram
    if plan.feasible or (device == "cpu" and named is None):
        return
    raise BudgetError(
        f"this job does not fit: {plan.shortfall()}. {_ways(plan, prepared, device)}", plan
    )


def _ways(plan: Any, prepared: Prepared, device: str) -> str:
    """What to change, in words."""
    job = prepared.job
    if plan.binding_phase == HOST_MEMORY:
        enough = math.ceil(plan.host_gib * 100) / 100
        return f"Use --ram {enough:g} or more, or a model with smaller weights"
    # rounded up: the figure that is printed has to work
    smallest = math.ceil(plan.smallest_budget_gib * 100) / 100
    ways = [f"--vram {smallest:g} or more"]
    if job.quality == "exact" and plan_job(prepared, device, job.dtype, "near").feasible:
        ways.append("--quality near (the VAE works in tiles)")
    return f"Use {', '.join(ways)}, or a smaller picture"
