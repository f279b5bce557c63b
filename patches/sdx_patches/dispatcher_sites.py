"""Our backend of diffusers' attention dispatcher on one model's processors, and the way back.

It knows processors and sessions; what the backend does when it is called is in `dispatcher`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sdx_patches import compat
from sdx_patches.dispatcher import (
    TAKEN,
    Taken,
    active,
    available,
    is_ours,
    name_of,
    own_backend,
    register,
    serves,
)
from sdx_patches.session import LOCK, PatchSession, Site, site_of

__all__ = ["clear", "install", "left_alone"]

#: What we change on a processor.
_NAMES = (compat.BACKEND, TAKEN)


def install(attn: nn.Module, session: PatchSession) -> None:
    """Claim `attn` for the session and make our backend its processor's.

    A backend that somebody chose for this processor stays, and so does a processor that works on
    a part of the sequence.

    Args:
        attn: a module that the dispatcher `serves`.
        session: the running session; its failure puts the previous backend back.
    """
    processor: Any = attn.processor
    if not available() or not _free(processor):
        return
    site = session.claim(attn)
    undo = _undo_of(site)
    if undo is None:
        undo = RestoreBackend(attn, attn.register_forward_pre_hook(_enter), processor)
        site.undo.append(undo)
    kept = {name: own for name, own in vars(processor).items() if name in _NAMES}
    session.on_failure(partial(_put_back, processor, kept))
    undo.take_over(processor, register(session.settings.attention_op))


def left_alone(attn: nn.Module) -> tuple[str, str] | None:
    """Why a module that the dispatcher serves does not go through our op, or None if it does.

    Returns:
        The backend that it uses instead, by name, and the reason.
    """
    processor: Any = attn.processor
    backend = getattr(processor, compat.BACKEND)
    running = name_of(active()) if backend is None else name_of(backend)
    site = site_of(attn)
    undo = None if site is None else _undo_of(site)
    if not available():
        return running, "this version of diffusers has no attention dispatcher that we know"
    if getattr(processor, compat.PARALLEL, None) is not None:
        return running, "works on a part of the sequence (context parallelism)"
    if is_ours(backend):
        if undo is not None:
            return None
        if (own := own_backend(attn)) is not None:
            return name_of(own), (
                "not enabled; its processor is also that of a model that is, and keeps its own "
                "backend here, except in compiled code"
            )
        if TAKEN in vars(processor):
            running, backend = name_of(active()), None
    if is_ours(backend):
        return running, f"set_attention_backend({running!r}) chose it; enable_xattn() records more"
    if backend is not None:
        return running, (
            f"the backend {running!r} was chosen for this model; reset_attention_backend() and "
            "another enable_xattn() bring ours"
        )
    if undo is None:
        if is_ours(running):
            return running, (
                "an earlier set_attention_backend() or DIFFUSERS_ATTN_BACKEND made it the "
                "process's default"
            )
        return running, "not enabled"
    if undo.was_reset(processor):
        return running, (
            "reset_attention_backend() was called later; another enable_xattn() brings ours back"
        )
    return running, f"{type(processor).__name__} was installed since; ours returns when it runs"


def clear(module: nn.Module) -> None:
    """Take our backend off a module that nobody has patched, and that no patched one shares.

    Such is a copy of a module that shared its processor with a patched one.
    """
    if serves(module) and site_of(module) is None:
        _give_back(module.processor, module)


@dataclass
class RestoreBackend:
    """Undo entry of one module; a class, so that a patched model can be pickled and copied.

    Attributes:
        attn: the module.
        hook: its hook that gives our backend to a processor which the host has installed since.
        processor: the processor that got our backend last.
    """

    attn: nn.Module
    hook: RemovableHandle
    processor: Any

    def __call__(self) -> None:
        self.hook.remove()
        _give_back(self.processor, self.attn)

    def take_over(self, processor: Any, backend: Any) -> None:
        """Make `backend` the processor's, remembering what was there before."""
        if processor is not self.processor:
            _give_back(self.processor, self.attn)
            self.processor = processor
        own = vars(processor)
        taken: Taken | None = own.get(TAKEN)
        if taken is None or not is_ours(own.get(compat.BACKEND)):
            before = {compat.BACKEND: own[compat.BACKEND]} if compat.BACKEND in own else {}
            taken = own[TAKEN] = Taken(before, () if taken is None else taken.users)
        taken.users.add(self.attn)
        setattr(processor, compat.BACKEND, backend)

    def was_reset(self, processor: Any) -> bool:
        """Whether ours was taken away from `processor` by name."""
        return processor is self.processor and vars(processor).get(compat.BACKEND, self) is None

    def is_served(self, processor: Any, backend: Any) -> bool:
        """Whether `processor` has got this very `backend` from here."""
        taken: Taken | None = vars(processor).get(TAKEN)
        named = vars(processor).get(compat.BACKEND) is backend
        return taken is not None and named and self.attn in taken.users


def _give_back(processor: Any, attn: nn.Module) -> None:
    """Take `attn` off those that `processor` serves with ours; the last one takes ours away."""
    own = vars(processor)
    taken: Taken | None = own.get(TAKEN)
    if taken is None:
        return
    taken.users.discard(attn)
    if taken.users:
        return
    del own[TAKEN]
    # another backend that was chosen since stays
    if is_ours(own.get(compat.BACKEND)):
        del own[compat.BACKEND]
        own.update(taken.before)


def _put_back(processor: Any, kept: dict[str, Any]) -> None:
    own = vars(processor)
    for name in _NAMES:
        own.pop(name, None)
    own.update(kept)


def _enter(attn: nn.Module, args: Any) -> None:
    """Forward-pre-hook: keep to the settings that hold, on whatever processor there is by now."""
    if torch.compiler.is_compiling():
        return
    site = site_of(attn)
    undo = None if site is None else _undo_of(site)
    processor: Any = attn.processor
    if site is None or undo is None or not serves(attn) or not _free(processor):
        return
    wanted = register(site.settings.attention_op)
    if undo.is_served(processor, wanted) or undo.was_reset(processor):
        return
    with LOCK:
        # another thread may have disabled it before this one got here
        if site_of(attn) is site:
            undo.take_over(processor, wanted)


def _undo_of(site: Site) -> RestoreBackend | None:
    return next((undo for undo in site.undo if isinstance(undo, RestoreBackend)), None)


def _free(processor: Any) -> bool:
    """Whether the processor has no backend or ours, and the whole sequence."""
    backend = getattr(processor, compat.BACKEND)
    whole = getattr(processor, compat.PARALLEL, None) is None
    return whole and (backend is None or is_ours(backend))
