"""sdx_accel: fast attention and a held VRAM budget for diffusers pipelines.

Importing it attaches `enable_xattn`, `disable_xattn` and `xattn_report` to diffusers' pipelines and
models once diffusers is imported, and does nothing else: torch is not loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sdx_accel._attach import register as _register

if TYPE_CHECKING:
    from sdx_accel.api import Report as Report
    from sdx_accel.api import plan as plan
    from sdx_accel.budget.plan import Plan as Plan

__version__ = "0.1.0.dev0"

_LAZY = {
    "BudgetError": "sdx_accel.errors",
    "BudgetExceeded": "sdx_accel.errors",
    "CheckpointError": "sdx_accel.errors",
    "KernelError": "sdx_kernels.errors",
    "PictureError": "sdx_accel.errors",
    "PlacementError": "sdx_accel.errors",
    "Plan": "sdx_accel.budget.plan",
    "RefusedError": "sdx_accel.errors",
    "Report": "sdx_accel.api",
    "SdxError": "sdx_accel.errors",
    "SizeError": "sdx_accel.errors",
    "WorkError": "sdx_accel.errors",
    "plan": "sdx_accel.api",
}

__all__ = [
    "BudgetError",
    "BudgetExceeded",
    "CheckpointError",
    "KernelError",
    "PictureError",
    "PlacementError",
    "Plan",
    "RefusedError",
    "Report",
    "SdxError",
    "SizeError",
    "WorkError",
    "__version__",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name == "demo":  # a package, so that `sdx_accel.demo.load()` needs no second import
        return import_module("sdx_accel.demo")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_register()
