"""Rows of pipelines that make frames: attention over space and over time."""

from typing import Any

import diffusers
import torch
from diffusers.pipelines.deprecated.text_to_video_synthesis import TextToVideoSDPipeline
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from .parts_case import SIZE, Row, build, picture, run, sd_parts, seeded, unet

FRAMES = {**SIZE, "num_frames": 3}


def animate() -> Any:
    motion = seeded(
        diffusers.MotionAdapter, block_out_channels=(16, 32), motion_layers_per_block=1,
        motion_norm_num_groups=2, motion_num_attention_heads=4,
    )  # fmt: skip
    # motion modules are born with zeros at their end
    for module in motion.modules():
        if isinstance(module, torch.nn.Linear) and not module.weight.any():
            torch.nn.init.normal_(module.weight, 0, 0.1)
    parts = sd_parts(
        motion_adapter=motion, unet=unet(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, beta_schedule="linear"),
    )  # fmt: skip
    return build(diffusers.AnimateDiffPipeline, parts)


def image_encoder() -> Any:
    # the pipeline resizes to 224 pixels, whatever the encoder was made for
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        image_size=224, patch_size=56, projection_dim=32,
    )  # fmt: skip
    return seeded(CLIPVisionModelWithProjection, config)


def stable_video() -> Any:
    model = seeded(
        diffusers.UNetSpatioTemporalConditionModel, block_out_channels=(32, 64), layers_per_block=1,
        sample_size=16, in_channels=8, out_channels=4, addition_time_embed_dim=32,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=32, num_attention_heads=4, projection_class_embeddings_input_dim=96,
    )  # fmt: skip
    decoder = seeded(
        diffusers.AutoencoderKLTemporalDecoder, block_out_channels=(32, 64), latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1, force_upcast=False,
    )  # fmt: skip
    extractor = CLIPImageProcessor(crop_size=32, size=32)
    return build(
        diffusers.StableVideoDiffusionPipeline,
        dict(
            vae=decoder, image_encoder=image_encoder(), unet=model, feature_extractor=extractor,
            scheduler=diffusers.EulerDiscreteScheduler(prediction_type="v_prediction"),
        ),
    )  # fmt: skip


def move(pipe: Any) -> Tensor:
    return run(
        pipe, prompt=None, negative_prompt=None, guidance_scale=None, image=picture(),
        min_guidance_scale=1.0, max_guidance_scale=2.5, **FRAMES,
    )  # fmt: skip


def text_to_video() -> Any:
    model = seeded(
        diffusers.UNet3DConditionModel, block_out_channels=(16, 32), layers_per_block=1,
        sample_size=16, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), cross_attention_dim=32,
        attention_head_dim=4, norm_num_groups=2,
    )  # fmt: skip
    return build(TextToVideoSDPipeline, sd_parts(unet=model))


ROWS = [
    Row(16, "animatediff", animate, lambda pipe: run(pipe, **FRAMES), 40),
    Row(17, "stable video", stable_video, move, 20),
    Row(25, "text to video", text_to_video, lambda pipe: run(pipe, **FRAMES), 22),
]
