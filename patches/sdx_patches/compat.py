"""Every private or loosely promised host name that the patches rely on, and where it was checked.

Knows names only: nothing of how a patch works. Imports a host library only inside `missing()`.
"""

import importlib
import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

__all__ = [
    "ATTENTION",
    "BACKEND",
    "BEFORE_FUSING",
    "CASTING_HOOK",
    "CHECKED",
    "CLIP_ATTENTION",
    "DISPATCHER_ATTENTION",
    "HOOKS",
    "IMPLEMENTATION",
    "OTHER_ENCODERS",
    "PARALLEL",
    "PROCESSORS",
    "SET_DEFAULT",
    "T5_ATTENTIONS",
    "TORCH_ATTENTION",
    "is_a",
    "missing",
    "qualified_name",
    "warn_once",
]

#: First and last version in which every name below was found. The tests of the patches were run
#: on both ends of diffusers and on the last transformers; the first was read only.
CHECKED: Final = {"diffusers": ("0.40.0", "0.42.1"), "transformers": ("5.6.0", "5.24.0")}

# Host classes by qualified name, so that a model is recognised without importing its library.
ATTENTION: Final = "diffusers.models.attention_processor.Attention"
DISPATCHER_ATTENTION: Final = "diffusers.models.attention.AttentionModuleMixin"
CLIP_ATTENTION: Final = "transformers.models.clip.modeling_clip.CLIPAttention"
T5_ATTENTIONS: Final = (
    "transformers.models.t5.modeling_t5.T5Attention",
    "transformers.models.mt5.modeling_mt5.MT5Attention",
    "transformers.models.umt5.modeling_umt5.UMT5Attention",
)
#: Other encoders that diffusers' pipelines use.
OTHER_ENCODERS: Final = (
    "diffusers.pipelines.kolors.text_encoder.SelfAttention",
    "transformers.models.clap.modeling_clap.ClapTextSelfAttention",
    "transformers.models.dpt.modeling_dpt.DPTSelfAttention",
    "transformers.models.gemma.modeling_gemma.GemmaAttention",
    "transformers.models.gemma2.modeling_gemma2.Gemma2Attention",
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention",
    "transformers.models.llama.modeling_llama.LlamaAttention",
    "transformers.models.qwen2.modeling_qwen2.Qwen2Attention",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLAttention",
    "transformers.models.siglip.modeling_siglip.SiglipAttention",
    "transformers.models.xlm_roberta.modeling_xlm_roberta.XLMRobertaSelfAttention",
)
#: Names that `warn_once` spells out for each library.
_NAMED: Final = 3

#: Module of every processor that we stand in for.
PROCESSORS: Final = "diffusers.models.attention_processor"
TORCH_ATTENTION: Final = "torch.nn.modules.activation.MultiheadAttention"

#: Attributes of a processor that calls diffusers' attention dispatcher: the backend it names, and
#: how it splits a sequence over devices; None where it does neither.
BACKEND: Final = "_attention_backend"
PARALLEL: Final = "_parallel_config"

#: Module attribute: diffusers' registry of hooks, and in it the hook that casts a layer from the
#: dtype it is stored in to the one it computes in, at each call.
HOOKS: Final = "_diffusers_hook"
CASTING_HOOK: Final = "layerwise_casting"

#: Model attribute: the processors put aside by `fuse_qkv_projections()` for the way back.
BEFORE_FUSING: Final = "original_attn_processors"

#: Model method that refuses any processor class that diffusers does not know.
SET_DEFAULT: Final = "set_default_attn_processor"

#: Where a transformers configuration keeps `_attn_implementation`. The property's setter also
#: writes into sub-configurations, which a shallow copy shares with its original.
IMPLEMENTATION: Final = "_attn_implementation_internal"

_HOST_NAMES = (
    "diffusers.models.attention:AttentionModuleMixin",
    "diffusers.models.attention_dispatch:AttentionBackendName._value2member_map_",
    "diffusers.models.attention_dispatch:_AttentionBackendRegistry._backends",
    "diffusers.models.attention_dispatch:_AttentionBackendRegistry.register",
    "diffusers.models.attention_processor:Attention.norm_encoder_hidden_states",
    "diffusers.hooks._helpers:AttentionProcessorRegistry.get",
    "diffusers.hooks._helpers:AttentionProcessorRegistry.register",
    "diffusers.hooks.hooks:HookRegistry.get_hook",
    "diffusers.image_processor:IPAdapterMaskProcessor.downsample",
    "diffusers.models.attention_processor:AttnAddedKVProcessor2_0",
    "diffusers.models.attention_processor:AttnProcessor",
    "diffusers.models.attention_processor:AttnProcessor2_0",
    "diffusers.models.attention_processor:CustomDiffusionAttnProcessor2_0",
    "diffusers.models.attention_processor:FusedAttnProcessor2_0",
    "diffusers.models.attention_processor:IPAdapterAttnProcessor2_0",
    "diffusers.models.attention_processor:JointAttnProcessor2_0",
    "diffusers.models.attention_processor:SlicedAttnProcessor",
    "diffusers.models.attention_processor:XFormersAttnProcessor",
    "diffusers.models.unets.unet_2d_condition:UNet2DConditionModel.set_default_attn_processor",
    "transformers:AttentionInterface.register",
    "transformers:AttentionMaskInterface.register",
    "transformers.masking_utils:sdpa_mask",
    "transformers.models.clip.modeling_clip:CLIPAttention",
    "transformers.models.mt5.modeling_mt5:MT5Attention",
    "transformers.models.t5.modeling_t5:T5Attention",
    "transformers.models.umt5.modeling_umt5:UMT5Attention",
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


@cache
def warn_once() -> None:
    """Say in one line, once a process, what the installed hosts lack; nothing where all is there.

    What needs it is left as it is, layer by layer: a newer diffusers must cost speed at most.
    """
    said = []
    lost = missing()
    for library, (first, last) in CHECKED.items():
        names = [name.partition(":")[2] for name in lost if _library(name) == library]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            said.append(
                f"{library} {_version(library)} (checked with {first} to {last}) lacks "
                f"{', '.join(names[:_NAMED])}{more}"
            )
    if said:
        logging.getLogger("sdx_patches").warning(
            "%s; what needs them keeps the host's own attention; xattn_report() says which layers",
            "; ".join(said),
        )


def _library(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "of an unknown version"


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    # a host with a broken optional library raises RuntimeError and others
    except Exception:
        return False
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is not None
