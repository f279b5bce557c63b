"""Rows of models that are no UNets of blocks: Stable Cascade and three transformers."""

from typing import Any

import diffusers
import torch
from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel
from torch import Tensor

from .parts_case import (
    SIZE,
    Row,
    build,
    clip,
    clip_projected,
    embeds,
    run,
    seeded,
    t5,
    t5_tokenizer,
    tokenizer,
    vae,
)


def cascade() -> Any:
    decoder = seeded(
        diffusers.StableCascadeUNet, in_channels=4, out_channels=4, conditioning_dim=32,
        timestep_ratio_embedding_dim=8, block_out_channels=(16, 32), num_attention_heads=(-1, 4),
        down_num_layers_per_block=(1, 1), up_num_layers_per_block=(1, 1), clip_text_in_channels=32,
        clip_text_pooled_in_channels=32, effnet_in_channels=4, pixel_mapper_in_channels=3,
        patch_size=2, dropout=(0.0, 0.0), down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1), self_attn=True,
        block_types_per_layer=(
            ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
            ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
        ),
    )  # fmt: skip
    vqgan = seeded(PaellaVQModel, bottleneck_blocks=1, num_vq_embeddings=2, embed_dim=16, levels=2)
    return build(
        diffusers.StableCascadeDecoderPipeline,
        dict(
            decoder=decoder, text_encoder=clip_projected(), tokenizer=tokenizer(), vqgan=vqgan,
            scheduler=diffusers.DDPMWuerstchenScheduler(), latent_dim_scale=4.0,
        ),
    )  # fmt: skip


def pixart() -> Any:
    model = seeded(
        diffusers.PixArtTransformer2DModel, sample_size=16, num_layers=2, patch_size=2,
        attention_head_dim=8, num_attention_heads=4, caption_channels=32, in_channels=4,
        cross_attention_dim=32, out_channels=8, attention_bias=True,
        use_additional_conditions=False,
    )  # fmt: skip
    parts = dict(
        transformer=model, vae=vae(), text_encoder=t5(), tokenizer=t5_tokenizer(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False),
    )  # fmt: skip
    return build(diffusers.PixArtAlphaPipeline, parts)


def sd3() -> Any:
    model = seeded(
        diffusers.SD3Transformer2DModel, sample_size=16, patch_size=1, in_channels=4, num_layers=1,
        attention_head_dim=8, num_attention_heads=4, caption_projection_dim=32,
        joint_attention_dim=32, pooled_projection_dim=64, out_channels=4, pos_embed_max_size=16,
    )  # fmt: skip
    parts = dict(
        transformer=model, vae=vae(shift_factor=0.1),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=clip_projected(), text_encoder_2=clip_projected(), text_encoder_3=t5(),
        tokenizer=tokenizer(), tokenizer_2=tokenizer(), tokenizer_3=t5_tokenizer(),
    )  # fmt: skip
    return build(diffusers.StableDiffusion3Pipeline, parts)


def flux(in_channels: int = 4) -> Any:
    return seeded(
        diffusers.FluxTransformer2DModel, patch_size=1, in_channels=in_channels, num_layers=1,
        num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def flux_pipeline() -> Any:
    # the pipeline packs 2 × 2 latents into one token
    parts = dict(
        transformer=flux(in_channels=16), vae=vae(shift_factor=0.1), text_encoder=clip(),
        tokenizer=tokenizer(), text_encoder_2=t5(), tokenizer_2=t5_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    return build(diffusers.FluxPipeline, parts)


def denoise(model: Any) -> Tensor:
    with torch.no_grad():
        return model(
            hidden_states=embeds(1, 16, 4), encoder_hidden_states=embeds(1, 7, 32, seed=6),
            pooled_projections=embeds(1, 32, seed=8), timestep=torch.tensor([0.5]),
            img_ids=torch.arange(16)[:, None].expand(16, 3).float(), txt_ids=torch.zeros(7, 3),
        ).sample  # fmt: skip


ROWS = [
    Row(
        21, "stable cascade decoder", cascade,
        lambda pipe: run(pipe, image_embeddings=embeds(1, 4, 4, 4)), 4, parts=("decoder",),
    ),
    Row(
        23, "pixart alpha", pixart,
        lambda pipe: run(pipe, use_resolution_binning=False, clean_caption=False, **SIZE), 6,
        parts=("transformer",), once=False,
    ),
    Row(24, "sd3", sd3, lambda pipe: run(pipe, **SIZE), 6, parts=("transformer",), once=False),
    Row(26, "flux transformer", flux, denoise, 2, parts=()),
    Row(
        26, "flux", flux_pipeline, lambda pipe: run(pipe, max_sequence_length=16, **SIZE), 6,
        parts=("transformer",),
    ),
]  # fmt: skip
