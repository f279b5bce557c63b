"""Rows of SDXL with its two CLIP encoders."""

from typing import Any

import diffusers

from .parts_case import SIZE, XL, Row, build, mask, picture, run, seeded, unet, xl_parts

#: The refiner's way of conditioning: five time ids, and the pooled output of one encoder.
AESTHETIC = XL | {"projection_class_embeddings_input_dim": 72}


def xl(cls: type, base: dict[str, Any] = XL, **changes: Any) -> Any:
    return build(
        cls, xl_parts(unet=unet(**base | changes), requires_aesthetics_score=base is not XL)
    )


def adapter() -> Any:
    model = seeded(
        diffusers.T2IAdapter, channels=[16, 32], num_res_blocks=1, downscale_factor=4,
        adapter_type="full_adapter_xl",
    )  # fmt: skip
    return build(diffusers.StableDiffusionXLAdapterPipeline, xl_parts(adapter=model))


def pag() -> Any:
    parts = xl_parts(pag_applied_layers=["mid", "up"])
    return build(diffusers.StableDiffusionXLPAGPipeline, parts)


ROWS = [
    Row(
        1, "sdxl", lambda: xl(diffusers.StableDiffusionXLPipeline),
        lambda pipe: run(pipe, **SIZE), 22,
    ),
    Row(
        2, "sdxl img2img", lambda: xl(diffusers.StableDiffusionXLImg2ImgPipeline, AESTHETIC),
        lambda pipe: run(pipe, image=picture(), strength=1.0), 22,
    ),
    Row(
        3, "sdxl inpaint", lambda: xl(diffusers.StableDiffusionXLInpaintPipeline, AESTHETIC),
        lambda pipe: run(pipe, image=picture(), mask_image=mask(), strength=1.0, **SIZE), 22,
    ),
    Row(
        4, "sdxl pix2pix",
        lambda: xl(diffusers.StableDiffusionXLInstructPix2PixPipeline, in_channels=8),
        lambda pipe: run(pipe, image=picture(), **SIZE), 22,
    ),
    Row(12, "sdxl adapter", adapter, lambda pipe: run(pipe, image=picture(), **SIZE), 22),
    Row(13, "sdxl pag", pag, lambda pipe: run(pipe, pag_scale=0.9, **SIZE), 22, once=False),
]  # fmt: skip
