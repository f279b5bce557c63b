"""Joint attention of Stable Diffusion 3: picture and text attend both, and both come out.

It knows the host's `add_q_proj`, `add_k_proj`, `add_v_proj` and `to_add_out`. The module imports
diffusers and is loaded where a layer of this kind was met.
"""

from typing import Any, ClassVar

import torch
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor

from sdx_patches.attention import (
    SdxAttnProcessor,
    attend_heads,
    call_stock,
    split_heads,
    stock_of,
    stored_signature,
)
from sdx_patches.session import is_patched, record

__all__ = [
    "SdxFusedJointAttnProcessor",
    "SdxJointAttnProcessor",
    "SdxMemoryEfficientJointAttnProcessor",
]


# a subclass of the host's, because enabling xFormers on such a layer asks for it
class SdxJointAttnProcessor(SdxAttnProcessor, JointAttnProcessor2_0):
    """Joint attention with separate projections, by our attention op.

    In the place of `JointAttnProcessor2_0`, which leaves `attn.scale` unread.
    """

    host: ClassVar[str] = "JointAttnProcessor2_0"

    def project_context(self, attn: Any, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The text's query, key and value, each (batch, length, heads, dim)."""
        return (
            split_heads(attn.add_q_proj(context), attn.heads),
            split_heads(attn.add_k_proj(context), attn.heads),
            split_heads(attn.add_v_proj(context), attn.heads),
        )

    @stored_signature
    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One joint attention layer, projections included.

        Args:
            attn: the `Attention` module that owns the weights.
            hidden_states: (batch, length, channels), the picture.
            encoder_hidden_states: (batch, text, channels), or None where the picture attends
                itself only.
            attention_mask: ignored, as in diffusers' own processor.
            **kwargs: ignored; diffusers passes only arguments that are named here.

        Returns:
            The picture, (batch, length, channels); with a text, also the text, (batch, text,
            channels), before its output projection where the module has none.
        """
        if not is_patched(attn) and (stock := stock_of(self)) is not None:
            return call_stock(
                stock,
                attn,
                hidden_states,
                encoder_hidden_states=encoder_hidden_states,
                attention_mask=attention_mask,
            )
        query, key, value = self.project(attn, hidden_states, None)
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        if encoder_hidden_states is not None:
            added_query, added_key, added_value = self.project_context(attn, encoder_hidden_states)
            if attn.norm_added_q is not None:
                added_query = attn.norm_added_q(added_query)
            if attn.norm_added_k is not None:
                added_key = attn.norm_added_k(added_key)
            query = torch.cat([query, added_query], dim=1)
            key = torch.cat([key, added_key], dim=1)
            value = torch.cat([value, added_value], dim=1)
        out, choice = attend_heads(attn, query, key, value, None, self.scale_of(attn))
        record(attn, choice)
        picture = out[:, : hidden_states.shape[1]]
        for layer in attn.to_out:
            picture = layer(picture)
        if encoder_hidden_states is None:
            return picture
        text = out[:, hidden_states.shape[1] :]
        return picture, text if attn.context_pre_only else attn.to_add_out(text)


class SdxFusedJointAttnProcessor(SdxJointAttnProcessor):
    """The same for fused projections; unlike the host's own it keeps the norms of the module."""

    host: ClassVar[str] = "FusedJointAttnProcessor2_0"

    def project(
        self, attn: Any, hidden_states: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The picture's query, key and value, each (batch, length, heads, dim)."""
        return _thirds(attn.to_qkv(hidden_states), attn.heads)

    def project_context(self, attn: Any, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The text's query, key and value, each (batch, length, heads, dim)."""
        return _thirds(attn.to_added_qkv(context), attn.heads)


class SdxMemoryEfficientJointAttnProcessor(SdxJointAttnProcessor):
    """In the place of `XFormersJointAttnProcessor`."""

    host: ClassVar[str] = "XFormersJointAttnProcessor"
    scaled: ClassVar[bool] = True


def _thirds(fused: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = fused.chunk(3, dim=-1)
    return split_heads(query, heads), split_heads(key, heads), split_heads(value, heads)
