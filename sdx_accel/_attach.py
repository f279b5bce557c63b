"""Attaches the three methods to diffusers, and names our backend, once diffusers is imported."""

import os
import sys
import warnings
from types import ModuleType
from typing import Any

import wrapt

__all__ = ["register"]

METHODS = ("disable_xattn", "enable_xattn", "xattn_report")
_HOSTS = {
    "diffusers.pipelines.pipeline_utils": "DiffusionPipeline",
    "diffusers.models.modeling_utils": "ModelMixin",
}
_DISPATCHER = "diffusers.models.attention_dispatch"
_CONSTANTS = "diffusers.utils.constants"
_DEFAULT = "DIFFUSERS_ATTN_BACKEND"


def _method(kind: str, name: str) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from sdx_accel import api

        return getattr(api, f"{kind}_{name}")(self, *args, **kwargs)

    return forward


def _enable(kind: str) -> Any:
    # spelled out, so that help() and editors show the arguments
    def enable_xattn(
        self: Any,
        attention_op: Any = None,
        *,
        vram: float | str | None = None,
        ram: float | str | None = None,
        device: Any = None,
        quality: str = "exact",
        fused: bool = True,
        learn: bool = True,
    ) -> None:
        """Swap in sdx_accel's attention; with `vram`, also plan and hold a memory budget.

        Args:
            attention_op: None picks per shape; "torch" keeps torch's kernels; or an operator.
            vram: GiB as the driver counts them, "auto", "80%", or -N for "all but N GiB".
            ram: host memory that the weights may take, in the same forms; None is no limit.
            device: where to compute; the current CUDA device by default, else the CPU.
            quality: "exact" or "near".
            fused: have an AutoencoderKL decode and encode in bands of rows, its norms fused with
                what comes before and after them: faster, and 0.4 of the memory.
            learn: with `vram`, plan with what earlier runs took beyond their plans, and keep
                what this one takes.
        """
        from sdx_accel import api

        getattr(api, f"{kind}_enable_xattn")(
            self,
            attention_op,
            vram=vram,
            ram=ram,
            device=device,
            quality=quality,
            fused=fused,
            learn=learn,
        )

    return enable_xattn


def _attach(host: type, kind: str) -> None:
    taken = [name for name in METHODS if name in vars(host)]
    if taken:
        warnings.warn(
            f"{host.__name__} already has {', '.join(taken)}: sdx_accel attaches nothing to it",
            stacklevel=2,
        )
        return
    for name in METHODS:
        method = _enable(kind) if name == "enable_xattn" else _method(kind, name)
        method.__name__ = name
        method.__qualname__ = f"{host.__name__}.{name}"
        if name == "disable_xattn":
            method.__doc__ = "Put back exactly what `enable_xattn` replaced."
        elif name == "xattn_report":
            method.__doc__ = "What runs per layer and why; per phase, predicted and measured peak."
        setattr(host, name, method)


def _name_backend(loaded: ModuleType) -> None:
    """Make `set_attention_backend("sdx_accel")` work before any `enable_xattn()`."""
    from sdx_patches import dispatcher

    dispatcher.available()


def _stand_in(constants: ModuleType) -> None:
    """Have diffusers begin with its own default where DIFFUSERS_ATTN_BACKEND names our backend.

    It looks that name up in the middle of importing its dispatcher, before anybody can add one.
    """
    from sdx_patches.dispatcher import NAME

    if getattr(constants, _DEFAULT, None) == NAME:
        setattr(constants, _DEFAULT, "native")
        wrapt.register_post_import_hook(_make_default, _DISPATCHER)


def _make_default(loaded: ModuleType) -> None:
    """Make our backend the process's default, as DIFFUSERS_ATTN_BACKEND asked."""
    from sdx_patches import dispatcher

    if dispatcher.available():
        loaded._AttentionBackendRegistry.set_active_backend(dispatcher.register())
        setattr(sys.modules[_CONSTANTS], _DEFAULT, dispatcher.NAME)
    else:
        warnings.warn(
            f"{_DEFAULT}={dispatcher.NAME}: this diffusers' attention dispatcher takes no other "
            "backends; its own default is used",
            stacklevel=2,
        )


def register() -> None:
    """Hook into diffusers' two base classes; fires at once for what is already imported.

    Its attention dispatcher, once loaded, is told of our backend; nothing is chosen by that.
    """
    if _DISPATCHER in sys.modules:
        _name_backend(sys.modules[_DISPATCHER])
    else:
        if os.environ.get(_DEFAULT):
            wrapt.register_post_import_hook(_stand_in, _CONSTANTS)
        wrapt.register_post_import_hook(_name_backend, _DISPATCHER)
    for module, host in _HOSTS.items():
        kind = "pipeline" if host == "DiffusionPipeline" else "model"

        def on_import(loaded: ModuleType, host: str = host, kind: str = kind) -> None:
            _attach(getattr(loaded, host), kind)

        if module in sys.modules and hasattr(sys.modules[module], host):
            on_import(sys.modules[module])
        else:
            wrapt.register_post_import_hook(on_import, module)
