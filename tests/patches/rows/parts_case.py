"""What the rows are made of: seeded tiny parts, and a `Row` = how one pipeline is built and called.

Nothing here knows sdx_patches: a row is the stock pipeline, whatever is done to it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from PIL import Image
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from sdx_accel.runtime.offline_tokenizer import build_tokenizer

#: Pixels of a side; the autoencoder halves them, the UNet halves them again.
SIDE = 32
SIZE = {"height": SIDE, "width": SIDE}


@dataclass(frozen=True)
class Row:
    """One pipeline class of the compatibility table.

    Args:
        number: its row in the table.
        name: unique, for test ids.
        build: makes it, with equal weights every time.
        call: runs it with equal noise every time and returns its pictures (or latents).
        patched: at least so many attention layers go through our op.
        once: each patched layer calls our op exactly once a forward; False where a layer may
            have a second source of keys (an image prompt, added text) or is swapped in the call.
        parts: the components whose outputs are compared as well; the pictures are clamped.
    """

    number: int
    name: str
    build: Callable[[], Any]
    call: Callable[[Any], Tensor]
    patched: int
    once: bool = True
    parts: tuple[str, ...] = ("unet",)


def noise(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(seed: int = 1, side: int = SIDE) -> Image.Image:
    pixels = numpy.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def mask() -> Image.Image:
    pixels = numpy.zeros((SIDE, SIDE), dtype=numpy.uint8)
    pixels[:, SIDE // 2 :] = 255
    return Image.fromarray(pixels)


def pixels(seed: int = 1, side: int = SIDE) -> Tensor:
    """(1, 3, side, side) in 0…1."""
    return torch.rand(1, 3, side, side, generator=noise(seed))


def embeds(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=noise(seed))


def tokenizer() -> Any:
    return build_tokenizer(600)


def text_config(**changes: Any) -> CLIPTextConfig:
    settings: dict[str, Any] = dict(
        vocab_size=600, hidden_size=32, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=4, projection_dim=32, bos_token_id=598, eos_token_id=599,
        pad_token_id=599,
    )  # fmt: skip
    return CLIPTextConfig(**settings | changes)


def seeded(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The model that `make` builds, its random weights always the same, in inference mode."""
    torch.manual_seed(0)
    return make(*args, **kwargs).eval()


def clip(**changes: Any) -> CLIPTextModel:
    return seeded(CLIPTextModel, text_config(**changes))


def clip_projected(**changes: Any) -> CLIPTextModelWithProjection:
    return seeded(CLIPTextModelWithProjection, text_config(**changes))


def t5() -> T5EncoderModel:
    config = T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    return seeded(T5EncoderModel, config)


def t5_tokenizer() -> T5Tokenizer:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    vocab = [(piece, -float(rank)) for rank, piece in enumerate(pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=77)


def vae(**changes: Any) -> AutoencoderKL:
    settings: dict[str, Any] = dict(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=8,
        sample_size=SIDE, force_upcast=False,
    )  # fmt: skip
    return seeded(AutoencoderKL, **settings | changes)


def unet(**changes: Any) -> UNet2DConditionModel:
    settings: dict[str, Any] = dict(
        block_out_channels=(16, 32), layers_per_block=1, sample_size=SIDE // 2, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=4,
    )  # fmt: skip
    return seeded(UNet2DConditionModel, **settings | changes)


#: What makes a UNet (or a ControlNet) an SDXL one; 6 time ids of 8 channels and 32 pooled.
XL: dict[str, Any] = dict(
    attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time",
    addition_time_embed_dim=8, projection_class_embeddings_input_dim=80,
    transformer_layers_per_block=(1, 2), cross_attention_dim=64,
)  # fmt: skip


def scheduler() -> DDIMScheduler:
    return DDIMScheduler(clip_sample=False, set_alpha_to_one=False)


def sd_parts(**changes: Any) -> dict[str, Any]:
    parts: dict[str, Any] = dict(
        vae=vae(), text_encoder=clip(), tokenizer=tokenizer(), scheduler=scheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    return parts | (changes if "unet" in changes else {"unet": unet(), **changes})


def xl_parts(**changes: Any) -> dict[str, Any]:
    parts: dict[str, Any] = dict(
        vae=vae(), text_encoder=clip(), text_encoder_2=clip_projected(), tokenizer=tokenizer(),
        tokenizer_2=tokenizer(), scheduler=scheduler(), add_watermarker=False,
    )  # fmt: skip
    return parts | (changes if "unet" in changes else {"unet": unet(**XL), **changes})


def build(cls: type, parts: dict[str, Any]) -> Any:
    """The pipeline, without its progress bars; arguments that a class has not are dropped."""
    known = inspect.signature(cls.__init__).parameters
    pipe = cls(**{name: part for name, part in parts.items() if name in known})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe: Any, **call: Any) -> Tensor:
    """Two steps with guidance from the same noise; the pictures as a tensor."""
    arguments: dict[str, Any] = dict(
        prompt="a red house", negative_prompt="blue", num_inference_steps=2, guidance_scale=5.0,
        generator=noise(), output_type="pt",
    )  # fmt: skip
    arguments |= call
    out = pipe(**{name: value for name, value in arguments.items() if value is not None})
    found = out[0] if isinstance(out, tuple) else next(iter(out.values()))
    return found if isinstance(found, Tensor) else torch.as_tensor(numpy.asarray(found))


def attentions(root: Any) -> list[tuple[str, nn.Module]]:
    """Every module with a processor, and every text encoder's attention, by path."""
    parts = {"": root} if isinstance(root, nn.Module) else root.components
    return [
        (f"{name}.{path}".strip("."), module)
        for name, part in parts.items()
        if isinstance(part, nn.Module)
        for path, module in part.named_modules()
        if hasattr(module, "processor") or type(module).__name__ in ("CLIPAttention", "T5Attention")
    ]
