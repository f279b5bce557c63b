"""Which layers run in code that torch.compile made, where their calls leave no record.

It knows torch's marks of compiled modules; it must not know what a layer is patched with.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sdx_patches.report import NOT_RECORDED, Layer
from sdx_patches.session import ATTRIBUTE, PatchSession, Site, site_of

__all__ = ["hidden", "unrecorded", "watch"]

#: Why nothing is recorded. Writing it from inside a graph is possible and takes 60 µs a layer.
_REASON = "calls inside compiled code are not recorded"


def watch(entry: nn.Module, session: PatchSession) -> None:
    """Have each call of `entry`, a model or its part that is called by itself, say how it runs."""
    site = session.claim(entry)
    if not any(isinstance(undo, Unwatch) for undo in site.undo):
        undo = Unwatch(entry.register_forward_pre_hook(_note))
        session.on_failure(undo)
        site.undo.append(undo)


def hidden(component: nn.Module) -> set[nn.Module]:
    """The modules of `component` that run in compiled code, or whose last call did."""
    return {part for module in _compiled(component) for part in module.modules()}


def unrecorded(layer: Layer) -> Layer:
    """What is known of a patched layer inside compiled code."""
    return replace(layer, running=NOT_RECORDED, reason=_REASON) if layer.patched else layer


@dataclass
class Unwatch:
    """Undo entry of an entry module; picklable."""

    handle: RemovableHandle

    def __call__(self) -> None:
        self.handle.remove()


def _note(entry: nn.Module, args: Any) -> None:
    """Forward-pre-hook, traced with the model: one attribute is written for a whole call."""
    if torch.compiler.is_exporting():
        return
    # getattr, because vars() cannot be traced
    site: Site | None = getattr(entry, ATTRIBUTE, None)
    if site is not None:
        site.running = NOT_RECORDED if torch.compiler.is_compiling() else None


def _compiled(component: nn.Module) -> Iterator[nn.Module]:
    for module in component.modules():
        site = site_of(module)
        if (
            (site is not None and site.running == NOT_RECORDED)
            # module.compile(), torch.compile(module), module.forward = torch.compile(…)
            or vars(module).get("_compiled_call_impl") is not None
            or "_orig_mod" in module._modules
            or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        ):
            yield module
