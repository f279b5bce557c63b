"""Rows with one or several ControlNets beside the UNet."""

from typing import Any

import diffusers
from torch import Tensor

from .parts_case import (
    SIZE,
    XL,
    Row,
    build,
    mask,
    picture,
    pixels,
    run,
    sd_parts,
    seeded,
    unet,
    xl_parts,
)

BOTH = ("unet", "controlnet")


def controlnet(cls: type = diffusers.ControlNetModel, **changes: Any) -> Any:
    settings: dict[str, Any] = dict(
        block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=32,
        attention_head_dim=4, conditioning_embedding_out_channels=(16, 32),
    )  # fmt: skip
    model = seeded(cls, **settings | changes)
    # a fresh ControlNet ends in zeros, so that training starts from the bare UNet: it would be
    # computed and then multiplied away
    for out in (*model.controlnet_down_blocks, model.controlnet_mid_block):
        out.weight.data.normal_(0, 0.05)
    return model


def single(cls: type, **unet_changes: Any) -> Any:
    return build(cls, sd_parts(unet=unet(**unet_changes), controlnet=controlnet()))


def several() -> Any:
    nets = diffusers.MultiControlNetModel([controlnet(), controlnet()])
    return build(diffusers.StableDiffusionControlNetPipeline, sd_parts(controlnet=nets))


def xl(cls: type) -> Any:
    return build(cls, xl_parts(controlnet=controlnet(**XL)))


def union() -> Any:
    net = controlnet(
        diffusers.ControlNetUnionModel, **XL, num_trans_channel=16, num_trans_head=4,
        num_proj_channel=16,
    )  # fmt: skip
    return build(diffusers.StableDiffusionXLControlNetUnionPipeline, xl_parts(controlnet=net))


def guided(pipe: Any) -> Tensor:
    return run(pipe, image=side(), **SIZE)


def side() -> Tensor:
    # twice the size: its embedding halves what the autoencoder halves as well
    return pixels(seed=2)


ROWS = [
    Row(
        9, "controlnet", lambda: single(diffusers.StableDiffusionControlNetPipeline), guided, 16,
        parts=BOTH,
    ),
    Row(
        9, "two controlnets", several, lambda pipe: run(pipe, image=[side(), side()], **SIZE), 20,
        parts=BOTH,
    ),
    Row(
        9, "controlnet inpaint",
        lambda: single(diffusers.StableDiffusionControlNetInpaintPipeline, in_channels=9),
        lambda pipe: run(
            pipe, image=picture(), mask_image=mask(), control_image=side(), strength=1.0, **SIZE
        ), 16, parts=BOTH,
    ),
    Row(
        10, "sdxl controlnet", lambda: xl(diffusers.StableDiffusionXLControlNetPipeline), guided,
        30,
        parts=BOTH,
    ),
    Row(
        10, "sdxl controlnet img2img",
        lambda: xl(diffusers.StableDiffusionXLControlNetImg2ImgPipeline),
        lambda pipe: run(pipe, image=picture(), control_image=side(), strength=1.0, **SIZE), 30,
        parts=BOTH,
    ),
    Row(
        11, "sdxl controlnet union", union,
        lambda pipe: run(pipe, control_image=[picture(2)], control_mode=[0], **SIZE), 30,
        parts=BOTH,
    ),
]  # fmt: skip
