"""Tiny Stable Diffusion and SDXL pipelines with seeded random weights, built without a network."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from sdx_patches import attention, text_encoders

Build = Callable[..., Any]


def _tokenizer() -> CLIPTokenizer:
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(letter + "</w>" for letter in letters)]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {"<|startoftext|>": len(words), "<|endoftext|>": len(words) + 1}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def _text_config(**changes: Any) -> CLIPTextConfig:
    settings: dict[str, Any] = dict(
        vocab_size=1000, hidden_size=32, intermediate_size=37, num_hidden_layers=3,
        num_attention_heads=4, projection_dim=32, bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    return CLIPTextConfig(**settings | changes)


def _vae() -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(32, 32, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
    ).eval()


def _unet(**changes: Any) -> UNet2DConditionModel:
    settings: dict[str, Any] = dict(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=8, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=4,
    )  # fmt: skip
    torch.manual_seed(0)
    return UNet2DConditionModel(**settings | changes).eval()


def _scheduler() -> DDIMScheduler:
    return DDIMScheduler(clip_sample=False, set_alpha_to_one=False)


def _sd(**unet: Any) -> StableDiffusionPipeline:
    torch.manual_seed(0)
    encoder = CLIPTextModel(_text_config()).eval()
    pipe = StableDiffusionPipeline(
        vae=_vae(), text_encoder=encoder, tokenizer=_tokenizer(), unet=_unet(**unet),
        scheduler=_scheduler(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _sdxl(config: CLIPTextConfig | None = None) -> StableDiffusionXLPipeline:
    config = config or _text_config()
    torch.manual_seed(0)
    first = CLIPTextModel(config).eval()
    second = CLIPTextModelWithProjection(config).eval()
    unet = _unet(
        attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=80,
        transformer_layers_per_block=(1, 2), cross_attention_dim=64,
    )  # fmt: skip
    pipe = StableDiffusionXLPipeline(
        vae=_vae(), text_encoder=first, text_encoder_2=second, tokenizer=_tokenizer(),
        tokenizer_2=_tokenizer(), unet=unet, scheduler=_scheduler(), add_watermarker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _latents(pipe: Any, **call: Any) -> torch.Tensor:
    arguments: dict[str, Any] = dict(
        prompt="a red house", negative_prompt="blue", num_inference_steps=2, height=64, width=64,
        guidance_scale=5.0, output_type="latent",
    )  # fmt: skip
    if "generator" not in call:
        call["generator"] = torch.Generator().manual_seed(7)
    return pipe(**arguments | call).images


@pytest.fixture
def text_config() -> Build:
    """Configuration of a tiny CLIP text encoder."""
    return _text_config


@pytest.fixture
def tiny_unet() -> Build:
    """Builds a UNet of 64 channels with six attention layers."""
    return _unet


@pytest.fixture
def tiny_sd() -> Build:
    """Builds Stable Diffusion in miniature; equal weights every time."""
    return _sd


@pytest.fixture
def tiny_sdxl() -> Build:
    """Builds SDXL in miniature; equal weights every time; takes a shared text configuration."""
    return _sdxl


@pytest.fixture
def latents() -> Build:
    """Runs a pipeline for two steps and returns its latents; equal noise every time."""
    return _latents


@pytest.fixture
def unet_out() -> Build:
    """Runs a tiny UNet once; equal inputs every time."""

    def run(unet: UNet2DConditionModel, tokens: int = 7, **call: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        sample = torch.randn(2, 4, 8, 8, generator=generator)
        context = torch.randn(2, 7, unet.config.cross_attention_dim, generator=generator)
        with torch.no_grad():
            return unet(sample, 10, context[:, :tokens], **call).sample

    return run


#: Where our op is called from: every processor and every encoder.
CALLERS: tuple[ModuleType, ...] = (attention, text_encoders)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the implementations that ran, in order."""
    names: list[str] = []

    def counted(run: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            out, choice = run(*args, **kwargs)
            names.append(choice.name)
            return out, choice

        return counting

    for module in CALLERS:
        monkeypatch.setattr(module, "attend", counted(module.attend))
    return names


@pytest.fixture
def op_dtypes(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """The dtypes of the queries, keys and values that reached our op."""
    dtypes: set[torch.dtype] = set()
    run = attention.attend

    def noted(*tensors: Any, **kwargs: Any) -> Any:
        dtypes.update(tensor.dtype for tensor in tensors[:3])
        return run(*tensors, **kwargs)

    monkeypatch.setattr(attention, "attend", noted)
    return dtypes


@pytest.fixture
def shift_op(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on our op adds one hundredth to its output."""

    def shifted(run: Any) -> Any:
        def shifting(*args: Any, **kwargs: Any) -> Any:
            out, choice = run(*args, **kwargs)
            return out + 1e-2, choice

        return shifting

    def shift() -> None:
        for module in CALLERS:
            monkeypatch.setattr(module, "attend", shifted(module.attend))

    return shift
