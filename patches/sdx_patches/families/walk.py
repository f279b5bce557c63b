"""Walks a pipeline or model, patches what the tables name, and describes every attention layer.

It knows where attention modules are found; what is done to one is in `attention` and
`text_encoders`, and what an owner is in `session`.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sdx_patches import compat, compiled, dispatcher, dispatcher_sites, text_encoders, vae
from sdx_patches.attention import (
    SdxAttnProcessor,
    adopt,
    install,
    stand_in,
    stock_of,
    uninstall,
)
from sdx_patches.families.own_code import own_code
from sdx_patches.families.tables import (
    LEFT_MODULES,
    LEFT_PROCESSORS,
    REPLACED,
    UNKNOWN_PROCESSOR,
    Replacement,
)
from sdx_patches.report import NOT_RUN, UNCHANGED, Layer
from sdx_patches.session import (
    LOCK,
    PatchSession,
    Site,
    call_all,
    components,
    site_of,
    uncompiled,
)

__all__ = ["apply", "clear", "describe"]

_EAGER = (
    "eager attention was asked for, perhaps for its maps; set_attn_implementation('sdpa') first"
)
_NOT_ENABLED = "not enabled"
_NOT_REACHED = (
    "not enabled; sdx_accel is diffusers' default backend, by set_attention_backend() or "
    "DIFFUSERS_ATTN_BACKEND, but this processor asks for none: enable_xattn() reaches it"
)
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
        replacement, ours = _replacement(attention), attention.processor
        if replacement is not None:
            install(attention, session, replacement.processor)
        elif isinstance(ours, SdxAttnProcessor):
            install(attention, session, None)
            if own_code(attention, type(stock_of(ours))):
                uninstall(attention)
    _watch(component, attentions, session)
    for module in found:
        if dispatcher.serves(module):
            dispatcher_sites.install(module, session)
    vae.install(component, session)
    encoders = [m for m in found if text_encoders.can_switch(m)]
    if encoders and text_encoders.available():
        text_encoders.switch(component, encoders, session)
    for entry in _entries(component):
        if any(site_of(m) is not None and _has_layer(m) for m in entry.modules()):
            compiled.watch(entry, session)
    for module in found:
        if site_of(module) is not None and _has_layer(module):
            _show(module)


def describe(root: Any) -> Iterator[Layer]:
    """One `Layer` for each attention module of `root`, in the order of its modules."""
    for component_name, component in components(root).items():
        hidden = compiled.hidden(component)
        for name, module in component.named_modules():
            layer = _describe(".".join(part for part in (component_name, name) if part), module)
            if layer is not None:
                yield compiled.unrecorded(layer) if module in hidden else layer


def clear(root: Any) -> None:
    """Take processors of ours off the layers of `root` that nobody has patched.

    They come there when somebody puts back what he kept while ours was on: `attn_processors` of a
    model, or a pipeline with perturbed attention in whose call ours was switched off. A shallow
    copy of a model shares its parts, and its hooks, but has attributes of its own.
    """
    with LOCK:
        call_all(partial(_clear, component) for component in components(root).values())


def _clear(component: nn.Module) -> None:
    for module in component.modules():
        if site_of(module) is None:
            if isinstance(getattr(module, "processor", None), SdxAttnProcessor):
                uninstall(module)
            dispatcher_sites.clear(module)
            _forget_default(module)
            _forget_fused(module)


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
        ours = attention.processor
        if isinstance(ours, SdxAttnProcessor):
            if here is not None and (ours.stock is None or ours.stock is not here.stock):
                adopt(ours, here)
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


@dataclass
class SetDefaultProcessor:
    """Stands before a model's own `set_default_attn_processor`, which refuses foreign classes.

    Attributes:
        model: the model.
        own: what somebody else had put on the instance, as a list of one; empty = nothing.
    """

    model: nn.Module
    own: list[Any]

    def __call__(self) -> None:
        site = site_of(self.model)
        watched = [] if site is None else site.watched
        for attention in watched:
            uninstall(attention)
        try:
            if self.own:
                self.own[0]()
            else:
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
        _forget_default(self.entry)
        _forget_fused(self.entry)


def _forget_default(model: nn.Module) -> None:
    there = vars(model).get(compat.SET_DEFAULT)
    if isinstance(there, SetDefaultProcessor):
        del vars(model)[compat.SET_DEFAULT]
        for own in there.own:
            vars(model)[compat.SET_DEFAULT] = own


def _forget_fused(model: nn.Module) -> None:
    """Have unfusing projections later bring the host's processors back, not ours."""
    kept = vars(model).get(compat.BEFORE_FUSING) or {}
    for name, ours in kept.items():
        if isinstance(ours, SdxAttnProcessor):
            site = site_of(model.get_submodule(name.removesuffix(".processor")))
            kept[name] = stock_of(ours) or (None if site is None else site.stock) or ours


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
                own = [vars(entry)[name] for name in (compat.SET_DEFAULT,) if name in vars(entry)]
                setattr(entry, compat.SET_DEFAULT, SetDefaultProcessor(entry, own))


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
    """Undo entry of one attention module; picklable."""

    module: nn.Module

    def __call__(self) -> None:
        if isinstance(vars(self.module).get("extra_repr"), Shown):
            del vars(self.module)["extra_repr"]


def _show(module: nn.Module) -> None:
    site = site_of(module)
    if site is not None and "extra_repr" not in vars(module):
        site.undo.append(Leave(module))
        vars(module)["extra_repr"] = Shown(module)


def _replacement(attention: nn.Module) -> Replacement | None:
    found = REPLACED.get(compat.qualified_name(type(attention.processor)))
    if found is None or own_code(attention, type(attention.processor)) or found.lacking:
        return None
    return found


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
    own = "" if replacement is None else own_code(attention, processor)
    if replacement is None:
        reason = LEFT_PROCESSORS.get(name, UNKNOWN_PROCESSOR)
    elif own:
        reason = own
    elif replacement.lacking:
        reason = f"this diffusers lacks {replacement.lacking}, which ours is made from"
    elif site is None:
        reason = _NOT_REACHED if dispatcher.is_default() else _NOT_ENABLED
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
    left, site = dispatcher_sites.left_alone(attention), site_of(attention)
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
