"""Every exception the plug-in raises on purpose; knows nothing but Python.

SdxError
├── RefusedError (ValueError)        refused before any work: exit code 2
│   ├── BudgetError                  the plan does not fit; carries the plan
│   ├── CheckpointError              a model, LoRA or configuration that cannot be read
│   ├── SizeError                    a picture size that the model cannot do
│   ├── PictureError                 an input or output picture that cannot be used
│   └── PlacementError               a device move or hook that conflicts with a held plan
└── WorkError (RuntimeError)         the work itself failed: exit code 1
    └── BudgetExceeded               memory was refused to the end; carries the plans
"""

from typing import Any

__all__ = [
    "BudgetError",
    "BudgetExceeded",
    "CheckpointError",
    "PictureError",
    "PlacementError",
    "RefusedError",
    "SdxError",
    "SizeError",
    "WorkError",
]


class SdxError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class RefusedError(SdxError, ValueError):
    """Nothing was started and nothing was lost; the message says what to change."""

    exit_code = 2


class BudgetError(RefusedError):
    """No placement keeps the job within the budget.

    Args:
        message: phase, shortfall in MiB and the nearest change that fits.
        plan: the infeasible `sdx_accel.budget.plan.Plan`, or None.
    """

    def __init__(self, message: str, plan: Any = None) -> None:
        super().__init__(message)
        self.plan = plan


class CheckpointError(RefusedError):
    """A model folder, checkpoint, LoRA or configuration is missing, broken or of another kind."""


class SizeError(RefusedError):
    """Width or height is one that the model cannot do."""


class PictureError(RefusedError):
    """An input picture cannot be read, or an output path cannot be written."""


class PlacementError(RefusedError):
    """A device move, hook or device map conflicts with a plan that is being held."""


class WorkError(SdxError, RuntimeError):
    """Work was started and failed."""


class BudgetExceeded(WorkError):
    """The budget does not hold what the work needs, and no way is left to make more room.

    Args:
        message: what was refused, and what to change.
        plans: the `Plan` that was held and the last one that was made, which may be the same.
    """

    def __init__(self, message: str, plans: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.plans = plans
