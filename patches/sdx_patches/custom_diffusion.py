"""Custom Diffusion: attention whose projections were trained for one subject.

It knows the weights of the host's processor; what is common to all layers is in `attention`. The
module imports diffusers and is loaded where a layer of this kind was met.
"""

from typing import Any, ClassVar

import torch
from diffusers.models.attention_processor import CustomDiffusionAttnProcessor2_0
from torch import Tensor

from sdx_patches import compat
from sdx_patches.attention import (
    SharesWeights,
    attend_heads,
    attention_bias,
    call_stock,
    split_heads,
    stock_of,
)
from sdx_patches.session import is_patched, record

__all__ = [
    "SdxCustomDiffusionAttnProcessor",
    "SdxEagerCustomDiffusionAttnProcessor",
    "SdxMemoryEfficientCustomDiffusionAttnProcessor",
]


# a subclass of the host's, because `save_attn_procs()` asks for it
class SdxCustomDiffusionAttnProcessor(SharesWeights, CustomDiffusionAttnProcessor2_0):
    """Attention with trained queries, keys, values or output in the place of the module's.

    Source: Kumari et al. 2022, "Multi-Concept Customization of Text-to-Image Diffusion". Made
    without arguments it uses the module's own projections; it takes over the trained ones of the
    processor that it stands in for, which is a `CustomDiffusionAttnProcessor2_0`.
    """

    host: ClassVar[str] = "CustomDiffusionAttnProcessor2_0"

    def __init__(self) -> None:
        CustomDiffusionAttnProcessor2_0.__init__(self, train_kv=False, train_q_out=False)
        self.stock = None

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """One attention layer, projections included.

        Args:
            attn: the `Attention` module that owns the untrained weights.
            hidden_states: (batch, length, channels).
            encoder_hidden_states: (batch, keys, channels) for cross-attention, else None. Its
                first position takes no part in the training of keys and values.
            attention_mask: as in `SdxAttnProcessor`.
            **kwargs: ignored; diffusers passes only arguments that are named here.

        Returns:
            (batch, length, channels).

        Raises:
            InvalidInputs: the mask's length is not the number of keys.
        """
        if not is_patched(attn) and (stock := stock_of(self)) is not None:
            return call_stock(
                stock,
                attn,
                hidden_states,
                encoder_hidden_states=encoder_hidden_states,
                attention_mask=attention_mask,
            )
        context = hidden_states
        if encoder_hidden_states is not None:
            context = encoder_hidden_states
            if attn.norm_cross is not None:
                context = attn.norm_encoder_hidden_states(context)
        to_q = self.to_q_custom_diffusion if self.train_q_out else attn.to_q
        query = to_q(hidden_states)
        if self.train_kv:
            key = _trained(self.to_k_custom_diffusion, context).to(query.dtype)
            value = _trained(self.to_v_custom_diffusion, context).to(query.dtype)
        else:
            key, value = attn.to_k(context), attn.to_v(context)
        if encoder_hidden_states is not None and key.requires_grad:
            key, value = _first_detached(key), _first_detached(value)

        heads = attn.heads
        bias = attention_bias(attention_mask, query.shape[0], heads, key.shape[1])
        out, choice = attend_heads(
            attn,
            split_heads(query, heads),
            split_heads(key, heads),
            split_heads(value, heads),
            bias,
            self.scale_of(attn),
        )
        record(attn, choice)
        for layer in self.to_out_custom_diffusion if self.train_q_out else attn.to_out:
            out = layer(out)
        return out


class SdxEagerCustomDiffusionAttnProcessor(SdxCustomDiffusionAttnProcessor):
    """In the place of `CustomDiffusionAttnProcessor`."""

    host: ClassVar[str] = "CustomDiffusionAttnProcessor"
    scaled: ClassVar[bool] = True


class SdxMemoryEfficientCustomDiffusionAttnProcessor(SdxEagerCustomDiffusionAttnProcessor):
    """In the place of `CustomDiffusionXFormersAttnProcessor`."""

    host: ClassVar[str] = "CustomDiffusionXFormersAttnProcessor"


def _trained(layer: Any, context: Tensor) -> Tensor:
    """`layer` of `context`, in the layer's dtype: it may be fp32 beside a 16-bit model.

    Where diffusers casts the layer at each call, the stored dtype says nothing and `context` has
    the right one already.
    """
    hooks = getattr(layer, compat.HOOKS, None)
    stored: torch.dtype = layer.weight.dtype
    if stored.itemsize > 1 and (hooks is None or hooks.get_hook(compat.CASTING_HOOK) is None):
        context = context.to(stored)
    out: Tensor = layer(context)
    return out


def _first_detached(states: Tensor) -> Tensor:
    return torch.cat([states[:, :1].detach(), states[:, 1:]], dim=1)
