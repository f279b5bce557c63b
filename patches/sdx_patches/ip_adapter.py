"""Image prompts (IP-Adapter): the text's attention plus that of each adapter's image tokens.

It knows the weights of the host's processor and its masks; what is common to all layers is in
`attention`. The module imports diffusers and is loaded where a layer of this kind was met.
"""

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from diffusers.image_processor import IPAdapterMaskProcessor
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from torch import Tensor

from sdx_kernels.errors import InvalidInputs
from sdx_patches.attention import (
    SharesWeights,
    attend_heads,
    attention_bias,
    call_stock,
    finish,
    split_heads,
    stock_of,
)
from sdx_patches.session import is_patched, record

__all__ = [
    "SdxEagerIPAdapterAttnProcessor",
    "SdxIPAdapterAttnProcessor",
    "SdxMemoryEfficientIPAdapterAttnProcessor",
]

#: One image prompt's weight, or one for each of its images.
Scale = float | list[float]


# a subclass of the host's, because its loaders tell image prompts by isinstance
class SdxIPAdapterAttnProcessor(SharesWeights, IPAdapterAttnProcessor2_0):
    """Cross-attention to a text and to the images of any number of adapters.

    Every adapter adds scale · attention(query, its keys, its values) to the text's attention
    (Ye et al. 2023, "IP-Adapter"). Made without arguments it has no adapter; it takes over those
    of the processor that it stands in for, which is an `IPAdapterAttnProcessor2_0`.
    """

    host: ClassVar[str] = "IPAdapterAttnProcessor2_0"
    normed: ClassVar[bool] = False

    def __init__(self) -> None:
        IPAdapterAttnProcessor2_0.__init__(self, hidden_size=None, num_tokens=())
        self.stock = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | tuple[Tensor, Sequence[Tensor]] | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        scale: float | None = None,
        ip_adapter_masks: Tensor | list[Tensor | None] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """One attention layer, projections, residual and rescaling included.

        Args:
            attn: the `Attention` module that owns the text's weights.
            hidden_states: (batch, length, channels) or (batch, channels, height, width).
            encoder_hidden_states: the text (batch, keys, channels) and, for each adapter, its
                image tokens (batch, images, tokens, channels) or (batch, tokens, channels).
            attention_mask: of the text, as in `SdxAttnProcessor`.
            temb: what `attn.spatial_norm` is conditioned on, where the module has one.
            scale: ignored; each adapter's own is in the attribute `scale`.
            ip_adapter_masks: for each adapter (1, images, height, width), where each image may
                act, or None = everywhere; or one tensor (adapters, 1, height, width).
            **kwargs: ignored; diffusers passes only arguments that are named here.

        Returns:
            A tensor of `hidden_states`' shape.

        Raises:
            InvalidInputs: masks, scales and images do not match in number or shape, or the text
                mask's length is not that of the text.
        """
        if not is_patched(attn) and (stock := stock_of(self)) is not None:
            return call_stock(
                stock,
                attn,
                hidden_states,
                encoder_hidden_states=encoder_hidden_states,
                attention_mask=attention_mask,
                temb=temb,
                ip_adapter_masks=ip_adapter_masks,
            )
        text, images = self._text_and_images(encoder_hidden_states)
        query, key, value = self.prepare(attn, hidden_states, text, temb)
        bias = attention_bias(attention_mask, query.shape[0], attn.heads, key.shape[1])
        out, choice = attend_heads(attn, query, key, value, bias, self.scale_of(attn))
        record(attn, choice)
        masks = _checked_masks(ip_adapter_masks, self.scale, images)
        for states, weight, to_k, to_v, mask in zip(
            images, self.scale, self.to_k_ip, self.to_v_ip, masks, strict=False
        ):
            if mask is None:
                if isinstance(weight, list):
                    raise InvalidInputs(
                        "one scale per image needs ip_adapter_masks, which say where each image "
                        "acts; pass one number per adapter instead"
                    )
                if weight != 0:
                    out = out + weight * self._attend_image(attn, query, states, to_k, to_v)
                continue
            weights = weight if isinstance(weight, list) else [weight] * mask.shape[1]
            for index, one in enumerate(weights):
                if one == 0:
                    continue
                shown = self._attend_image(attn, query, states[:, index], to_k, to_v)
                where = IPAdapterMaskProcessor.downsample(mask[:, index], *shown.shape)
                out = out + one * (shown * where.to(dtype=shown.dtype, device=shown.device))
        return finish(attn, out, hidden_states)

    def _text_and_images(
        self, context: Tensor | tuple[Tensor, Sequence[Tensor]] | None
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        if context is None:
            return None, []
        if isinstance(context, tuple):
            return context
        if not self.num_tokens:
            return context, []
        warnings.warn(
            "an image prompt at the end of encoder_hidden_states is deprecated by diffusers; pass "
            "the tuple (text, [image tokens of each adapter]) instead",
            FutureWarning,
            stacklevel=3,
        )
        end = context.shape[1] - self.num_tokens[0]
        return context[:, :end], [context[:, end:]]

    def _attend_image(
        self, attn: Any, query: Tensor, states: Tensor, to_k: Any, to_v: Any
    ) -> Tensor:
        # several images without masks are one sequence of tokens
        key = split_heads(to_k(states).flatten(1, -2), attn.heads)
        value = split_heads(to_v(states).flatten(1, -2), attn.heads)
        return attend_heads(attn, query, key, value, None, self.scale_of(attn))[0]


class SdxEagerIPAdapterAttnProcessor(SdxIPAdapterAttnProcessor):
    """In the place of `IPAdapterAttnProcessor`."""

    host: ClassVar[str] = "IPAdapterAttnProcessor"
    scaled: ClassVar[bool] = True


class SdxMemoryEfficientIPAdapterAttnProcessor(SdxIPAdapterAttnProcessor):
    """In the place of `IPAdapterXFormersAttnProcessor`."""

    host: ClassVar[str] = "IPAdapterXFormersAttnProcessor"


def _checked_masks(
    masks: Tensor | list[Tensor | None] | None,
    scales: Sequence[Scale],
    images: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    if masks is None:
        return [None] * len(scales)
    if not isinstance(masks, list):
        masks = list(masks.unsqueeze(1))
    if not len(masks) == len(scales) == len(images):
        raise InvalidInputs(
            f"{len(masks)} ip_adapter_masks for {len(scales)} adapters and {len(images)} image "
            "prompts; pass one mask tensor per adapter, or None for an adapter without"
        )
    for number, (mask, scale, states) in enumerate(zip(masks, scales, images, strict=True)):
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or mask.dim() != 4:
            raise InvalidInputs(
                f"the mask of image prompt {number} must be a tensor (1, images, height, width), "
                "which diffusers' IPAdapterMaskProcessor makes of pictures"
            )
        if mask.shape[1] != states.shape[1]:
            raise InvalidInputs(
                f"image prompt {number} has {states.shape[1]} images and {mask.shape[1]} masks"
            )
        if isinstance(scale, list) and len(scale) != mask.shape[1]:
            raise InvalidInputs(
                f"image prompt {number} has {len(scale)} scales and {mask.shape[1]} masks"
            )
    return masks
