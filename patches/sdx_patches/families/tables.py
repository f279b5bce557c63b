"""Data: which attention modules and processors get which patch, and why the others are left.

Keys are qualified class names, so that nothing has to be imported to look one up. A processor is
matched by its exact class: a subclass is somebody's own and may do more than its base.
"""

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Final

from sdx_patches import compat
from sdx_patches.attention import SdxAttnProcessor

__all__ = ["LEFT_MODULES", "LEFT_PROCESSORS", "REPLACED", "UNKNOWN_PROCESSOR", "Replacement"]

_HOST: Final = compat.PROCESSORS + "."


@dataclass(frozen=True, slots=True)
class Replacement:
    """What takes the place of one of the host's processors.

    Args:
        target: our class, as `module:name`; a name, because most of the modules import diffusers.
        option: the call by which a user asks for the host's processor; "" where it is only a
            default. When it comes after enabling, the later call holds and ours steps back.
        back: the call that takes that option back.
    """

    target: str
    option: str = ""
    back: str = ""

    @property
    def processor(self) -> type[SdxAttnProcessor]:
        """Our class, imported now."""
        module, _, name = self.target.partition(":")
        found: type[SdxAttnProcessor] = getattr(importlib.import_module(module), name)
        return found

    @property
    def lacking(self) -> str:
        """The name that the installed diffusers lacks for our class; "" where it lacks none."""
        return _lacking(self.target.partition(":")[0])


@cache
def _lacking(module: str) -> str:
    # cached: a module that cannot be imported would be tried anew before each forward
    try:
        importlib.import_module(module)
    except ImportError as error:
        # the name in `from x import name`; an attribute of ImportError since Python 3.12 only
        return str(error).partition("'")[2].partition("'")[0] or str(error)
    return ""


_PLAIN: Final = "sdx_patches.plain:Sdx{}AttnProcessor"
_ADDED: Final = "sdx_patches.added_kv:Sdx{}AttnAddedKVProcessor"
_CUSTOM: Final = "sdx_patches.custom_diffusion:Sdx{}CustomDiffusionAttnProcessor"
_IMAGE: Final = "sdx_patches.ip_adapter:Sdx{}IPAdapterAttnProcessor"
_JOINT: Final = "sdx_patches.joint:Sdx{}JointAttnProcessor"

_SLICING: Final = ("enable_attention_slicing()", "disable_attention_slicing()")
_XFORMERS: Final = (
    "enable_xformers_memory_efficient_attention()",
    "disable_xformers_memory_efficient_attention()",
)

#: Every one computes softmax(q·kᵀ·scale + mask)·v. Those of a kind differ in memory and speed, and
#: in what they leave out of the module (the scale, norms), which ours then leaves out as well. The
#: name of ours has no "XFormers": loaders of image prompts take that word for xFormers itself.
REPLACED: Final[dict[str, Replacement]] = {
    _HOST + name: Replacement(target.format(kind), *option)
    for name, target, kind, option in (
        ("AttnProcessor", _PLAIN, "Eager", ()),
        ("AttnProcessor2_0", _PLAIN, "Plain", ()),
        ("SlicedAttnProcessor", _PLAIN, "Sliced", _SLICING),
        ("XFormersAttnProcessor", _PLAIN, "MemoryEfficient", _XFORMERS),
        ("FusedAttnProcessor2_0", _PLAIN, "Fused", ()),
        ("AttnAddedKVProcessor", _ADDED, "Eager", ()),
        ("AttnAddedKVProcessor2_0", _ADDED, "", ()),
        ("SlicedAttnAddedKVProcessor", _ADDED, "Sliced", _SLICING),
        ("XFormersAttnAddedKVProcessor", _ADDED, "MemoryEfficient", _XFORMERS),
        ("CustomDiffusionAttnProcessor", _CUSTOM, "Eager", ()),
        ("CustomDiffusionAttnProcessor2_0", _CUSTOM, "", ()),
        ("CustomDiffusionXFormersAttnProcessor", _CUSTOM, "MemoryEfficient", _XFORMERS),
        ("IPAdapterAttnProcessor", _IMAGE, "Eager", ()),
        ("IPAdapterAttnProcessor2_0", _IMAGE, "", ()),
        ("IPAdapterXFormersAttnProcessor", _IMAGE, "MemoryEfficient", _XFORMERS),
        ("JointAttnProcessor2_0", _JOINT, "", ()),
        ("XFormersJointAttnProcessor", _JOINT, "MemoryEfficient", _XFORMERS),
        ("FusedJointAttnProcessor2_0", _JOINT, "Fused", ()),
    )
}

