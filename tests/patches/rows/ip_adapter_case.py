"""Rows with an IP-Adapter: cross-attention that reads the tokens of an image prompt as well."""

from typing import Any

import diffusers
import torch
from torch import Tensor

from .parts_case import SIZE, XL, Row, build, embeds, run, sd_parts, unet, xl_parts

TOKENS, WIDTH = 4, 32


def weights(model: Any) -> dict[str, dict[str, Tensor]]:
    """An adapter for `model` in the layout of the published files, its weights random."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    cross = model.config.cross_attention_dim
    layers: dict[str, Tensor] = {}
    names = [name for name in model.attn_processors if "attn2" in name]
    for index, name in enumerate(names):
        inner = model.get_submodule(name.removesuffix(".processor")).to_q.weight.shape[0]
        # the files number self-attention too: only the odd ones are there
        layers[f"{2 * index + 1}.to_k_ip.weight"] = draw(inner, cross)
        layers[f"{2 * index + 1}.to_v_ip.weight"] = draw(inner, cross)
    projection = {
        "proj.weight": draw(TOKENS * cross, WIDTH), "proj.bias": draw(TOKENS * cross),
        "norm.weight": torch.ones(cross), "norm.bias": torch.zeros(cross),
    }  # fmt: skip
    return {"image_proj": projection, "ip_adapter": layers}


def adapted(cls: type, parts: dict[str, Any], adapters: int = 1) -> Any:
    pipe = build(cls, parts)
    pipe.unet._load_ip_adapter_weights([weights(pipe.unet)] * adapters)
    return pipe


def prompted(pipe: Any, adapters: int = 1, **call: Any) -> Tensor:
    # (unconditional and prompt, images, width)
    image = [embeds(2, 1, WIDTH, seed=9 + n) for n in range(adapters)]
    return run(pipe, ip_adapter_image_embeds=image, **SIZE, **call)


def masked(pipe: Any) -> Tensor:
    half = torch.zeros(1, 1, 32, 32)
    half[..., 16:] = 1
    return prompted(pipe, cross_attention_kwargs={"ip_adapter_masks": [half]})


ROWS = [
    Row(
        15, "sd ip-adapter", lambda: adapted(diffusers.StableDiffusionPipeline, sd_parts()),
        prompted, 8, once=False,
    ),
    Row(
        15, "sd two ip-adapters", lambda: adapted(diffusers.StableDiffusionPipeline, sd_parts(), 2),
        lambda pipe: prompted(pipe, 2), 8, once=False,
    ),
    Row(
        15, "sd ip-adapter masked", lambda: adapted(diffusers.StableDiffusionPipeline, sd_parts()),
        masked, 8, once=False,
    ),
    Row(
        15, "sdxl ip-adapter",
        lambda: adapted(diffusers.StableDiffusionXLPipeline, xl_parts(unet=unet(**XL))),
        prompted, 14, once=False,
    ),
]  # fmt: skip
