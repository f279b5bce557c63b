"""The demo model: SDXL's own classes in a size that fits in a Python package.

10.4 million parameters, 19.9 MiB in fp16. Each part is what SDXL has: the same block types, two
text encoders of different width whose last hidden states but one are joined, size conditioning.
"""

from typing import Any

from words import LENGTH, Merge, make_tokenizer

__all__ = ["PROMPT_PARTS", "SCHEDULER", "build", "pipeline"]

#: VAE: 8 × down and 4 channels, so that inpainting and img2img find what they expect. 48 channels
#: at full size, where the edges are: flat pictures need them more than width further down.
VAE: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": [48, 64, 96, 96],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "norm_num_groups": 16,
    "sample_size": 128,
    # the latents are brought to mean 0 and deviation 1 inside the weights (train_vae.normalise)
    "scaling_factor": 1.0,
    "force_upcast": False,
}
_CLIP: dict[str, Any] = {
    "num_hidden_layers": 2,
    "max_position_embeddings": LENGTH,
    "layer_norm_eps": 1e-5,
    "bos_token_id": 0,
    # as in CLIP's own files: "pool at the highest id of the row", which is the end of the text
    "eos_token_id": 2,
    "pad_token_id": 1,
}
CLIP_1 = {
    **_CLIP,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "projection_dim": 64,
    "hidden_act": "quick_gelu",
}
CLIP_2 = {
    **_CLIP,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "projection_dim": 128,
    "hidden_act": "gelu",
}
UNET: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [64, 128, 128],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "transformer_layers_per_block": [1, 1, 1],
    "attention_head_dim": [2, 4, 4],  # heads; each of 32 dimensions
    "cross_attention_dim": 64 + 128,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 16,
    "projection_class_embeddings_input_dim": 128 + 6 * 16,
    "norm_num_groups": 16,
}
#: DDPM's linear schedule ends at a signal-to-noise ratio of 4e-5, so pure noise at inference is
#: what training saw, and white stays white; v-prediction is defined there. No sampler needs to
#: know a special flag for it.
SCHEDULER: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    # for the samplers that clip unless told otherwise: latents are not pixels
    "clip_sample": False,
    "set_alpha_to_one": True,
}
PROMPT_PARTS = ("text_encoder", "text_encoder_2", "unet")


def build(part: str, vocabulary: int) -> Any:
    """One untrained module: "vae", "unet", "text_encoder" or "text_encoder_2"."""
    import diffusers
    import transformers

    if part == "vae":
        return diffusers.AutoencoderKL(**VAE)
    if part == "unet":
        return diffusers.UNet2DConditionModel(**UNET)
    if part == "text_encoder":
        config = transformers.CLIPTextConfig(vocab_size=vocabulary, **CLIP_1)
        return transformers.CLIPTextModel(config)
    config = transformers.CLIPTextConfig(vocab_size=vocabulary, **CLIP_2)
    return transformers.CLIPTextModelWithProjection(config)


def pipeline(parts: dict[str, Any], merges: list[Merge]) -> Any:
    """A StableDiffusionXLPipeline from the four modules and the tokenizer's merges."""
    import diffusers

    scheduler = diffusers.EulerDiscreteScheduler.from_config(SCHEDULER)
    return diffusers.StableDiffusionXLPipeline(
        **parts,
        tokenizer=make_tokenizer(merges),
        tokenizer_2=make_tokenizer(merges, pad_token="!"),
        scheduler=scheduler,
        add_watermarker=False,
    )
