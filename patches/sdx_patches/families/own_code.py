"""Attention layers that run code of the user's own, which ours would not call.

Knows the methods that the host's processors call and ours do not; decides nothing else.
"""

from typing import Any, Final

from torch import nn

from sdx_patches import compat

__all__ = ["own_code"]

#: Methods of `Attention` that the host's processors call: somebody who replaces one of them wants
#: to be called, most often to keep attention maps.
_CALLED: Final = (
    "get_attention_scores", "prepare_attention_mask", "head_to_batch_dim", "batch_to_head_dim",
)  # fmt: skip


def own_code(attention: nn.Module, processor: type) -> str:
    """What of this layer somebody has replaced by code of his own; "" where nothing is.

    Args:
        attention: a diffusers `Attention`.
        processor: the host's class whose place ours would take.

    Returns:
        The reason to leave the layer alone.
    """
    base = next(c for c in type(attention).__mro__ if compat.qualified_name(c) == compat.ATTENTION)
    for name in _CALLED:
        if name in vars(attention) or not _is_the_hosts(getattr(type(attention), name), base, name):
            return f"its {name}() was replaced, perhaps to keep attention maps; ours never calls it"
    # what is called on a class is its own __call__, whatever the instance has
    if not _is_the_hosts(processor.__call__, processor, "__call__"):
        return f"the __call__ of {processor.__name__} was replaced; ours never calls it"
    return ""


def _is_the_hosts(method: Any, owner: type, name: str) -> bool:
    """Whether `method` is the one that was written in the class `owner`.

    A wrapper may bear the name of what it wraps, but not its globals.
    """
    package = owner.__module__.partition(".")[0]
    home = getattr(method, "__globals__", {}).get("__name__", "").partition(".")[0]
    return home == package and getattr(method, "__qualname__", "") == f"{owner.__qualname__}.{name}"
