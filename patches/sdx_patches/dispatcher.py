"""Our attention op as a backend of diffusers' attention dispatcher, set on one model only.

It knows the dispatcher's registry, the call that it makes and the module that makes it; how a
processor comes to name the backend is in `dispatcher_sites`. A backend stays registered once added:
it has no effect on a model that does not name it, and the process-wide one is never touched.
"""

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn

from sdx_kernels.bias import LowerTriangularMask
from sdx_kernels.ops import attend, memory_efficient_attention_forward_requires_grad
from sdx_patches import compat, torch_call
from sdx_patches.session import Op, Settings, record, site_of

__all__ = [
    "NAME",
    "TAKEN",
    "Taken",
    "active",
    "available",
    "backend_function",
    "is_default",
    "is_ours",
    "name_of",
    "own_backend",
    "register",
    "serves",
]

#: Our name in diffusers' list of backends. A layer that was asked for one certain operator gets
#: a backend of its own, `sdx_accel_<operator>`: in a traced graph the function finds no module and
#: must still keep to the operator.
NAME: Final = "sdx_accel"

_AUTO: Final = "auto"

#: On a processor that got our backend: what it had before. On the processor, and not in a table of
#: ours, because it must follow deepcopy and pickle.
TAKEN: Final = "_sdx_taken"

#: What runs a module's forward, with the module as `self`.
_MODULE_CALL: Final = nn.Module._call_impl.__code__


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
    # a graph records nothing, and in it there is no caller to be found
    attn = None if torch.compiler.is_compiling() else _caller()
    site = None
    if attn is not None:
        site = site_of(attn)
        if site is not None:
            op = site.settings.attention_op
        elif (own := own_backend(attn)) is not None:
            from diffusers.models.attention_dispatch import dispatch_attention_fn

            return dispatch_attention_fn(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                enable_gqa,
                {"return_lse": True} if return_lse else None,
                backend=own,
                parallel_config=_parallel_config,
            )
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
    # torch's call has no grouped heads of five dimensions: those stay ours
    heard_by = None if shared else torch_call.listener()
    if heard_by is None:
        out, choice = attend(query, key, value, bias, dropout_p, scale, op=op)
    else:
        requested = NAME if site is None else site.settings.requested
        out, choice = torch_call.attend_listened(
            heard_by, query, key, value, bias, dropout_p, scale, requested=requested
        )
    if attn is not None:
        record(attn, choice)
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


def _caller() -> Any:
    """The module that asks for attention, or None where none that the dispatcher serves does.

    The dispatcher tells its backends nothing of the caller, so it is read off the stack. Noting it
    before the call and forgetting it after would be wrong as soon as the second did not happen:
    torch calls no hook after a KeyboardInterrupt, nor one that was removed in between.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _MODULE_CALL and serves(module := frame.f_locals["self"]):
            return module
        frame = frame.f_back
    return None


def serves(module: nn.Module) -> bool:
    """Whether the module's processor takes its backend from diffusers' dispatcher."""
    processor = vars(module).get("processor")
    # a scripted module has a mapping without `get` here
    if processor is None and "processor" in module._modules:
        processor = module._modules["processor"]
    return hasattr(processor, compat.BACKEND)


def is_default() -> bool:
    """Whether our backend is that of every processor of the process which names none."""
    return available() and is_ours(active())


class Taken:
    """What a processor with our backend had before, and the modules that it got ours for.

    One processor may be that of several models; the last of them takes ours away.

    Args:
        before: the processor's own attribute, by name, if it had one.
        users: the modules. A copy of a processor knows none: they are those of the original.
    """

    def __init__(self, before: dict[str, Any], users: Iterable[nn.Module] = ()) -> None:
        self.before = before
        self.users = WeakSet(users)

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any]]]:
        return Taken, (self.before,)


def own_backend(attn: nn.Module) -> Any:
    """The backend of a module that is not patched but shares its processor with one that is.

    None where the processor is nobody's, or where ours is the process's default.
    """
    taken: Taken | None = vars(attn.processor).get(TAKEN)
    if taken is None or not is_ours(getattr(attn.processor, compat.BACKEND)):
        return None
    before = taken.before.get(compat.BACKEND)
    own = active() if before is None else before
    return None if is_ours(own) else own


def name_of(backend: Any) -> str:
    """A backend's name in diffusers' list, whether it is a member of that or a name already."""
    return str(getattr(backend, "value", backend))


def is_ours(backend: Any) -> bool:
    """Whether a processor that names `backend`, or None, runs our op."""
    return backend is not None and name_of(backend).startswith(NAME)


def active() -> Any:
    """The member that serves every processor which names none, in the whole process."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return _AttentionBackendRegistry._active_backend
