"""Rows of Stable Diffusion 1 and 2 and their relatives with one CLIP encoder."""

from typing import Any

import diffusers
import torch
from torch import Tensor

from .parts_case import (
    SIZE,
    Row,
    build,
    embeds,
    mask,
    noise,
    picture,
    pixels,
    run,
    sd_parts,
    seeded,
    unet,
)


def sd(cls: type, **unet_changes: Any) -> Any:
    return build(cls, sd_parts(unet=unet(**unet_changes)))


def text_to_image(pipe: Any) -> Tensor:
    return run(pipe, **SIZE)


def upscaler() -> Any:
    model = unet(in_channels=7, only_cross_attention=(False, True), num_class_embeds=1000)
    parts = sd_parts(
        unet=model,
        low_res_scheduler=diffusers.DDPMScheduler(),
        max_noise_level=350,
        watermarker=None,
    )
    return build(diffusers.StableDiffusionUpscalePipeline, parts)


def latent_upscaler() -> Any:
    # its groups are of 32 channels and its heads of 8, whatever the sizes
    model = unet(
        in_channels=8, out_channels=5, block_out_channels=(32, 32, 64, 64), norm_num_groups=None,
        down_block_types=("KDownBlock2D", *("KCrossAttnDownBlock2D",) * 3),
        up_block_types=(*("KCrossAttnUpBlock2D",) * 3, "KUpBlock2D"), mid_block_type=None,
        act_fn="gelu", attention_head_dim=8, conv_in_kernel=1, conv_out_kernel=1,
        resnet_time_scale_shift="scale_shift", time_cond_proj_dim=160,
        time_embedding_type="fourier",
        timestep_post_act="gelu", cross_attention_norm="layer_norm", only_cross_attention=False,
    )  # fmt: skip
    parts = sd_parts(
        unet=model, scheduler=diffusers.EulerDiscreteScheduler(prediction_type="sample")
    )
    return build(diffusers.StableDiffusionLatentUpscalePipeline, parts)


def adapter() -> Any:
    # its first features have the size of the first block's output, so that one may not downsample
    model = unet(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    net = seeded(diffusers.T2IAdapter, channels=[16, 32], num_res_blocks=1, downscale_factor=2)
    parts = sd_parts(unet=model, adapter=net)
    return build(diffusers.StableDiffusionAdapterPipeline, parts)


def consistency() -> Any:
    parts = sd_parts(unet=unet(time_cond_proj_dim=32), scheduler=diffusers.LCMScheduler())
    return build(diffusers.LatentConsistencyModelPipeline, parts)


def pag() -> Any:
    parts = sd_parts(pag_applied_layers=["mid", "up"])
    return build(diffusers.StableDiffusionPAGPipeline, parts)


def marigold() -> Any:
    parts = sd_parts(
        unet=unet(in_channels=8), prediction_type="depth", default_denoising_steps=1,
        default_processing_resolution=32,
    )  # fmt: skip
    return build(diffusers.MarigoldDepthPipeline, parts)


def estimate(pipe: Any) -> Tensor:
    depth = pipe(
        pixels(), num_inference_steps=2, generator=noise(), output_type="pt",
        processing_resolution=32,
    ).prediction  # fmt: skip
    return torch.as_tensor(depth)


def enlarge(pipe: Any) -> Tensor:
    return run(pipe, image=pixels(side=16), noise_level=20)


def enlarge_latents(pipe: Any) -> Tensor:
    return run(pipe, image=embeds(1, 4, 16, 16))


ROWS = [
    Row(5, "sd", lambda: sd(diffusers.StableDiffusionPipeline), text_to_image, 12),
    Row(
        5, "sd upcast", lambda: sd(diffusers.StableDiffusionPipeline, upcast_attention=True),
        text_to_image, 12,
    ),
    Row(
        5, "sd 2", lambda: sd(diffusers.StableDiffusionPipeline, use_linear_projection=True),
        text_to_image, 12,
    ),
    Row(
        6, "sd img2img", lambda: sd(diffusers.StableDiffusionImg2ImgPipeline),
        lambda pipe: run(pipe, image=picture(), strength=1.0), 12,
    ),
    Row(
        6, "sd inpaint", lambda: sd(diffusers.StableDiffusionInpaintPipeline, in_channels=9),
        lambda pipe: run(pipe, image=picture(), mask_image=mask(), strength=1.0, **SIZE), 12,
    ),
    Row(
        6, "sd pix2pix", lambda: sd(diffusers.StableDiffusionInstructPix2PixPipeline,
        in_channels=8),
        lambda pipe: run(pipe, image=picture()), 12,
    ),
    Row(7, "sd upscale", upscaler, enlarge, 12),
    Row(8, "sd latent upscale", latent_upscaler, enlarge_latents, 12),
    Row(12, "sd adapter", adapter, lambda pipe: run(pipe, image=picture(), **SIZE), 12),
    Row(13, "sd pag", pag, lambda pipe: run(pipe, pag_scale=0.9, **SIZE), 12, once=False),
    Row(14, "lcm", consistency, lambda pipe: run(pipe, negative_prompt=None, **SIZE), 12),
    Row(22, "marigold depth", marigold, estimate, 12),
]  # fmt: skip
