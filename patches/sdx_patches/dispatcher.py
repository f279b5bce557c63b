"""Our attention op as a backend of diffusers' attention dispatcher, set on one model only.

It knows the dispatcher's registry and the call that it makes; it must not know which model or
processor calls. A backend stays registered once added: it has no effect on a model that does not
name it, and the process-wide active backend is never touched.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sdx_kernels.bias import LowerTriangularMask
from sdx_kernels.ops import attend, memory_efficient_attention_forward_requires_grad
from sdx_patches import compat
from sdx_patches.session import Op, PatchSession, Settings, Site, record, site_of

__all__ = ["NAME", "available", "backend_function", "install", "left_alone", "register", "serves"]

#: Our name in diffusers' list of backends. A layer that was asked for one certain operator gets
#: a backend of its own, `sdx_accel_<operator>`: the function sees no module, and a traced graph
#: must still keep to the operator.
NAME: Final = "sdx_accel"

_AUTO: Final = "auto"

#: The module whose forward is running, and what was there before it; the dispatcher tells its
#: backends nothing of the caller. One per thread.
_serving: ContextVar[Any] = ContextVar("sdx_serving", default=None)


def available() -> bool:
    """Whether the installed diffusers has the dispatcher that a backend needs."""
    try:
        register()
    # this runs while diffusers is being imported, which a newer enumeration or registry of other
    # arguments must not break
    except (ImportError, AttributeError, TypeError, ValueError):
        return False
    return True


def register(op: Op = None) -> Any:
    """Make our backend known to diffusers; doing it again changes nothing.

    diffusers' list of names is an enumeration, closed to others: the member is added to its three
    tables, so that `AttentionBackendName("sdx_accel")`, and with it `set_attention_backend`,
    `attention_backend`, find it.

    Args:
        op: None or "auto", "torch", or the name of an implementation or an xFormers operator.

    Returns:
        The member of `AttentionBackendName`.

    Raises:
        ImportError: this diffusers has no dispatcher.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    requested = Settings(op).requested
    value = NAME if requested == _AUTO else f"{NAME}_{requested}".lower()
    member: Any = AttentionBackendName._value2member_map_.get(value)
    if member is None:
        member = _new_member(AttentionBackendName, value)
        # a model that holds the member is unpickled where nobody has registered it yet
        member.__reduce_ex__ = partial(_reduce, None if requested == _AUTO else op)
    if member not in _AttentionBackendRegistry._backends:
        _AttentionBackendRegistry.register(member)(partial(backend_function, op))
    return member


def _new_member(names: Any, value: str) -> Any:
    member = str.__new__(names, value)
    member._name_, member._value_ = value.upper(), value
    member._sort_order_ = len(names._member_names_)
    member.__objclass__ = names
    # the class's own __setattr__ refuses nothing yet: the name is not a member's until it is listed
    setattr(names, member._name_, member)
    names._member_map_[member._name_] = member
    names._member_names_.append(member._name_)
    names._value2member_map_[value] = member
    return member


def _reduce(op: Op, protocol: int) -> tuple[Any, tuple[Op]]:
    return register, (op,)


