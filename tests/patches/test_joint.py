"""Joint attention (Stable Diffusion 3): two tensors in, two out, equal to stock."""

from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

import sdx_patches
from sdx_patches.joint import SdxFusedJointAttnProcessor, SdxJointAttnProcessor


def patched(root: Any, **settings: Any) -> Any:
    sdx_patches.patch(root, owner="test", **settings)
    return root


def layer(**changes: Any) -> Attention:
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(
        query_dim=32, heads=4, dim_head=8, out_dim=32, context_pre_only=False,
        added_kv_proj_dim=32, bias=True, processor=host.JointAttnProcessor2_0(),
    )  # fmt: skip
    attn = Attention(**settings | changes).eval()
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attn


@pytest.mark.parametrize("qk_norm", [None, "rms_norm", "layer_norm"])
@pytest.mark.parametrize("context_pre_only", [False, True])
def test_case_085_joint_attention_still_returns_two_tensors(
    calls: list[str], context_pre_only: bool, qk_norm: str | None
) -> None:
    attn = layer(context_pre_only=context_pre_only, qk_norm=qk_norm)
    stock = attn.processor
    hidden, context = torch.randn(1, 6, 32), torch.randn(1, 3, 32)
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context)
        ours = patched(attn)(hidden, encoder_hidden_states=context)
    assert [tensor.shape for tensor in ours] == [(1, 6, 32), (1, 3, 32)]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, expected, strict=True))
    assert len(calls) == 1
    sdx_patches.restore(attn, owner="test")
    assert attn.processor is stock


def test_without_a_text_it_returns_one_tensor() -> None:
    # the second attention of Stable Diffusion 3.5's layers
    attn = layer(added_kv_proj_dim=None, context_pre_only=None)
    hidden = torch.randn(2, 6, 32)
    with torch.no_grad():
        expected = attn(hidden)
        ours = patched(attn)(hidden)
    assert isinstance(ours, Tensor)
    assert torch.allclose(ours, expected, atol=1e-5)


def test_fused_projections_equal_stock_and_keep_the_norms() -> None:
    attn = layer()
    attn.fuse_projections()
    attn.set_processor(host.FusedJointAttnProcessor2_0())
    hidden, context = torch.randn(2, 6, 32), torch.randn(2, 3, 32)
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context)
        ours = patched(attn)(hidden, encoder_hidden_states=context)
    assert type(attn.processor) is SdxFusedJointAttnProcessor
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, expected, strict=True))
    # the host's own fused processor leaves the norms out, its unfused one does not
    attn = layer(qk_norm="rms_norm")
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context)
        attn.fuse_projections()
        attn.set_processor(host.FusedJointAttnProcessor2_0())
        ours = patched(attn)(hidden, encoder_hidden_states=context)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, expected, strict=True))


@pytest.fixture
def transformer() -> SD3Transformer2DModel:
    """Stable Diffusion 3.5's kind of model: two layers, the last without a text output."""
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8, qk_norm="rms_norm",
        dual_attention_layers=(0,),
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def forward(model: SD3Transformer2DModel) -> Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        out: Tensor = model(
            torch.randn(2, 4, 8, 8), torch.randn(2, 5, 32), torch.randn(2, 16), torch.tensor([1.0])
        ).sample
    return out


def test_a_whole_model_equals_stock(
    transformer: SD3Transformer2DModel, calls: list[str], shift_op: Any
) -> None:
    expected = forward(transformer)
    patched(transformer)
    assert torch.allclose(forward(transformer), expected, atol=1e-4)
    assert len(calls) == 3
    assert all(layer.patched for layer in sdx_patches.layers(transformer))
    shift_op()
    assert (forward(transformer) - expected).abs().max() > 1e-4


def test_the_host_recognises_the_layer_kind(transformer: SD3Transformer2DModel) -> None:
    patched(transformer)
    for processor in transformer.attn_processors.values():
        assert isinstance(processor, host.JointAttnProcessor2_0)
        assert type(processor) is SdxJointAttnProcessor
        assert type(processor)().stock is None
