"""Attention processors for diffusers' `Attention` modules of UNets, ControlNets and VAEs.

They know one module's documented parts and the attention op; they must not know which model they
sit in. Settings and records live on the module, never on the processor: diffusers re-creates a
processor from its class alone when it loads or unloads an IP-Adapter.
"""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from sdx_kernels.errors import InvalidInputs
from sdx_kernels.ops import attend
from sdx_patches.session import PatchSession, Site, record, settings_of, site_of

__all__ = ["SdxAttnProcessor", "SdxFusedAttnProcessor", "install", "stand_in", "uninstall"]


class SdxAttnProcessor:
    """Self- and cross-attention with separate `to_q`, `to_k`, `to_v`, by our attention op.

    Attributes:
        stock: the host's processor that this one stands in for; None where diffusers created
            this instance itself.
    """

    def __init__(self) -> None:
        self.stock: Any = None

    def project(
        self, attn: Any, hidden_states: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (batch, length, heads, dim)."""
        source = hidden_states if context is None else context
        return (
            split_heads(attn.to_q(hidden_states), attn.heads),
            split_heads(attn.to_k(source), attn.heads),
            split_heads(attn.to_v(source), attn.heads),
        )

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        scale: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """One attention layer, projections, residual and rescaling included.

        Args:
            attn: the `Attention` module that owns the weights.
            hidden_states: (batch, length, channels) or (batch, channels, height, width).
            encoder_hidden_states: (batch, keys, channels) for cross-attention, else None.
            attention_mask: additive float or bool (True = attend), of shape (batch, keys),
                (batch or batch·heads, 1 or length, keys) or (batch, 1 or heads, …, keys).
            temb: what `attn.spatial_norm` is conditioned on, where the module has one.
            scale: ignored, as in diffusers' own processors (LoRA scales go through PEFT).
            **kwargs: ignored; diffusers passes only arguments that are named here.

        Returns:
            A tensor of `hidden_states`' shape.

        Raises:
            InvalidInputs: the mask's length is not the number of keys.
        """
        residual = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        picture_shape = hidden_states.shape if hidden_states.dim() == 4 else None
        if picture_shape is not None:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        if encoder_hidden_states is not None and attn.norm_cross is not None:
            encoder_hidden_states = attn.norm_encoder_hidden_states(encoder_hidden_states)

        query, key, value = self.project(attn, hidden_states, encoder_hidden_states)
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        dtype = query.dtype
        if attn.upcast_attention:
            # upcast_softmax needs nothing: every implementation keeps its scores and softmax in
            # fp32, so only the request for fp32 products costs anything
            query, key, value = query.float(), key.float(), value.float()
        bias = attention_bias(attention_mask, query.shape[0], attn.heads, key.shape[1])
        op = settings_of(attn).attention_op
        hidden_states, choice = attend(query, key, value, bias, 0.0, attn.scale, op=op)
        record(attn, choice)

        hidden_states = hidden_states.to(dtype).flatten(2)
        for layer in attn.to_out:
            hidden_states = layer(hidden_states)
        if picture_shape is not None:
            hidden_states = hidden_states.transpose(1, 2).reshape(picture_shape)
        if attn.residual_connection:
            hidden_states = hidden_states + residual
        if attn.rescale_output_factor != 1.0:
            hidden_states = hidden_states / attn.rescale_output_factor
        return hidden_states


# diffusers asks for the signature at each of the 140 calls of an SDXL step; a stored one saves
# 15 µs of 25
SdxAttnProcessor.__call__.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    SdxAttnProcessor.__call__
)


class SdxFusedAttnProcessor(SdxAttnProcessor):
    """The same for fused projections; query, key and value are strided views, not copies."""

    def project(
        self, attn: Any, hidden_states: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (batch, length, heads, dim)."""
        if context is None:
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query = attn.to_q(hidden_states)
            key, value = attn.to_kv(context).chunk(2, dim=-1)
        return (
            split_heads(query, attn.heads),
            split_heads(key, attn.heads),
            split_heads(value, attn.heads),
        )


def split_heads(tensor: Tensor, heads: int) -> Tensor:
    """(batch, length, heads·dim) as a (batch, length, heads, dim) view."""
    # view and not unflatten, which is Python: 2 µs a call, three calls a layer
    return tensor.view(tensor.shape[0], tensor.shape[1], heads, -1)


def attention_bias(mask: Tensor | None, batch: int, heads: int, keys: int) -> Tensor | None:
    """A diffusers attention mask as a bias that broadcasts to (batch, heads, queries, keys).

    Nothing is repeated or padded: heads and queries of size 1 are broadcast by the op.

    Raises:
        InvalidInputs: the mask covers another number of keys, or its first size fits neither
            the batch nor the batch times the heads.
    """
    if mask is None:
        return None
    if mask.shape[-1] != keys:
        raise InvalidInputs(
            f"the attention mask covers {mask.shape[-1]} positions but there are {keys} keys; "
            "pass a mask of the same length as the text (or other context) that it belongs to"
        )
    if mask.dim() == 2:
        mask = mask[:, None, :]
    if mask.dim() == 4:
        return mask
    if mask.dim() == 3 and mask.shape[0] in (1, batch):
        return mask[:, None]
    if mask.dim() == 3 and mask.shape[0] == batch * heads:
        return mask.unflatten(0, (batch, heads))
    raise InvalidInputs(
        f"the attention mask has shape {tuple(mask.shape)}; with a batch of {batch} and {heads} "
        f"heads its first size must be {batch} or {batch * heads}"
    )


def install(attn: Any, session: PatchSession, processor: type[SdxAttnProcessor] | None) -> None:
    """Claim `attn` for the session and put a `processor` in the place of the host's.

    Args:
        attn: a diffusers `Attention` whose processor is plain (not a module with weights).
        session: the running session; its failure puts the host's processor back.
        processor: the class that stands in for the one that is there; None where the one that
            is there is ours already.
    """
    current = attn.processor
    site = session.claim(attn)
    if not any(isinstance(undo, RestoreProcessor) for undo in site.undo):
        site.undo.append(RestoreProcessor(attn))
    session.on_failure(partial(setattr, attn, "processor", current))
    if processor is not None:
        stand_in(attn, site, processor)


def stand_in(attn: Any, site: Site, processor: type[SdxAttnProcessor]) -> None:
    """Replace the host's processor of a claimed module, remembering it for the way back."""
    ours = processor()
    ours.stock = site.stock = attn.processor
    attn.processor = ours


def uninstall(attn: Any) -> None:
    """Put the host's own processor back where ours is; leave any other that came later."""
    ours = attn.processor
    if not isinstance(ours, SdxAttnProcessor):
        return
    site = site_of(attn)
    stock = site.stock if ours.stock is None and site is not None else ours.stock
    if stock is not None:
        attn.processor = stock


@dataclass
class RestoreProcessor:
    """Undo entry of one module; a class, so that a patched model can be pickled and copied."""

    attn: Any

    def __call__(self) -> None:
        uninstall(self.attn)
