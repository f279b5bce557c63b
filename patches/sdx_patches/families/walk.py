"""Walks a pipeline or model, patches what the tables name, and describes every attention layer.

It knows where attention modules are found; what is done to one is in `attention` and
`text_encoders`, and what an owner is in `session`.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sdx_patches import compat, dispatcher, text_encoders
from sdx_patches.attention import SdxAttnProcessor, install, stand_in, uninstall
from sdx_patches.families.tables import (
    LEFT_MODULES,
    LEFT_PROCESSORS,
    REPLACED,
    UNKNOWN_PROCESSOR,
    Replacement,
)
from sdx_patches.report import NOT_RUN, UNCHANGED, Layer
from sdx_patches.session import LOCK, PatchSession, Site, components, site_of, uncompiled

__all__ = ["apply", "describe"]

_EAGER = (
    "eager attention was asked for, perhaps for its maps; set_attn_implementation('sdpa') first"
)
_NOT_ENABLED = "not enabled"
_NO_REGISTRY = "this version of transformers has no registry for attention functions and masks"


def apply(root: Any, session: PatchSession) -> None:
    """Patch every attention layer of `root` that the tables name.

    Raises:
        TypeError: `root` is neither a pipeline nor a module.
    """
    for name, component in components(root).items():
        try:
            _apply(component, session)
        except Exception as error:
            where = name or type(component).__name__
            error.add_note(f"{where} could not be patched; everything is as it was before")
            raise


def _apply(component: nn.Module, session: PatchSession) -> None:
    found = list(component.modules())
    attentions = [m for m in found if compat.is_a(m, compat.ATTENTION)]
    for attention in attentions:
        replacement = _replacement(attention)
        if replacement is not None:
            install(attention, session, replacement.processor)
        elif isinstance(attention.processor, SdxAttnProcessor):
            install(attention, session, None)
    _watch(component, attentions, session)
    for module in found:
        if dispatcher.serves(module):
            dispatcher.install(module, session)
    encoders = [m for m in found if text_encoders.can_switch(m)]
    if encoders and text_encoders.available():
        text_encoders.switch(component, encoders, session)
    for module in found:
        if site_of(module) is not None and _has_layer(module):
            _show(module)


def describe(root: Any) -> Iterator[Layer]:
    """One `Layer` for each attention module of `root`, in the order of its modules."""
    for component_name, component in components(root).items():
        for name, module in component.named_modules():
            layer = _describe(".".join(part for part in (component_name, name) if part), module)
            if layer is not None:
                yield layer


def swap_back(entry: nn.Module, args: Any = ()) -> None:
    """Forward-pre-hook: put our processors back where the host has replaced them.

    Loading or unloading an adapter, fusing projections and `set_attn_processor()` all install
    the host's plain processors. What a user asked for by name (attention slicing, xFormers) stays,
    and one warning says so; processors that are not plain stay as well.
    """
    # a graph has no use for it: what it was traced with is what its guards ask for
    if torch.compiler.is_compiling():
        return
    with LOCK:
        _swap_back(site_of(entry))


def _swap_back(site: Site | None) -> None:
    for attention in () if site is None else site.watched:
        here = site_of(attention)
        if isinstance(attention.processor, SdxAttnProcessor):
            adopt(attention.processor, here)
            continue
        replacement = _replacement(attention)
        if replacement is None or here is None:
            continue
        if not replacement.option:
            stand_in(attention, here, replacement.processor)
        elif site is not None and not site.warned:
            site.warned = True
            warnings.warn(
                f"{replacement.option} was called after enable_xattn() and replaces its attention; "
                f"{replacement.back} or another enable_xattn() brings it back",
                UserWarning,
                stacklevel=3,
            )


def adopt(processor: Any, site: Site | None) -> None:
    """Give a processor of ours that the host made from its class the stock one to go back to.

    Without us the host would have made a new one of the stock class there: so do we. What stands
    there now may be of another class (fusing keeps the processors of before). One that cannot be
    made without arguments stays the one that was there.
    """
    if not isinstance(processor, SdxAttnProcessor) or processor.stock is not None or site is None:
        return
    try:
        processor.stock = site.kinds.get(type(processor), type(site.stock))()
    except TypeError:
        processor.stock = site.stock


@dataclass
class SetDefaultProcessor:
    """Stands before a model's own `set_default_attn_processor`, which refuses foreign classes."""

    model: nn.Module

    def __call__(self) -> None:
        site = site_of(self.model)
        watched = [] if site is None else site.watched
        for attention in watched:
            adopt(attention.processor, site_of(attention))
            uninstall(attention)
        try:
            getattr(type(self.model), compat.SET_DEFAULT)(self.model)
        finally:
            swap_back(self.model)


@dataclass
class Unwatch:
    """Undo entry of an entry module; picklable."""

    entry: nn.Module
    handle: RemovableHandle

    def __call__(self) -> None:
        self.handle.remove()
        vars(self.entry).pop(compat.SET_DEFAULT, None)
        # unfusing later would otherwise bring our processors back
        kept = vars(self.entry).get(compat.BEFORE_FUSING) or {}
        for name, processor in kept.items():
            if isinstance(processor, SdxAttnProcessor):
                adopt(processor, site_of(self.entry.get_submodule(name.removesuffix(".processor"))))
                kept[name] = processor.stock


