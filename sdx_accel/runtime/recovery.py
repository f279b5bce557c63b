"""Repeats a model's call that the card refused memory for, with more room each time.

A call of a model is a function of its arguments: repeating it needs nothing of the scheduler, the
generator or the latents. Knows the executor's verbs; nothing of pipelines.
"""

import gc
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from sdx_accel.budget.units import GIB, MIB
from sdx_accel.errors import BudgetExceeded
from sdx_accel.runtime.phase_calls import set_bands
from sdx_patches.vae import bands_of, unsupported

if TYPE_CHECKING:
    from sdx_accel.budget.plan import Plan
    from sdx_accel.runtime.executor import Executor

__all__ = ["Retry", "exceeded", "recovering", "requested_bytes"]

_log = logging.getLogger("sdx_accel")
Result = TypeVar("Result")

# what is asked for where the message does not say how much was refused
_UNKNOWN_BYTES: Final = 64 * MIB
_SIZE = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS: Final = {"bytes": 1, "KiB": 1024, "MiB": MIB, "GiB": GIB}

# with what each repetition is done, in this order
_RUNGS: Final = (
    "all weights moved out before",
    "a plan that spares this much",
    "a plan that spares twice as much",
    "the VAE in bands of rows, which may change last bits",
    "the decode on the CPU in float32, which is slow and may change last bits",
)
_CPU: Final = len(_RUNGS)


@dataclass(frozen=True)
class Retry:
    """A refused call that was repeated.

    Args:
        phase: where it happened.
        component: the model whose call it was.
        requested: bytes that the card refused.
        rung: 1 to 5, what was done before the repetition. Each phase of a picture climbs once; the
            last one is for decodes, and each of a picture's may end there.
    """

    phase: str
    component: str
    requested: int
    rung: int

    def __str__(self) -> str:
        refused = f"{self.phase}: {self.component} was refused {self.requested / MIB:.0f} MiB"
        return f"{refused}; repeated with {_RUNGS[self.rung - 1]}"


def requested_bytes(message: str) -> int:
    """The bytes that an out-of-memory message of torch says were refused."""
    found = _SIZE.search(message)
    return _UNKNOWN_BYTES if found is None else round(float(found[1]) * _UNITS[found[2]])


def recovering(
    executor: "Executor",
    name: str,
    phase: str,
    call: Callable[[], Result],
    on_cpu: Callable[[], Result] | None = None,
) -> Result:
    """Run `call`, and again after each refusal as long as more room can be made.

    Hooks of the user on the model run again with it: its calls are those of the loop plus the
    repetitions.

    Args:
        executor: holds the models; its `retries` get a record of each repetition.
        name: the component that computes.
        phase: the phase that it computes in.
        call: a pure function of what it captured.
        on_cpu: the same without the card, for when nothing else is left.

    Returns:
        What `call` returns.

    Raises:
        BudgetExceeded: no way is left; carries the plan held at first and the last one made.
    """
    first = executor.plan
    while True:
        try:
            return call()
        except torch.OutOfMemoryError as error:
            # a capture is lost with the first error, and the capturer has to know
            if executor.plan is None or _captures(executor.device):
                raise
            requested = requested_bytes(str(error))
        # out here nothing refers to the exception, whose frames hold every activation
        last = _climb(executor, name, phase, requested, on_cpu not in (None, call))
        if last is not None:
            raise _exceeded(executor, phase, name, requested, (first, last))
        if on_cpu is not None and executor.retries[-1].rung == _CPU:
            call = on_cpu


def _captures(device: torch.device) -> bool:
    # a torch without CUDA raises when it is asked
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _climb(
    executor: "Executor", name: str, phase: str, requested: int, to_cpu: bool
) -> "Plan | None":
    """Make more room than last time; None, or the last plan where nothing is left to do."""
    last = executor.plan
    rung = max((r.rung for r in executor.retries if r.phase == phase), default=0)
    # a cycle of frames and exceptions may still hold activations: it is young, but what was young
    # long ago takes 0.3 s to go through, so that is left for the second time
    gc.collect(1 if rung == 0 else 2)
    if to_cpu:
        # another decode of the same picture ends there as well
        rung = min(rung, _CPU - 1)
    while rung < _CPU:
        rung += 1
        if rung == 1:
            done = _move_out(executor, name, phase)
        elif rung < 4:
            plan = _replan(executor, name, phase, round(requested * (1.1 if rung == 2 else 2)))
            done = plan is not None and plan.feasible
            last = plan or last
        elif rung < _CPU:
            done = phase in ("encode", "decode") and _use_bands(executor)
        else:
            done = to_cpu and _leave_card(executor, name)
        if done:
            retry = Retry(phase, name, requested, rung)
            executor.retries.append(retry)
            _log.warning("%s", retry)
            return None
    return last


def _move_out(executor: "Executor", name: str, phase: str) -> bool:
    if phase in ("encode", "decode"):
        # the VAE is the only one to compute from here on: the rest may stay out
        executor.make_room(name)
        return True
    executor.finish()
    executor.make_room("")
    return True


def _replan(executor: "Executor", name: str, phase: str, more: int) -> "Plan | None":
    if executor.replan is None:
        return None
    _leave_card(executor, name)
    plan = executor.replan(phase, more)
    if plan is not None and plan.feasible:
        executor.hold(plan)
    return plan


def _leave_card(executor: "Executor", name: str) -> bool:
    executor.finish()
    executor.uncast(name)
    executor.make_room("")
    return True


def _use_bands(executor: "Executor") -> bool:
    vae: Any = executor.modules.get("vae")
    vae = getattr(vae, "_orig_mod", vae)
    if bands_of(vae) == "low" or unsupported(vae) or getattr(vae, "use_tiling", False):
        return False
    set_bands(vae, "low")
    executor.banded = True
    return True


def exceeded(executor: "Executor", error: torch.OutOfMemoryError) -> BudgetExceeded:
    """The error for memory that was refused between the models' calls, where nothing resumes."""
    where = executor.phase or "before the first phase"
    plan = executor.plan
    requested = requested_bytes(str(error))
    last = None
    if executor.replan is not None and executor.phase is not None:
        last = executor.replan(executor.phase, round(requested * 1.1))
    return _exceeded(executor, where, "the pipeline itself", requested, (plan, last or plan))


def _exceeded(
    executor: "Executor",
    phase: str,
    who: str,
    requested: int,
    plans: tuple["Plan | None", "Plan | None"],
) -> BudgetExceeded:
    first, last = plans
    assert first is not None
    assert last is not None
    tried = f", also after {len(executor.retries)} repetitions" if executor.retries else ""
    smallest = max(first.smallest_budget_gib, last.smallest_budget_gib)
    larger = f"; a budget of {smallest:g} GiB would do" if smallest > last.budget_gib else ""
    if phase in ("encode", "decode") and "tiles" not in str(last.numerics.get("vae_mode")):
        larger += "; quality near (--quality near) needs less: it has the VAE work in tiles"
    return BudgetExceeded(
        f"{phase}: {who} was refused {requested / MIB:.0f} MiB under a budget of "
        f"{last.budget_gib:.2f} GiB{tried}: close other programs that use the card, or make a "
        f"smaller picture{larger}",
        (first, last),
    )
