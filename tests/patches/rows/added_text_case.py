"""Rows whose UNets join the text's keys to their own, and their T5 or image-embedding priors."""

from typing import Any

import diffusers
from torch import Tensor

from .parts_case import SIZE, Row, build, embeds, run, seeded, t5, t5_tokenizer, unet

SIMPLE: dict[str, Any] = dict(
    down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    mid_block_type="UNetMidBlock2DSimpleCrossAttn",
    up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    resnet_time_scale_shift="scale_shift", act_fn="gelu", attention_head_dim=8,
)  # fmt: skip


def deepfloyd() -> Any:
    model = unet(
        **SIMPLE, in_channels=3, out_channels=6, encoder_hid_dim=32, addition_embed_type="text",
        addition_embed_type_num_heads=2, cross_attention_norm="group_norm",
        time_embedding_act_fn="gelu",
    )  # fmt: skip
    parts = dict(
        unet=model, text_encoder=t5(), tokenizer=t5_tokenizer(), safety_checker=None,
        scheduler=diffusers.DDPMScheduler(variance_type="learned_range", thresholding=True),
        feature_extractor=None, watermarker=None, requires_safety_checker=False,
    )  # fmt: skip
    return build(diffusers.IFPipeline, parts)


def movq(**changes: Any) -> Any:
    # its spatial norm is fixed at 32 groups
    settings: dict[str, Any] = dict(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",
        "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"), latent_channels=4,
        num_vq_embeddings=12, norm_num_groups=32, vq_embed_dim=4, norm_type="spatial",
    )  # fmt: skip
    return seeded(diffusers.VQModel, **settings | changes)


def kandinsky_22() -> Any:
    model = unet(
        **SIMPLE, out_channels=8, encoder_hid_dim=32, encoder_hid_dim_type="image_proj",
        addition_embed_type="image",
    )  # fmt: skip
    scheduler = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False)
    return build(diffusers.KandinskyV22Pipeline, dict(unet=model, scheduler=scheduler, movq=movq()))


def from_image(pipe: Any) -> Tensor:
    return run(
        pipe, prompt=None, negative_prompt=None, image_embeds=embeds(1, 32),
        negative_image_embeds=embeds(1, 32, seed=6), **SIZE,
    )  # fmt: skip


def kandinsky_3() -> Any:
    model = seeded(
        diffusers.Kandinsky3UNet, in_channels=4, time_embedding_dim=4, groups=2,
        attention_head_dim=4, layers_per_block=2, block_out_channels=(32, 64),
        cross_attention_dim=4, encoder_hid_dim=32,
    )  # fmt: skip
    parts = dict(
        unet=model, movq=movq(), scheduler=diffusers.DDPMScheduler(), text_encoder=t5(),
        tokenizer=t5_tokenizer(),
    )  # fmt: skip
    return build(diffusers.Kandinsky3Pipeline, parts)


ROWS = [
    Row(18, "if", deepfloyd, lambda pipe: run(pipe, clean_caption=False, **SIZE), 0, once=False),
    Row(19, "kandinsky 2.2", kandinsky_22, from_image, 4, once=False),
    Row(20, "kandinsky 3", kandinsky_3, lambda pipe: run(pipe, **SIZE), 10, once=False),
]
