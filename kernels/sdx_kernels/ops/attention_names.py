"""What callers may pass as `op`, and which implementations each form allows.

It knows names, ours and xFormers', and must not know how anything runs.
"""

import os

from sdx_kernels.errors import InvalidInputs
from sdx_kernels.ops.attention_bwd_impls import BACKWARD
from sdx_kernels.ops.attention_impls import OPERATOR, TORCH_NAMES

__all__ = ["Op", "allowed_by", "backward_by"]

#: None or "auto", "torch", an implementation's name, or an xFormers operator class or pair
Op = str | type | tuple[str | type | None, str | type | None] | None

#: xFormers' forward operators by their NAME: the torch kernel that each one is
_FORWARD = {
    "cutlassF": "sdpa-efficient",
    "cutlassF-pt": "sdpa-efficient",
    "fa2F": "sdpa-flash",
    "fa2F-pt": "sdpa-flash",
    "flshattF": "sdpa-flash",
}

#: and its backward operators; torch's kernels differentiate themselves
_BACKWARD = {
    "cutlassB": "sdpa-efficient",
    "cutlassB-pt": "sdpa-efficient",
    "fa2B": "sdpa-flash",
    "fa2B-pt": "sdpa-flash",
    "flshattB": "sdpa-flash",
}

#: names that stand for several implementations, by falling preference
_FAMILIES = {
    "torch": TORCH_NAMES,
    "triton": ("triton", "triton-wide"),
}


def _switched_off() -> bool:
    return os.environ.get("SDX_DISABLE", "") not in ("", "0")


def _name(part: str | type) -> str:
    return part if isinstance(part, str) else str(getattr(part, "NAME", part.__name__))


def _pair(op: Op) -> tuple[str | type | None, str | type | None]:
    forward, backward = op if isinstance(op, tuple) else (op, None)
    for part in (forward, backward):
        if not (part is None or isinstance(part, (str, type))):
            raise InvalidInputs(
                f"op={op!r}: pass None, the name of an implementation or an operator class"
            )
    return forward, backward


def allowed_by(op: Op) -> tuple[str, ...] | None:
    """The implementations that `op` allows; None = all automatic ones.

    Raises:
        InvalidInputs: `op` is nothing that names an implementation, or its two parts cannot go
            together.
    """
    forward, backward = _pair(op)
    theirs = None if backward is None else _BACKWARD.get(_name(backward))
    if forward is None and theirs is not None:
        return (theirs,)
    if forward is None or forward == "auto":
        # the off switch that reaches every model without touching a script
        return TORCH_NAMES if _switched_off() else None
    name = _name(forward)
    name = _FORWARD.get(name, name)
    if name in _FAMILIES:
        return _FAMILIES[name]
    OPERATOR.get(name)
    if backward is None:
        return (name,)
    if theirs != name and OPERATOR.get(name).differentiable:
        raise InvalidInputs(
            f"op=({_name(forward)}, {_name(backward)}): torch's {name} differentiates itself; pass "
            f"({_name(forward)}, None), or one of {BACKWARD.names()} after our own forward"
        )
    if theirs is not None and theirs != name:
        raise InvalidInputs(
            f"op=({_name(forward)}, {_name(backward)}): {theirs} cannot continue {name}; its "
            f"backwards are {BACKWARD.names()}"
        )
    return (name,)


def backward_by(op: Op, only: tuple[str, ...] | None) -> str:
    """The backward implementations that `op` asks for, as the library's operator takes them.

    Args:
        op: the caller's. only: what `allowed_by` made of it.

    Raises:
        InvalidInputs: the pair's second part names no implementation.
    """
    backward = _pair(op)[1]
    if backward is not None and _name(backward) not in _BACKWARD:
        return BACKWARD.get(_name(backward).removesuffix("-backward")).name
    if op == "reference":
        return "reference"
    if only is not None and any(name.startswith("triton") for name in only):
        # whoever names our kernels means both directions, as far as ours go
        return "triton,triton-tma,triton-wide,reference"
    return ""
