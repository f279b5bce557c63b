"""Stand-ins for the plain processors of UNets, ControlNets and VAEs, one class for each of them.

What differs between diffusers' classes (norms, the scale) is said here as data; how attention is
computed is in `attention`. The module imports diffusers and is loaded where a layer was met.
"""

from typing import Any, ClassVar

from diffusers.models import attention_processor
from torch import Tensor

from sdx_patches.attention import SdxAttnProcessor, introduce, split_heads

__all__ = [
    "SdxEagerAttnProcessor",
    "SdxFusedAttnProcessor",
    "SdxMemoryEfficientAttnProcessor",
    "SdxPlainAttnProcessor",
    "SdxSlicedAttnProcessor",
]


# A diffusers that has dropped one of them has no layer with it and asks for it nowhere: the others
# go on being served. One name each, for mypy takes no call as a base.
_Plain: Any = getattr(attention_processor, "AttnProcessor2_0", object)
_MemoryEfficient: Any = getattr(attention_processor, "XFormersAttnProcessor", object)
_Fused: Any = getattr(attention_processor, "FusedAttnProcessor2_0", object)


# subclasses of the host's where a pipeline asks for it: AnimateDiff for SDXL keeps the VAE's
# attention in 16 bits only behind these three
class SdxPlainAttnProcessor(SdxAttnProcessor, _Plain):
    """In the place of `AttnProcessor2_0`, which leaves `attn.scale` unread."""

    host: ClassVar[str] = "AttnProcessor2_0"

    def __setstate__(self, state: dict[str, Any]) -> None:
        # unpickled in a process that may never have patched anything
        self.__dict__.update(state)
        introduce(type(self))


class SdxMemoryEfficientAttnProcessor(SdxAttnProcessor, _MemoryEfficient):
    """In the place of `XFormersAttnProcessor`, which leaves `norm_q` and `norm_k` out."""

    host: ClassVar[str] = "XFormersAttnProcessor"
    scaled: ClassVar[bool] = True
    normed: ClassVar[bool] = False


class SdxEagerAttnProcessor(SdxAttnProcessor):
    """In the place of `AttnProcessor`, which leaves `norm_q` and `norm_k` out."""

    host: ClassVar[str] = "AttnProcessor"
    scaled: ClassVar[bool] = True
    normed: ClassVar[bool] = False


class SdxSlicedAttnProcessor(SdxEagerAttnProcessor):
    """In the place of `SlicedAttnProcessor`, which leaves the spatial norm out too."""

    host: ClassVar[str] = "SlicedAttnProcessor"
    spatial: ClassVar[bool] = False


class SdxFusedAttnProcessor(SdxAttnProcessor, _Fused):
    """The same for fused projections; query, key and value are strided views, not copies."""

    host: ClassVar[str] = "FusedAttnProcessor2_0"

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
