"""Public architectures as data: SDXL, SD 1.5, SD 3, FLUX.1, PixArt-Sigma, and tiny twins of four.

Configurations only: no weights, no files, no torch. Figures are those of the models' published
config.json files; the parameter counts they lead to are asserted in tests/accel/test_models.py.
"""

from __future__ import annotations

import copy
import difflib
from typing import Any

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.descriptions import ComponentDescription, ModelDescription
from sdx_accel.runtime.transformer_architectures import CLASSES, pixart_sigma, sd3_and_flux

__all__ = [
    "RANDOM_PREFIX",
    "RANDOM_SPECS",
    "architecture",
    "is_random_spec",
]

RANDOM_PREFIX = "random:"

# both families were trained with this noise schedule
_BETAS = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "steps_offset": 1,
}
_EULER = (
    "EulerDiscreteScheduler",
    {
        **_BETAS,
        "interpolation_type": "linear",
        "timestep_spacing": "leading",
        "use_karras_sigmas": False,
    },
)
_PNDM = (
    "PNDMScheduler",
    {**_BETAS, "set_alpha_to_one": False, "skip_prk_steps": True, "timestep_spacing": "leading"},
)

_CLIP_L = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "bos_token_id": 0,
    # 2 is not the end token's id: transformers reads it as "pool at the highest id of the row"
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_OPEN_CLIP_BIG_G = {
    **_CLIP_L,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}

_UNET_SDXL = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 2,
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "norm_num_groups": 32,
}
_UNET_SD15 = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [320, 640, 1280, 1280],
    "down_block_types": [
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "DownBlock2D",
    ],
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "up_block_types": [
        "UpBlock2D",
        "CrossAttnUpBlock2D",
        "CrossAttnUpBlock2D",
        "CrossAttnUpBlock2D",
    ],
    "layers_per_block": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 768,
    "norm_num_groups": 32,
}
_VAE_SDXL = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "scaling_factor": 0.13025,
    "force_upcast": True,
}
_VAE_SD15 = {**_VAE_SDXL, "sample_size": 512, "scaling_factor": 0.18215}

# The tiny twins keep every class, the eightfold VAE and both text encoders. Head dim 32 and
# channel counts that are multiples of 32 are what the kernels and GroupNorm see in real models.
_TINY_VOCABULARY = 514  # 256 bytes, 256 word-ending bytes, start and end: see offline_tokenizer
_TINY_CLIP = {
    **_CLIP_L,
    "vocab_size": _TINY_VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 64,
}
# another width than the first encoder's, as in SDXL: loaders tell the two apart by it
_TINY_CLIP_2 = {
    **_TINY_CLIP,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "projection_dim": 96,
    "hidden_act": "gelu",
}
_TINY_UNET_SDXL = {
    **_UNET_SDXL,
    "sample_size": 16,
    "block_out_channels": [32, 64, 64],
    "layers_per_block": 1,
    "transformer_layers_per_block": [1, 1, 2],
    "attention_head_dim": [1, 2, 2],
    "cross_attention_dim": 64 + 96,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 96 + 6 * 8,
    "norm_num_groups": 8,
}
_TINY_UNET_SD15 = {
    **_UNET_SD15,
    "sample_size": 16,
    "block_out_channels": [32, 64, 64, 64],
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "cross_attention_dim": 64,
    "norm_num_groups": 8,
}
_TINY_VAE_SDXL = {
    **_VAE_SDXL,
    "block_out_channels": [16, 32, 32, 32],
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 128,
}
_TINY_VAE_SD15 = {**_TINY_VAE_SDXL, "scaling_factor": 0.18215}

_XL = "StableDiffusionXLPipeline"
_SD = "StableDiffusionPipeline"

# spec → pipeline class, configuration per component, scheduler
_TABLE: dict[str, tuple[str, dict[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "random:sd15": (
        _SD,
        {"text_encoder": _CLIP_L, "unet": _UNET_SD15, "vae": _VAE_SD15},
        _PNDM,
    ),
    "random:sd15-tiny": (
        _SD,
        {"text_encoder": _TINY_CLIP, "unet": _TINY_UNET_SD15, "vae": _TINY_VAE_SD15},
        _PNDM,
    ),
    "random:sdxl": (
        _XL,
        {
            "text_encoder": _CLIP_L,
            "text_encoder_2": _OPEN_CLIP_BIG_G,
            "unet": _UNET_SDXL,
            "vae": _VAE_SDXL,
        },
        _EULER,
    ),
    "random:sdxl-fp16vae": (
        _XL,
        {
            "text_encoder": _CLIP_L,
            "text_encoder_2": _OPEN_CLIP_BIG_G,
            "unet": _UNET_SDXL,
            "vae": {**_VAE_SDXL, "force_upcast": False},
        },
        _EULER,
    ),
    "random:sdxl-tiny": (
        _XL,
        {
            "text_encoder": _TINY_CLIP,
            "text_encoder_2": _TINY_CLIP_2,
            "unet": _TINY_UNET_SDXL,
            "vae": _TINY_VAE_SDXL,
        },
        _EULER,
    ),
    "random:pixart-sigma": pixart_sigma(_VAE_SDXL),
}
_TABLE |= {
    f"random:{name}": entry
    for name, entry in sd3_and_flux(_CLIP_L, _OPEN_CLIP_BIG_G, _VAE_SDXL, tiny=False).items()
}
_TABLE |= {
    f"random:{name}-tiny": entry
    for name, entry in sd3_and_flux(_TINY_CLIP, _TINY_CLIP_2, _TINY_VAE_SDXL, tiny=True).items()
}
_CLASSES = {
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "unet": ("diffusers", "UNet2DConditionModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}

RANDOM_SPECS = tuple(sorted(_TABLE))


def is_random_spec(source: object) -> bool:
    """Whether `source` asks for seeded random weights (``"random:…"``), known or not."""
    return isinstance(source, str) and source.startswith(RANDOM_PREFIX)


def architecture(spec: str) -> ModelDescription:
    """The description behind a random spec, as fresh data that the caller may change.

    Args:
        spec: one of `RANDOM_SPECS`.

    Raises:
        CheckpointError: no such spec; the message lists them and names the closest.
    """
    if spec not in _TABLE:
        close = difflib.get_close_matches(spec, RANDOM_SPECS, n=1, cutoff=0.0)
        raise CheckpointError(
            f"no model named {spec!r}; did you mean {close[0]!r}? "
            f"Random weights exist for: {', '.join(RANDOM_SPECS)}"
        )
    pipeline_class, configs, scheduler = copy.deepcopy(_TABLE[spec])
    classes = {**_CLASSES, **CLASSES.get(pipeline_class, {})}
    components = {
        name: ComponentDescription(name, *classes[name], config) for name, config in configs.items()
    }
    vae = configs["vae"]
    return ModelDescription(
        source=spec,
        pipeline_class=pipeline_class,
        components=components,
        default_dtype="float16",
        default_height=vae["sample_size"],
        default_width=vae["sample_size"],
        scheduler=scheduler,
    )
