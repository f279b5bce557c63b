"""CLIP and T5 encoders, through the two attention registries of transformers.

It knows configurations and the attention call of transformers; it must not know pipelines. The
registries stay filled once used: an entry has no effect on a model whose configuration does not
name it.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sdx_kernels.bias import LowerTriangularMask
from sdx_kernels.ops import attend
from sdx_patches import compat, torch_call
from sdx_patches.session import PatchSession, record, settings_of

__all__ = [
    "NAME",
    "attention_function",
    "available",
    "can_switch",
    "implementation_of",
    "is_encoder_attention",
    "register",
    "switch",
]

#: Our name in both registries. It has no "flash" (transformers would look for that package) and
#: no "/" (it would look for a kernel on the hub).
NAME = "sdx_accel"


def register() -> None:
    """Make `NAME` known to transformers; doing it again changes nothing.

    Both registries are needed: with the function alone, transformers builds no mask at all and
    padded prompts come out wrong without any error.

    Raises:
        ImportError: this transformers has no such registries.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def available() -> bool:
    """Whether the installed transformers has the registries that a switch needs."""
    try:
        register()
    except ImportError:
        return False
    return True


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the attention module.
        query, key, value: (batch, heads, length, dim) views.
        attention_mask: bool (True = attend) or additive, (batch, 1, queries, keys); it already
            holds the causal part, so it wins over `is_causal`.
        scaling: factor of the scores; None = 1/√dim.
        dropout: probability, 0 outside training.
        is_causal: query i attends keys 0…i; None = what the module says of itself.
        position_bias: added to the scores, (1, heads, queries, keys); T5 only.
        **kwargs: whatever else a model passes; unused.

    Returns:
        (batch, length, heads, dim) and None, as no attention weights are kept.
    """
    bias: Tensor | LowerTriangularMask | None = attention_mask
    if bias is None:
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        bias = LowerTriangularMask() if causal and query.shape[2] > 1 else None
    if position_bias is not None:
        bias = _with_position_bias(bias, position_bias)
    inputs = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), bias)
    settings = settings_of(module)
    heard_by = torch_call.listener()
    if heard_by is None:
        out, choice = attend(*inputs, dropout, scaling, op=settings.attention_op)
    else:
        out, choice = torch_call.attend_listened(
            heard_by, *inputs, dropout, scaling, requested=settings.requested
        )
    record(module, choice)
    return out, None


def _with_position_bias(
    bias: Tensor | LowerTriangularMask | None, position_bias: Tensor
) -> Tensor | LowerTriangularMask:
    if bias is None:
        return position_bias  # stays (1, heads, …): the op broadcasts it over the batch
    if isinstance(bias, LowerTriangularMask):
        return bias.add_bias(position_bias)
    if bias.dtype == torch.bool:
        # not −∞: a prompt of padding only is the mean of its values, as without us
        return torch.where(bias, position_bias, torch.finfo(position_bias.dtype).min)
    return position_bias + bias


def is_encoder_attention(module: nn.Module) -> bool:
    """Whether `module` is of a kind that we serve: CLIP's, or that of an encoder of T5's family."""
    if compat.is_a(module, compat.CLIP_ATTENTION):
        return True
    t5 = any(compat.is_a(module, name) for name in compat.T5_ATTENTIONS)
    return t5 and not module.is_decoder


def can_switch(module: nn.Module) -> bool:
    """Whether `module` is an encoder's attention that nobody asked another implementation for."""
    return is_encoder_attention(module) and implementation_of(module) in ("sdpa", NAME)


def implementation_of(attention: nn.Module) -> str | None:
    """Name of the attention implementation that an encoder's attention module will look up."""
    return getattr(attention.config, compat.IMPLEMENTATION, None)


def switch(encoder: nn.Module, attentions: list[nn.Module], session: PatchSession) -> None:
    """Route the `attentions` of one encoder through our op.

    Their configuration object may belong to other encoders too, which must not be switched; so
    every module of this encoder gets a shallow copy of it, and the same object back on undo.

    Args:
        encoder: the model that owns the modules.
        attentions: those of its modules that `can_switch`.
        session: the running session; its failure puts the configurations back.
    """
    register()
    site = session.claim(encoder)
    for attention in attentions:
        session.claim(attention)
    configs = {id(attention.config): attention.config for attention in attentions}
    for config in configs.values():
        if getattr(config, compat.IMPLEMENTATION) == NAME:
            continue
        users = [m for m in encoder.modules() if vars(m).get("config") is config]
        own = copy.copy(config)
        setattr(own, compat.IMPLEMENTATION, NAME)
        undo = RestoreConfig(users, config, own, dict(vars(config)))
        site.undo.append(undo)
        session.on_failure(undo)
        for module in users:
            module.config = own


@dataclass
class RestoreConfig:
    """Undo entry of one configuration object; picklable.

    Attributes:
        users: the modules that held `original`.
        original: the object that was there.
        own: the copy that took its place.
        before: the attributes of `original` when it was copied.
    """

    users: list[nn.Module]
    original: Any
    own: Any
    before: dict[str, Any]

    def __call__(self) -> None:
        # what was written to the copy meanwhile (a resized vocabulary, say) was meant for the
        # encoder, and would have gone to the original without us
        for name, value in vars(self.own).items():
            ours = name == compat.IMPLEMENTATION and value == NAME
            if not ours and (name not in self.before or self.before[name] is not value):
                vars(self.original)[name] = value
        for module in self.users:
            if vars(module).get("config") is self.own:
                module.config = self.original

    def __setstate__(self, state: dict[str, Any]) -> None:
        # unpickled in a process that may never have patched anything
        vars(self).update(state)
        register()
