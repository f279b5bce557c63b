"""Every private or loosely promised host name that the patches rely on, and where it was checked.

Knows names only: nothing of how a patch works. Imports a host library only inside `missing()`.
"""

import importlib
from typing import Any, Final

__all__ = [
    "ATTENTION",
    "BEFORE_FUSING",
    "CHECKED",
    "CLIP_ATTENTION",
    "DISPATCHER_ATTENTION",
    "IMPLEMENTATION",
    "SET_DEFAULT",
    "T5_ATTENTION",
    "TORCH_ATTENTION",
    "is_a",
    "missing",
    "qualified_name",
]

#: First and last version in which every name below was found. The tests of the patches were run
#: on both ends of diffusers and on the last transformers; the first was read only.
CHECKED: Final = {"diffusers": ("0.40.0", "0.42.1"), "transformers": ("5.6.0", "5.24.0")}

# Host classes by qualified name, so that a model is recognised without importing its library.
ATTENTION: Final = "diffusers.models.attention_processor.Attention"
DISPATCHER_ATTENTION: Final = "diffusers.models.attention.AttentionModuleMixin"
CLIP_ATTENTION: Final = "transformers.models.clip.modeling_clip.CLIPAttention"
T5_ATTENTION: Final = "transformers.models.t5.modeling_t5.T5Attention"
TORCH_ATTENTION: Final = "torch.nn.modules.activation.MultiheadAttention"

#: Model attribute: the processors put aside by `fuse_qkv_projections()` for the way back.
BEFORE_FUSING: Final = "original_attn_processors"

#: Model method that refuses any processor class that diffusers does not know.
SET_DEFAULT: Final = "set_default_attn_processor"

#: Where a transformers configuration keeps `_attn_implementation`. The property's setter also
#: writes into sub-configurations, which a shallow copy shares with its original.
IMPLEMENTATION: Final = "_attn_implementation_internal"

_HOST_NAMES = (
    "diffusers.models.attention:AttentionModuleMixin",
    "diffusers.models.attention_processor:Attention.norm_encoder_hidden_states",
    "diffusers.models.attention_processor:AttnProcessor",
    "diffusers.models.attention_processor:AttnProcessor2_0",
    "diffusers.models.attention_processor:FusedAttnProcessor2_0",
    "diffusers.models.attention_processor:SlicedAttnProcessor",
    "diffusers.models.attention_processor:XFormersAttnProcessor",
    "diffusers.models.unets.unet_2d_condition:UNet2DConditionModel.set_default_attn_processor",
    "transformers:AttentionInterface.register",
    "transformers:AttentionMaskInterface.register",
    "transformers.masking_utils:sdpa_mask",
    "transformers.models.clip.modeling_clip:CLIPAttention",
    "transformers.models.t5.modeling_t5:T5Attention",
)


def qualified_name(cls: type) -> str:
    """`module.Class`, as the constants here and the tables of `families` spell it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_a(instance: object, name: str) -> bool:
    """Whether `name` is the class of `instance` or one of its bases."""
    return any(qualified_name(cls) == name for cls in type(instance).__mro__)


def missing() -> list[str]:
    """Host names that the installed diffusers and transformers lack.

    Returns:
        `module:attribute` entries, empty when every patch can work.
    """
    return [name for name in _HOST_NAMES if not _exists(name)]


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return False
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is not None
