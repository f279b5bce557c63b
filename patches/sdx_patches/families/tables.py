"""Data: which attention modules and processors get which patch, and why the others are left.

Keys are qualified class names, so that nothing has to be imported to look one up. A processor is
matched by its exact class: a subclass is somebody's own and may do more than its base.
"""

from dataclasses import dataclass
from typing import Final

from sdx_patches import compat
from sdx_patches.attention import SdxAttnProcessor, SdxFusedAttnProcessor

__all__ = ["LEFT_MODULES", "LEFT_PROCESSORS", "REPLACED", "UNKNOWN_PROCESSOR", "Replacement"]

_HOST: Final = "diffusers.models.attention_processor."


@dataclass(frozen=True, slots=True)
class Replacement:
    """What takes the place of one of the host's processors.

    Args:
        processor: our class.
        option: the call by which a user asks for the host's processor; "" where it is only a
            default. When it comes after enabling, the later call holds and ours steps back.
        back: the call that takes that option back.
    """

    processor: type[SdxAttnProcessor]
    option: str = ""
    back: str = ""


#: Every one computes softmax(q·kᵀ·scale + mask)·v; they differ in memory and speed only.
REPLACED: Final[dict[str, Replacement]] = {
    _HOST + "AttnProcessor": Replacement(SdxAttnProcessor),
    _HOST + "AttnProcessor2_0": Replacement(SdxAttnProcessor),
    _HOST + "FusedAttnProcessor2_0": Replacement(SdxFusedAttnProcessor),
    _HOST + "SlicedAttnProcessor": Replacement(
        SdxAttnProcessor, "enable_attention_slicing()", "disable_attention_slicing()"
    ),
    _HOST + "XFormersAttnProcessor": Replacement(
        SdxAttnProcessor,
        "enable_xformers_memory_efficient_attention()",
        "disable_xformers_memory_efficient_attention()",
    ),
}

UNKNOWN_PROCESSOR: Final = (
    "not one of diffusers' plain processors; it may keep attention maps or do more than "
    "attention, so it is left alone"
)

_ADDED = "adds the text's keys and values to its own; no replacement yet"
_WEIGHTS = "has trained weights of its own; no replacement yet"
_JOINT = "returns two tensors (joint attention); no replacement yet"
_PAG = "leaves out attention on purpose (perturbed-attention guidance)"

LEFT_PROCESSORS: Final[dict[str, str]] = {
    _HOST + "AttnAddedKVProcessor": _ADDED,
    _HOST + "AttnAddedKVProcessor2_0": _ADDED,
    _HOST + "SlicedAttnAddedKVProcessor": _ADDED,
    _HOST + "XFormersAttnAddedKVProcessor": _ADDED,
    _HOST + "CustomDiffusionAttnProcessor": _WEIGHTS,
    _HOST + "CustomDiffusionAttnProcessor2_0": _WEIGHTS,
    _HOST + "CustomDiffusionXFormersAttnProcessor": _WEIGHTS,
    _HOST + "IPAdapterAttnProcessor": _WEIGHTS,
    _HOST + "IPAdapterAttnProcessor2_0": _WEIGHTS,
    _HOST + "IPAdapterXFormersAttnProcessor": _WEIGHTS,
    _HOST + "JointAttnProcessor2_0": _JOINT,
    _HOST + "FusedJointAttnProcessor2_0": _JOINT,
    _HOST + "XFormersJointAttnProcessor": _JOINT,
    _HOST + "PAGIdentitySelfAttnProcessor2_0": _PAG,
    _HOST + "PAGCFGIdentitySelfAttnProcessor2_0": _PAG,
}

#: Attention modules that have no replaceable processor at all.
LEFT_MODULES: Final[dict[str, str]] = {
    compat.DISPATCHER_ATTENTION: "goes through diffusers' attention dispatcher; no backend yet",
    compat.T5_ATTENTION: "adds a position bias; transformers' own attention is kept",
    compat.TORCH_ATTENTION: "torch's own multi-head attention is kept",
}