def _watch(model: nn.Module, attentions: list[nn.Module], session: PatchSession) -> None:
    for entry in _entries(model):
        inside = set(entry.modules())
        watched = [m for m in attentions if m in inside and m is not entry]
        if not watched:
            continue
        site = session.claim(entry)
        site.watched, site.warned = watched, False
        if not any(isinstance(undo, Unwatch) for undo in site.undo):
            site.undo.append(Unwatch(entry, entry.register_forward_pre_hook(swap_back)))
            if hasattr(type(entry), compat.SET_DEFAULT):
                setattr(entry, compat.SET_DEFAULT, SetDefaultProcessor(entry))


def _entries(model: nn.Module) -> list[nn.Module]:
    """The modules whose call starts a forward: the model, and an autoencoder's two halves.

    Pipelines call `vae.encode` and `vae.decode`, which run no hook of the autoencoder itself.
    """
    halves = [getattr(model, name, None) for name in ("encoder", "decoder")]
    if not hasattr(model, "decode"):
        halves = []
    return [model, *(uncompiled(half) for half in halves if isinstance(half, nn.Module))]


@dataclass(eq=False, repr=False)
class Shown:
    """Stands before a module's own `extra_repr`, so that `print(model)` says what serves it.

    Processors are no modules: printed models show nothing of them, ours or the host's.
    """

    module: nn.Module

    def __call__(self) -> str:
        own = type(self.module).extra_repr(self.module)
        layer = _describe("", self.module)
        if layer is None:
            return own
        served = f"sdx_accel={layer.requested!r}, running={layer.running!r}"
        return f"{own}, {served}" if own else served


@dataclass(eq=False, repr=False)
class Leave:
    """Undo entry of one attention module, called before that of its processor; picklable."""

    module: nn.Module

    def __call__(self) -> None:
        vars(self.module).pop("extra_repr", None)
        adopt(getattr(self.module, "processor", None), site_of(self.module))


def _show(module: nn.Module) -> None:
    site = site_of(module)
    if site is not None and "extra_repr" not in vars(module):
        site.undo.append(Leave(module))
        vars(module)["extra_repr"] = Shown(module)


def _replacement(attention: nn.Module) -> Replacement | None:
    return REPLACED.get(compat.qualified_name(type(attention.processor)))


def _has_layer(module: nn.Module) -> bool:
    return (
        compat.is_a(module, compat.ATTENTION)
        or dispatcher.serves(module)
        or text_encoders.is_encoder_attention(module)
    )


def _describe(path: str, module: nn.Module) -> Layer | None:
    if dispatcher.serves(module):
        return _describe_dispatched(path, module)
    if compat.is_a(module, compat.ATTENTION):
        return _describe_attention(path, module)
    if text_encoders.is_encoder_attention(module):
        return _describe_encoder(path, module)
    for left, reason in LEFT_MODULES.items():
        if compat.is_a(module, left):
            return Layer(path, UNCHANGED, type(module).__name__, reason)
    return None


def _describe_attention(path: str, attention: nn.Module) -> Layer:
    processor = type(attention.processor)
    site = site_of(attention)
    if isinstance(attention.processor, SdxAttnProcessor) and site is not None:
        return _patched(path, site)
    name = compat.qualified_name(processor)
    replacement = REPLACED.get(name)
    if replacement is None:
        reason = LEFT_PROCESSORS.get(name, UNKNOWN_PROCESSOR)
    elif site is None:
        reason = _NOT_ENABLED
    elif replacement.option:
        reason = (
            f"{replacement.option} was called later; {replacement.back} or another "
            "enable_xattn() brings our attention back"
        )
    else:
        reason = (
            f"{processor.__name__} was installed since; ours returns at the next forward, or with "
            "another enable_xattn() where the model is compiled"
        )
        return Layer(path, site.settings.requested, NOT_RUN, reason)
    return Layer(path, UNCHANGED, processor.__name__, reason)


def _describe_dispatched(path: str, attention: nn.Module) -> Layer:
    left, site = dispatcher.left_alone(attention), site_of(attention)
    if left is None and site is not None:
        return _patched(path, site)
    return Layer(path, UNCHANGED, *(left or ("", "")))


def _describe_encoder(path: str, attention: nn.Module) -> Layer:
    implementation = text_encoders.implementation_of(attention)
    site = site_of(attention)
    if implementation == text_encoders.NAME and site is not None:
        return _patched(path, site)
    if implementation == "eager":
        reason = _EAGER
    elif implementation == "sdpa":
        reason = _NOT_ENABLED if text_encoders.available() else _NO_REGISTRY
    else:
        reason = "an implementation chosen by the user is left alone"
    return Layer(path, UNCHANGED, str(implementation), reason)


def _patched(path: str, site: Site) -> Layer:
    reason = "; ".join(f"{name}: {', '.join(why)}" for name, why in site.reasons.items() if why)
    return Layer(path, site.settings.requested, site.running or NOT_RUN, reason)
