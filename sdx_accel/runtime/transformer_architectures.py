"""Public architectures with transformers as data: SD 3, FLUX.1, PixArt-Sigma, and tiny twins.

Configurations only, as in `architectures`, which has the table of names.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CLASSES", "pixart_sigma", "sd3_and_flux"]

_Configs = dict[str, dict[str, Any]]
_Scheduler = tuple[str, dict[str, Any]]

# The encoder of google/t5-v1_1-xxl, which all three read their prompts with.
_T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
}
# wider than both CLIP texts together, so that theirs are padded as in the real model
_TINY_T5 = {
    **_T5_XXL,
    "vocab_size": 128,
    "d_model": 192,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 2,
}

_SD3_MEDIUM = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
}
# room for 24 patches a side: 384 pixels
_TINY_SD3 = {
    **_SD3_MEDIUM,
    "sample_size": 16,
    "num_layers": 3,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 192,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 64 + 96,
    "pos_embed_max_size": 24,
}
_FLUX_DEV = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": [16, 56, 56],
}
_TINY_FLUX = {
    **_FLUX_DEV,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 192,
    "pooled_projection_dim": 64,
    "axes_dims_rope": [8, 12, 12],
}
_PIXART_SIGMA = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "attention_head_dim": 72,
    "num_attention_heads": 16,
    "cross_attention_dim": 1152,
    "caption_channels": 4096,
    "attention_bias": True,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "use_additional_conditions": False,
}

# autoencoders of 16 channels have no convolutions around their latents
_16_CHANNELS = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
_VAE_SD3 = {**_16_CHANNELS, "scaling_factor": 1.5305, "shift_factor": 0.0609}
_VAE_FLUX = {**_16_CHANNELS, "scaling_factor": 0.3611, "shift_factor": 0.1159}

_FLOW = "FlowMatchEulerDiscreteScheduler"
_FLOW_SD3 = (_FLOW, {"num_train_timesteps": 1000, "shift": 3.0})
_FLOW_FLUX = (
    _FLOW,
    {
        "num_train_timesteps": 1000,
        "shift": 3.0,
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
    },
)
_DPM_SIGMA = (
    "DPMSolverMultistepScheduler",
    {
        "beta_start": 0.0001,
        "beta_end": 0.02,
        "beta_schedule": "linear",
        "num_train_timesteps": 1000,
        "prediction_type": "epsilon",
        "solver_order": 2,
        "algorithm_type": "dpmsolver++",
    },
)

_PROJECTED = ("transformers", "CLIPTextModelWithProjection")
_T5 = ("transformers", "T5EncoderModel")
#: by class of pipeline, the classes of components that differ from Stable Diffusion's
CLASSES = {
    "StableDiffusion3Pipeline": {
        "text_encoder": _PROJECTED,
        "text_encoder_2": _PROJECTED,
        "text_encoder_3": _T5,
        "transformer": ("diffusers", "SD3Transformer2DModel"),
    },
    "FluxPipeline": {
        "text_encoder_2": _T5,
        "transformer": ("diffusers", "FluxTransformer2DModel"),
    },
    "PixArtSigmaPipeline": {
        "text_encoder": _T5,
        "transformer": ("diffusers", "PixArtTransformer2DModel"),
    },
}


def sd3_and_flux(
    clip: dict[str, Any], clip_2: dict[str, Any], vae: dict[str, Any], *, tiny: bool
) -> dict[str, tuple[str, _Configs, _Scheduler]]:
    """The two models by short name, as `architectures` lists them.

    Args:
        clip, clip_2: the text encoders that both share with SDXL.
        vae: of which theirs differ in channels and scales.
        tiny: the tiny twins.
    """
    t5 = _TINY_T5 if tiny else _T5_XXL
    sd3 = {
        "text_encoder": clip,
        "text_encoder_2": clip_2,
        "text_encoder_3": t5,
        "transformer": _TINY_SD3 if tiny else _SD3_MEDIUM,
        "vae": {**vae, **_VAE_SD3},
    }
    flux = {
        "text_encoder": clip,
        "text_encoder_2": t5,
        "transformer": _TINY_FLUX if tiny else _FLUX_DEV,
        "vae": {**vae, **_VAE_FLUX},
    }
    return {
        "sd3": ("StableDiffusion3Pipeline", sd3, _FLOW_SD3),
        "flux": ("FluxPipeline", flux, _FLOW_FLUX),
    }


def pixart_sigma(vae: dict[str, Any]) -> tuple[str, _Configs, _Scheduler]:
    """PixArt-Sigma XL at 1024 pixels.

    Args:
        vae: SDXL's, which it shares.
    """
    configs = {"text_encoder": _T5_XXL, "transformer": _PIXART_SIGMA, "vae": vae}
    return "PixArtSigmaPipeline", configs, _DPM_SIGMA
