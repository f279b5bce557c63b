"""Attention whose keys are the text's and the picture's own: DeepFloyd IF, Kandinsky 2, unCLIP.

It knows the host's `add_k_proj` and `add_v_proj`; how segments of keys are attended together is
in `attention`. The module imports diffusers and is loaded where a layer of this kind was met.
"""

from typing import Any, ClassVar

from diffusers.models.attention_processor import AttnAddedKVProcessor2_0
from torch import Tensor

from sdx_patches.attention import (
    SdxAttnProcessor,
    Segment,
    attend_segments,
    attention_bias,
    call_stock,
    split_heads,
    stock_of,
    stored_signature,
)
from sdx_patches.session import is_patched, record

__all__ = [
    "SdxAttnAddedKVProcessor",
    "SdxEagerAttnAddedKVProcessor",
    "SdxMemoryEfficientAttnAddedKVProcessor",
    "SdxSlicedAttnAddedKVProcessor",
]


# a subclass of the host's, because enabling xFormers on such a layer asks for it; "Added" is in
# the name because fusing projections must be refused here, and the host decides that by the name
class SdxAttnAddedKVProcessor(SdxAttnProcessor, AttnAddedKVProcessor2_0):
    """Attention over the text's keys followed by the picture's own, by our attention op.

    In the place of `AttnAddedKVProcessor2_0`, which leaves `attn.scale` unread.
    """

    host: ClassVar[str] = "AttnAddedKVProcessor2_0"
    spatial: ClassVar[bool] = False

    @stored_signature
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
        """One attention layer, projections and residual included.

        Args:
            attn: the `Attention` module that owns the weights.
            hidden_states: (batch, channels, height, width) or (batch, channels, length).
            encoder_hidden_states: (batch, text, channels); None = the picture itself.
            attention_mask: additive float or bool (True = attend), over the text's positions or
                over the text's and then the picture's, in any shape that `attention_bias` takes.
            temb: what `attn.spatial_norm` is conditioned on, where the module has one.
            scale: ignored, as in diffusers' own processors.
            **kwargs: ignored; diffusers passes only arguments that are named here.

        Returns:
            A tensor of `hidden_states`' shape.

        Raises:
            InvalidInputs: the mask covers neither the text nor the text and the picture.
        """
        if not is_patched(attn) and (stock := stock_of(self)) is not None:
            return call_stock(
                stock,
                attn,
                hidden_states,
                encoder_hidden_states=encoder_hidden_states,
                attention_mask=attention_mask,
                temb=temb,
            )
        residual = hidden_states
        if self.spatial and attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        hidden_states = hidden_states.flatten(2).transpose(1, 2)
        # without a text the picture stands for it, before its group norm
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross is not None:
            context = attn.norm_encoder_hidden_states(context)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)

        heads = attn.heads
        query = split_heads(attn.to_q(hidden_states), heads)
        keys_and_values = [(attn.add_k_proj(context), attn.add_v_proj(context))]
        if not attn.only_cross_attention:
            keys_and_values.append((attn.to_k(hidden_states), attn.to_v(hidden_states)))
        lengths = [key.shape[1] for key, _ in keys_and_values]
        biases = _biases(attention_mask, query.shape[0], heads, lengths)
        segments = [
            Segment(split_heads(key, heads), split_heads(value, heads), bias)
            for (key, value), bias in zip(keys_and_values, biases, strict=True)
        ]
        hidden_states, choice = attend_segments(attn, query, segments, self.scale_of(attn))
        record(attn, choice)
        for layer in attn.to_out:
            hidden_states = layer(hidden_states)
        return hidden_states.transpose(1, 2).reshape(residual.shape) + residual


class SdxEagerAttnAddedKVProcessor(SdxAttnAddedKVProcessor):
    """In the place of `AttnAddedKVProcessor`."""

    host: ClassVar[str] = "AttnAddedKVProcessor"
    scaled: ClassVar[bool] = True


class SdxSlicedAttnAddedKVProcessor(SdxEagerAttnAddedKVProcessor):
    """In the place of `SlicedAttnAddedKVProcessor`, the one of them with a spatial norm."""

    host: ClassVar[str] = "SlicedAttnAddedKVProcessor"
    spatial: ClassVar[bool] = True


class SdxMemoryEfficientAttnAddedKVProcessor(SdxEagerAttnAddedKVProcessor):
    """In the place of `XFormersAttnAddedKVProcessor`."""

    host: ClassVar[str] = "XFormersAttnAddedKVProcessor"


def _biases(mask: Tensor | None, batch: int, heads: int, lengths: list[int]) -> list[Tensor | None]:
    """The mask of each segment; a mask over the text alone says nothing of the picture."""
    if mask is not None and len(lengths) > 1 and mask.shape[-1] == sum(lengths):
        whole = attention_bias(mask, batch, heads, sum(lengths))
        assert whole is not None
        return list(whole.split(lengths, dim=-1))
    text = attention_bias(mask, batch, heads, lengths[0])
    return [text, *(None for _ in lengths[1:])]
