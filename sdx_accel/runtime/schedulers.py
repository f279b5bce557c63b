"""Short names of samplers and the diffusers scheduler behind each. Knows nothing of models."""

from __future__ import annotations

import difflib
from typing import Any

from sdx_accel.errors import RefusedError

__all__ = ["SCHEDULERS", "check_scheduler", "make_scheduler"]

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
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "unipc": ("UniPCMultistepScheduler", {}),
}


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