UNKNOWN_PROCESSOR: Final = (
    "not one of diffusers' plain processors; it may keep attention maps or do more than "
    "attention, so it is left alone"
)

_PAG = "leaves out attention on purpose (perturbed-attention guidance)"
_TRANSFORMER = "belongs to a transformer model, with rotary positions or norms of its own"
_LINEAR = "linear attention, which has no softmax"
_DEVICE = "was chosen for another kind of device"
_ALIAS = "an old name; the processor that it makes is of another class"
_STUB = "does nothing; diffusers keeps the name of its old LoRA layers"

LEFT_PROCESSORS: Final[dict[str, str]] = {
    _HOST + name: reason
    for reason, names in {
        "joint attention with trained weights of its own (image prompts of SD3)": (
            "SD3IPAdapterJointAttnProcessor2_0",
        ),
        _PAG: (
            "PAGIdentitySelfAttnProcessor2_0",
            "PAGCFGIdentitySelfAttnProcessor2_0",
            "PAGJointAttnProcessor2_0",
            "PAGCFGJointAttnProcessor2_0",
            "PAGHunyuanAttnProcessor2_0",
            "PAGCFGHunyuanAttnProcessor2_0",
            "PAGCFGSanaLinearAttnProcessor2_0",
            "PAGIdentitySanaLinearAttnProcessor2_0",
        ),
        _TRANSFORMER: (
            "AllegroAttnProcessor2_0",
            "AuraFlowAttnProcessor2_0",
            "CogVideoXAttnProcessor2_0",
            "FusedAuraFlowAttnProcessor2_0",
            "FusedCogVideoXAttnProcessor2_0",
            "FusedHunyuanAttnProcessor2_0",
            "HunyuanAttnProcessor2_0",
            "LuminaAttnProcessor2_0",
            "MochiAttnProcessor2_0",
            "MochiVaeAttnProcessor2_0",
            "StableAudioAttnProcessor2_0",
        ),
        _LINEAR: ("SanaLinearAttnProcessor2_0", "SanaMultiscaleAttnProcessor2_0"),
        _DEVICE: ("AttnProcessorNPU", "XLAFlashAttnProcessor2_0"),
        _ALIAS: (
            "FluxAttnProcessor2_0",
            "FluxAttnProcessor2_0_NPU",
            "FluxIPAdapterJointAttnProcessor2_0",
            "FluxSingleAttnProcessor2_0",
            "FusedFluxAttnProcessor2_0",
            "FusedFluxAttnProcessor2_0_NPU",
            "XLAFluxFlashAttnProcessor2_0",
        ),
        _STUB: (
            "LoRAAttnAddedKVProcessor",
            "LoRAAttnProcessor",
            "LoRAAttnProcessor2_0",
            "LoRAXFormersAttnProcessor",
        ),
    }.items()
    for name in names
}

#: Attention modules that have no replaceable processor at all.
LEFT_MODULES: Final[dict[str, str]] = {
    compat.DISPATCHER_ATTENTION: "has a processor that asks diffusers' dispatcher for no backend",
    **dict.fromkeys(compat.T5_ATTENTIONS, "a decoder's; transformers' own attention is kept"),
    **dict.fromkeys(
        compat.OTHER_ENCODERS, "an encoder of another kind than CLIP and T5; its own is kept"
    ),
    compat.TORCH_ATTENTION: "torch's own multi-head attention is kept",
}
