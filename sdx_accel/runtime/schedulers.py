"""Short names of samplers, the diffusers scheduler behind each, and whether a configuration works.

Knows nothing of models or files.
"""

from __future__ import annotations

import difflib
import math
from typing import Any

from sdx_accel.errors import CheckpointError, RefusedError

__all__ = [
    "FEW_STEPS",
    "SCHEDULERS",
    "check_scheduler",
    "check_steps",
    "make_scheduler",
    "try_scheduler",
]

# name → class, and what that name means on top of the model's own schedule
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "dpm++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "solver_order": 2}),
    "dpm++-karras": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "dpmsolver++", "solver_order": 2, "use_karras_sigmas": True},
    ),
    "dpm++-sde": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "sde-dpmsolver++", "solver_order": 2},
    ),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-a": ("EulerAncestralDiscreteScheduler", {}),
    "euler-karras": ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    "heun": ("HeunDiscreteScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    # the schedules that SDXL-Lightning and SDXL-Turbo were distilled on end at the last timestep
    "lightning": ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "turbo": ("EulerAncestralDiscreteScheduler", {"timestep_spacing": "trailing"}),
    "unipc": ("UniPCMultistepScheduler", {}),
}

#: names for models distilled to a few steps → the most guidance that these are made for
FEW_STEPS = {"lcm": 2.0, "lightning": 1.0, "turbo": 1.0}
# an LCM takes its steps out of the 50 of the model that it was distilled from
_MOST_STEPS = {"lcm": 50}


def check_steps(name: str, steps: int) -> None:
    """Refuse more steps than a sampler has.

    Args:
        name: a key of `SCHEDULERS`, in any case.
        steps: denoising steps.

    Raises:
        RefusedError: naming the most that it can do.
    """
    most = _MOST_STEPS.get(check_scheduler(name), steps)
    if steps > most:
        raise RefusedError(
            f"--steps {steps}: --scheduler {name} does at most {most}; use 4 to 8 of them, or "
            "another scheduler"
        )


def check_scheduler(name: str) -> str:
    """The key of `SCHEDULERS` that `name` means, in any case; cheap, so done before any loading.

    Raises:
        RefusedError: no such name; the message lists them.
    """
    key = name.strip().lower()
    if key not in SCHEDULERS:
        close = difflib.get_close_matches(key, SCHEDULERS, n=1)
        hint = f"did you mean {close[0]!r}? Known" if close else "known"
        raise RefusedError(f"no scheduler named {name!r}; {hint}: {', '.join(SCHEDULERS)}")
    return key


def make_scheduler(name: str, config: Any) -> Any:
    """A scheduler by short name with a model's own noise schedule.

    Args:
        name: a key of `SCHEDULERS`, in any case.
        config: the configuration of the scheduler it replaces; betas and prediction type are kept.

    Raises:
        RefusedError: no such name, or the model is no diffusion model of this kind.
    """
    key = check_scheduler(name)
    import diffusers

    class_name, changes = SCHEDULERS[key]
    base = dict(config)
    if base.get("_class_name", "").startswith("FlowMatch"):
        raise RefusedError(
            f"this model's {base['_class_name']} cannot be replaced by {key!r}: flow-matching "
            "models keep their own scheduler; leave --scheduler out"
        )
    return getattr(diffusers, class_name).from_config(base, **changes)


def try_scheduler(class_name: str, config: dict[str, Any], where: str) -> None:
    """Build a model's own scheduler and do one step on a tensor of one value.

    Most classes look at a value only when they need it, so building alone finds little.

    Args:
        class_name: as model_index.json names it.
        config: its scheduler_config.json.
        where: that file, for the message.

    Raises:
        CheckpointError: diffusers has no such class, or a value makes no sense to it.
    """
    import diffusers
    import torch

    cls = getattr(diffusers, class_name, None)
    if not isinstance(cls, type):
        raise CheckpointError(
            f"the scheduler is a {class_name}, which diffusers {diffusers.__version__} does not "
            "have; a newer diffusers may"
        )
    try:
        scheduler: Any = cls.from_config(config)  # type: ignore[attr-defined]
        # others may need arguments of their pipeline for a step
        if class_name not in {known for known, _ in SCHEDULERS.values()}:
            return
        # samplers with noise draw from the global generator, which is the caller's
        with torch.random.fork_rng(devices=[]):
            scheduler.set_timesteps(2)
            sample = scheduler.scale_model_input(torch.ones(1, 1, 1, 1), scheduler.timesteps[0])
            stepped = scheduler.step(sample / 2, scheduler.timesteps[0], sample).prev_sample
    except Exception as error:
        # any value of a file may be wrong, and the hosts divide by, index with and compare them
        text = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{where} has a value that {class_name} cannot work with ({text}); fetch the file again"
        ) from error
    if not math.isfinite(stepped.sum().item()):
        raise CheckpointError(
            f"{where} has a noise schedule that gives no finite numbers; fetch the file again"
        )