def backend_function(
    op: Op,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention as diffusers' dispatcher calls it; registered with `op` filled in.

    Args:
        op: what the attention op takes as `op`.
        query: (batch, queries, heads, dim).
        key: (batch, keys, heads, dim); with `enable_gqa` fewer heads, each read by as many
            neighbouring query heads.
        value: (batch, keys, heads, value dim), heads as in `key`.
        attn_mask: bool (True = attend) or additive, broadcast to (batch, heads, queries, keys);
            or (batch, keys).
        dropout_p: dropout probability.
        is_causal: query i attends keys 0…i.
        scale: factor of the scores; None = 1/√dim.
        enable_gqa: whether query heads may share a key head.
        return_lse: also return the rows' log-sum-exp; such a call is not differentiable and does
            not appear in the report.
        _parallel_config: must be None: sequences split over several devices are not supported.

    Returns:
        (batch, queries, heads, value dim); with `return_lse` also (batch, heads, queries) in
        fp32, natural logarithm.

    Raises:
        ValueError: a split sequence; both `attn_mask` and `is_causal`; or a log-sum-exp asked for
            where gradients or dropout are.
    """
    if _parallel_config is not None:
        raise ValueError(f"the {NAME} attention backend does not support context parallelism")
    if attn_mask is not None and is_causal:
        raise ValueError("pass either attn_mask or is_causal=True, not both")
    bias: Any = attn_mask
    if is_causal:
        bias = LowerTriangularMask()
    elif attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        bias = attn_mask[:, None, None, :]
    shared = enable_gqa and key.shape[2] != query.shape[2]
    if shared:
        # groups of query heads over one key head each: views, nothing is repeated
        query = query.unflatten(2, (key.shape[2], -1))
        key, value = key.unsqueeze(3), value.unsqueeze(3)
    if return_lse:
        return _with_lse(op, query, key, value, bias, dropout_p, scale)
    out, choice = attend(query, key, value, bias, dropout_p, scale, op=op)
    # a graph records nothing, see `record`; so it need not read the variable either
    if not torch.compiler.is_compiling() and (frame := _serving.get()) is not None:
        record(frame[0], choice)
    return out.flatten(2, 3) if shared else out


def _with_lse(
    op: Op, query: Tensor, key: Tensor, value: Tensor, bias: Any, p: float, scale: float | None
) -> tuple[Tensor, Tensor]:
    if p != 0.0:
        raise ValueError("return_lse=True takes no dropout: pass dropout_p=0.0")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        raise ValueError("return_lse=True has no gradient: call it under torch.no_grad()")
    out, lse = memory_efficient_attention_forward_requires_grad(
        query, key, value, bias, p, scale, op=op
    )
    return (out.flatten(2, 3) if out.dim() == 5 else out), lse


def serves(module: nn.Module) -> bool:
    """Whether the module's processor takes its backend from diffusers' dispatcher."""
    processor = vars(module).get("processor") or module._modules.get("processor")
    return hasattr(processor, compat.BACKEND)


def install(attn: nn.Module, session: PatchSession) -> None:
    """Claim `attn` for the session and make our backend its processor's.

    A backend that somebody chose for this processor stays, and so does a processor that works on
    a part of the sequence.

    Args:
        attn: a module that the dispatcher `serves`.
        session: the running session; its failure puts the previous backend back.
    """
    processor: Any = attn.processor
    current = getattr(processor, compat.BACKEND)
    if not available() or not _free(processor):
        return
    site = session.claim(attn)
    undo = _undo_of(site)
    if undo is None:
        undo = RestoreBackend(
            attn,
            [
                attn.register_forward_pre_hook(_enter),
                attn.register_forward_hook(_leave, always_call=True),
            ],
            [],
        )
        site.undo.append(undo)
    elif _is_ours(current):
        session.on_failure(partial(setattr, processor, compat.BACKEND, current))
    undo.take_over(processor, register(session.settings.attention_op))


def left_alone(attn: nn.Module) -> tuple[str, str] | None:
    """Why a module that the dispatcher serves does not go through our op, or None if it does.

    Returns:
        The backend that it uses instead, by name, and the reason.
    """
    processor: Any = attn.processor
    backend = getattr(processor, compat.BACKEND)
    running = _value(backend) if backend is not None else _active()
    site = site_of(attn)
    undo = None if site is None else _undo_of(site)
    if not available():
        return running, "this version of diffusers has no attention dispatcher that we know"
    if getattr(processor, compat.PARALLEL, None) is not None:
        return running, "works on a part of the sequence (context parallelism)"
    if _is_ours(backend):
        if undo is not None:
            return None
        return running, f"set_attention_backend({running!r}) chose it; enable_xattn() records more"
    if backend is not None:
        return running, (
            f"the backend {running!r} was chosen for this model; reset_attention_backend() and "
            "another enable_xattn() bring ours"
        )
    if undo is None:
        if running.startswith(NAME):
            return running, "an earlier set_attention_backend() made it the process's default"
        return running, "not enabled"
    if undo.knows(processor):
        return running, (
            "reset_attention_backend() was called later; another enable_xattn() brings ours back"
        )
    return running, f"{type(processor).__name__} was installed since; ours returns when it runs"


@dataclass
class RestoreBackend:
    """Undo entry of one module; a class, so that a patched model can be pickled and copied.

    Attributes:
        attn: the module.
        hooks: its hooks that tell the backend which module is running.
        taken: each processor that got our backend, with its own attribute before, if it had one.
    """

    attn: nn.Module
    hooks: list[RemovableHandle]
    taken: list[tuple[Any, dict[str, Any]]]

    def __call__(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for processor, before in self.taken:
            # another backend that was chosen since stays
            if _is_ours(vars(processor).get(compat.BACKEND)):
                del vars(processor)[compat.BACKEND]
                vars(processor).update(before)

    def knows(self, processor: Any) -> bool:
        """Whether `processor` has already got our backend from here."""
        return any(processor is known for known, _ in self.taken)

    def take_over(self, processor: Any, backend: Any) -> None:
        """Make `backend` the processor's, remembering what was there the first time."""
        own = vars(processor)
        if not self.knows(processor):
            self.taken.append((processor, {k: own[k] for k in (compat.BACKEND,) if k in own}))
        setattr(processor, compat.BACKEND, backend)


def _enter(attn: nn.Module, args: Any) -> None:
    """Forward-pre-hook: keep to the settings that hold, and say which module runs."""
    if torch.compiler.is_compiling():
        return
    site = site_of(attn)
    undo = None if site is None else _undo_of(site)
    processor: Any = attn.processor
    if site is not None and undo is not None and serves(attn) and _free(processor):
        backend = getattr(processor, compat.BACKEND)
        # None on a processor that had ours: taken away by name, so it stays away
        if backend is not None or not undo.knows(processor):
            wanted = register(site.settings.attention_op)
            if backend is not wanted:
                undo.take_over(processor, wanted)
    _serving.set((attn, _serving.get()))


def _leave(attn: nn.Module, args: Any, output: Any) -> None:
    """Forward hook, called after a failure too: the module is not running any more."""
    if torch.compiler.is_compiling():
        return
    frame = _serving.get()
    if frame is not None:
        _serving.set(frame[1])


def _undo_of(site: Site) -> RestoreBackend | None:
    return next((undo for undo in site.undo if isinstance(undo, RestoreBackend)), None)


def _free(processor: Any) -> bool:
    """Whether the processor has no backend or ours, and the whole sequence."""
    backend = getattr(processor, compat.BACKEND)
    whole = getattr(processor, compat.PARALLEL, None) is None
    return whole and (backend is None or _is_ours(backend))


def _value(backend: Any) -> str:
    return str(getattr(backend, "value", backend))


def _is_ours(backend: Any) -> bool:
    return backend is not None and _value(backend).startswith(NAME)


def _active() -> str:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return _value(_AttentionBackendRegistry._active_backend)
