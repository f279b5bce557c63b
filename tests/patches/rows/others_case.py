"""Rows of relatives with another text encoder or another condition: a GLM, images, depth, sound."""

from typing import Any

import diffusers
import torch
from diffusers.models import DreamLiteUNetModel
from diffusers.pipelines.kolors import ChatGLMModel
from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import (
    StableUnCLIPImageNormalizer,
)
from torch import Tensor
from transformers import (
    CLIPImageProcessor,
    DPTConfig,
    DPTForDepthEstimation,
    GPT2Config,
    GPT2LMHeadModel,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
)

from sdx_accel.runtime.offline_tokenizer import build_tokenizer

from .parts_case import (
    SIZE,
    XL,
    Row,
    build,
    clip,
    clip_projected,
    embeds,
    picture,
    run,
    scheduler,
    sd_parts,
    seeded,
    t5,
    tokenizer,
    unet,
    vae,
)
from .video_case import image_encoder


class GlmTokens(dict[str, Tensor]):
    """What Kolors' tokenizer returns; the real one reads its vocabulary from a downloaded file."""

    def __init__(self, prompts: Any, max_length: int, **kwargs: Any) -> None:
        texts = [prompts] if isinstance(prompts, str) else prompts
        rows = [[ord(letter) % 64 for letter in text[:max_length]] for text in texts]
        ids = torch.tensor([[0] * (max_length - len(row)) + row for row in rows])
        super().__init__(
            input_ids=ids,
            attention_mask=(ids != 0).long(),
            position_ids=torch.arange(max_length).expand_as(ids),
        )

    def to(self, device: Any) -> "GlmTokens":
        return self


def kolors() -> Any:
    config = ChatGLMConfig(
        num_layers=2, padded_vocab_size=64, hidden_size=16, ffn_hidden_size=32, kv_channels=8,
        num_attention_heads=2, seq_length=256, add_qkv_bias=True, original_rope=True,
        use_cache=False,
    )  # fmt: skip
    encoder = seeded(ChatGLMModel, config)
    # its weights are left as the memory was: the class is only ever loaded
    for weight in encoder.parameters():
        torch.nn.init.normal_(weight, 0, 0.2)
    model = unet(
        **XL | {"cross_attention_dim": 32, "projection_class_embeddings_input_dim": 64},
        encoder_hid_dim=16, encoder_hid_dim_type="text_proj",
    )  # fmt: skip
    parts = dict(
        vae=vae(), text_encoder=encoder, tokenizer=GlmTokens, unet=model,
        scheduler=diffusers.EulerDiscreteScheduler(),
    )  # fmt: skip
    return build(diffusers.KolorsPipeline, parts)


def unclip_parts() -> dict[str, Any]:
    model = unet(
        class_embed_type="projection", projection_class_embeddings_input_dim=64,
        use_linear_projection=True,
    )  # fmt: skip
    return sd_parts(
        unet=model, image_normalizer=seeded(StableUnCLIPImageNormalizer, embedding_dim=32),
        image_noising_scheduler=diffusers.DDPMScheduler(),
    )  # fmt: skip


def unclip() -> Any:
    prior = seeded(
        diffusers.PriorTransformer, num_attention_heads=2, attention_head_dim=12, embedding_dim=32,
        num_layers=1,
    )  # fmt: skip
    parts = unclip_parts() | dict(
        prior=prior, prior_tokenizer=tokenizer(), prior_text_encoder=clip_projected(),
        prior_scheduler=diffusers.UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", num_train_timesteps=1000
        ),
    )  # fmt: skip
    return build(diffusers.StableUnCLIPPipeline, parts)


def unclip_from_image() -> Any:
    parts = unclip_parts() | dict(
        feature_extractor=CLIPImageProcessor(crop_size=224, size=224), image_encoder=image_encoder()
    )
    return build(diffusers.StableUnCLIPImg2ImgPipeline, parts)


def from_depth() -> Any:
    config = DPTConfig(
        image_size=32, patch_size=16, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=37, backbone_out_indices=(0, 1, 2, 3), neck_hidden_sizes=(16, 16, 32, 32),
        fusion_hidden_size=16, is_hybrid=False, num_labels=3,
    )  # fmt: skip
    parts = sd_parts(
        unet=unet(in_channels=5), depth_estimator=seeded(DPTForDepthEstimation, config),
        feature_extractor=CLIPImageProcessor(crop_size=32, size=32),
    )  # fmt: skip
    return build(diffusers.StableDiffusionDepth2ImgPipeline, parts)


def audio() -> Any:
    model = seeded(
        diffusers.AudioLDM2UNet2DConditionModel, block_out_channels=(16, 32), layers_per_block=1,
        norm_num_groups=8, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=((None, 16,
        32),) * 2,
    )  # fmt: skip
    config = SpeechT5HifiGanConfig(
        model_in_dim=8, sampling_rate=16000, upsample_initial_channel=16, upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]], normalize_before=False,
    )  # fmt: skip
    language = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=16)
    # the two text encoders and the language model only give their names and dtypes: a sound is
    # asked for by embeddings
    parts = dict(
        vae=vae(in_channels=1, out_channels=1), unet=model, scheduler=scheduler(),
        vocoder=seeded(SpeechT5HifiGan, config), text_encoder=None, text_encoder_2=t5(),
        projection_model=None, language_model=seeded(GPT2LMHeadModel, language), tokenizer=None,
        tokenizer_2=None,
        feature_extractor=None,
    )  # fmt: skip
    return build(diffusers.AudioLDM2Pipeline, parts)


def sound(pipe: Any) -> Tensor:
    kept = torch.ones(1, 5, dtype=torch.long)
    kept[:, 3:] = 0
    return run(
        pipe, prompt=None, negative_prompt=None, prompt_embeds=embeds(1, 5, 32),
        negative_prompt_embeds=embeds(1, 5, 32, seed=6), attention_mask=kept,
        negative_attention_mask=torch.ones(1, 5, dtype=torch.long),
        generated_prompt_embeds=embeds(1, 3, 16), audio_length_in_s=0.016,
        negative_generated_prompt_embeds=embeds(1, 3, 16, seed=6),
    )  # fmt: skip


def dreamlite() -> Any:
    model = seeded(
        DreamLiteUNetModel, block_out_channels=(16, 32, 32), layers_per_block=1, sample_size=8,
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8, ff_mult=2,
    )  # fmt: skip
    # its own text encoder's processor needs torchvision; its template is 240 bytes long
    parts = dict(
        unet=model, text_encoder=clip(max_position_embeddings=400),
        tokenizer=build_tokenizer(600, model_max_length=400), processor=None,
        vae=seeded(
            diffusers.AutoencoderTiny, encoder_block_out_channels=(16, 16), latent_channels=4,
            decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    return build(diffusers.DreamLitePipeline, parts)


ROWS = [
    Row(27, "kolors", kolors, lambda pipe: run(pipe, **SIZE), 18),
    Row(28, "dreamlite", dreamlite, lambda pipe: run(pipe, **SIZE), 14),
    Row(
        28, "stable unclip", unclip, lambda pipe: run(pipe, prior_num_inference_steps=2, **SIZE),
        15,
    ),
    Row(
        28, "stable unclip img2img", unclip_from_image,
        lambda pipe: run(pipe, image=picture(), **SIZE), 14,
    ),
    Row(
        28, "depth2img", from_depth, lambda pipe: run(pipe, image=picture(), strength=1.0), 12,
    ),
    Row(28, "audioldm 2", audio, sound, 26),
]  # fmt: skip
