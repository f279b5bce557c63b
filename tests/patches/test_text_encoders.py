"""CLIP encoders: equal to stock with and without padding, one at a time, undone exactly."""

from typing import Any

import pytest
import torch
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    GPT2Config,
    GPT2Model,
    XLMRobertaConfig,
    XLMRobertaModel,
)

import sdx_patches
from sdx_patches import compat, text_encoders

IDS = torch.arange(3, 24).reshape(1, 21).repeat(2, 1) % 97


def run(encoder: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return encoder(IDS, attention_mask=mask, output_hidden_states=True).hidden_states[-1]


@pytest.mark.parametrize("cls", [CLIPTextModel, CLIPTextModelWithProjection])
@pytest.mark.parametrize("padded", [False, True])
def test_hidden_states_equal_stock(text_config: Any, cls: type, padded: bool) -> None:
    torch.manual_seed(0)
    encoder = cls(text_config()).eval()
    mask = torch.ones_like(IDS)
    mask[1, 9:] = 0
    mask = mask if padded else None
    expected = run(encoder, mask)
    sdx_patches.patch(encoder, owner="test")
    assert torch.allclose(run(encoder, mask), expected, atol=1e-5)
    layers = sdx_patches.layers(encoder)
    assert len(layers) == 3
    assert all(layer.patched and layer.running != "not run yet" for layer in layers)


def test_attention_stays_causal(text_config: Any) -> None:
    torch.manual_seed(0)
    encoder = CLIPTextModel(text_config()).eval()
    sdx_patches.patch(encoder, owner="test")
    with torch.no_grad():
        long = encoder(IDS).last_hidden_state
        short = encoder(IDS[:, :5]).last_hidden_state
    assert torch.allclose(long[:, :5], short, atol=1e-5)


def test_padding_changes_something(text_config: Any) -> None:
    # guards the two tests above against a mask that is never built
    torch.manual_seed(0)
    encoder = CLIPTextModel(text_config()).eval()
    sdx_patches.patch(encoder, owner="test")
    mask = torch.ones_like(IDS)
    mask[:, :4] = 0
    assert not torch.allclose(run(encoder, mask)[:, 6:], run(encoder)[:, 6:], atol=1e-3)


def test_image_encoders_equal_stock() -> None:
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8, projection_dim=16,
    )  # fmt: skip
    encoder = CLIPVisionModelWithProjection(config).eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = encoder(pixels).image_embeds
        sdx_patches.patch(encoder, owner="test")
        assert torch.allclose(encoder(pixels).image_embeds, expected, atol=1e-5)
    assert all(layer.running != "not run yet" for layer in sdx_patches.layers(encoder))


def test_a_shared_configuration_switches_only_the_patched_encoder(
    tiny_sdxl: Any, text_config: Any
) -> None:
    config = text_config()
    pipe = tiny_sdxl(config)
    stranger = CLIPTextModel(config).eval()
    assert pipe.text_encoder.config is stranger.config
    configs = [(m, vars(m)["config"]) for m in pipe.text_encoder.modules() if "config" in vars(m)]
    sdx_patches.patch(pipe, owner="test")
    assert pipe.text_encoder.config._attn_implementation == text_encoders.NAME
    assert pipe.text_encoder_2.config is not pipe.text_encoder.config
    assert stranger.config is config
    assert config._attn_implementation == "sdpa"
    assert all(not layer.patched for layer in sdx_patches.layers(stranger))
    sdx_patches.restore(pipe, owner="test")
    assert len(configs) > 3
    assert all(vars(module)["config"] is original for module, original in configs)
    assert config._attn_implementation == "sdpa"


def test_the_switch_is_not_saved(text_config: Any, tmp_path: Any) -> None:
    encoder = CLIPTextModel(text_config())
    sdx_patches.patch(encoder, owner="test")
    encoder.save_pretrained(tmp_path)
    assert text_encoders.NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("implementation", ["eager", "somebodys_own"])
def test_an_implementation_asked_for_by_name_is_left_alone(
    text_config: Any, implementation: str
) -> None:
    encoder = CLIPTextModel(text_config()).eval()
    setattr(encoder.config, compat.IMPLEMENTATION, implementation)
    sdx_patches.patch(encoder, owner="test")
    assert encoder.config._attn_implementation == implementation
    layers = sdx_patches.layers(encoder)
    assert [layer.running for layer in layers] == [implementation] * 3
    assert all(not layer.patched and layer.reason for layer in layers)


def test_a_transformers_without_registries_is_left_alone(
    text_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise ImportError("no such registry")

    monkeypatch.setattr(text_encoders, "register", absent)
    encoder = CLIPTextModel(text_config()).eval()
    sdx_patches.patch(encoder, owner="test")
    assert encoder.config._attn_implementation == "sdpa"
    assert all("no registry" in layer.reason for layer in sdx_patches.layers(encoder))


def test_what_was_written_to_the_configuration_meanwhile_survives(text_config: Any) -> None:
    encoder = CLIPTextModel(text_config()).eval()
    config = encoder.config
    sdx_patches.patch(encoder, owner="test")
    encoder.resize_token_embeddings(1010)
    sdx_patches.restore(encoder, owner="test")
    assert encoder.config is config
    assert config.vocab_size == 1010


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (GPT2Model, GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=32)),
        (
            XLMRobertaModel,
            XLMRobertaConfig(
                vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                intermediate_size=37, max_position_embeddings=64,
            ),
        ),
    ],
)  # fmt: skip
def test_encoders_of_another_kind_stay_stock_with_a_reason(cls: type, config: Any) -> None:
    torch.manual_seed(0)
    encoder = cls(config).eval()
    with torch.no_grad():
        expected = encoder(IDS).last_hidden_state
        sdx_patches.patch(encoder, owner="test")
        assert torch.equal(encoder(IDS).last_hidden_state, expected)
    layers = sdx_patches.layers(encoder)
    assert len(layers) == 2
    assert all(not layer.patched and "another kind" in layer.reason for layer in layers)
