"""Added keys and values (DeepFloyd IF, Kandinsky 2): equal to stock in every part and mask."""

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

import sdx_patches
from sdx_kernels.errors import InvalidInputs
from sdx_patches.added_kv import SdxAttnAddedKVProcessor, SdxEagerAttnAddedKVProcessor


def patched(root: Any, **settings: Any) -> Any:
    sdx_patches.patch(root, owner="test", **settings)
    return root


STOCK = {
    "plain": host.AttnAddedKVProcessor,
    "2_0": host.AttnAddedKVProcessor2_0,
    "sliced": lambda: host.SlicedAttnAddedKVProcessor(1),
}


def layer(stock: str = "2_0", **changes: Any) -> Attention:
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(
        query_dim=32, cross_attention_dim=32, heads=4, dim_head=8, added_kv_proj_dim=24,
        norm_num_groups=4, bias=True, residual_connection=True, processor=STOCK[stock](),
    )  # fmt: skip
    attn = Attention(**settings | changes).eval()
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attn


def both(attn: Attention, hidden: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        expected = attn(hidden, **call)
        ours = patched(attn)(hidden, **call)
    assert isinstance(attn.processor, SdxAttnAddedKVProcessor)
    return ours, expected


@pytest.mark.parametrize("cross_norm", [None, "layer_norm", "group_norm"])
@pytest.mark.parametrize("only_cross", [False, True])
@pytest.mark.parametrize("stock", list(STOCK))
def test_every_part_equals_stock(
    calls: list[str], stock: str, only_cross: bool, cross_norm: str | None
) -> None:
    # the layer norm is as wide as the cross-attention, the group norm as the added projection
    width = 32 if cross_norm == "layer_norm" else 24
    attn = layer(
        stock, cross_attention_norm=cross_norm, cross_attention_norm_num_groups=4,
        added_kv_proj_dim=width, only_cross_attention=only_cross,
    )  # fmt: skip
    ours, expected = both(
        attn, torch.randn(2, 32, 3, 5), encoder_hidden_states=torch.randn(2, 6, width)
    )
    assert ours.shape == expected.shape
    assert torch.allclose(ours, expected, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("covers", ["text", "text and picture", "every head", "every query"])
def test_masks_of_the_text_and_of_all(covers: str) -> None:
    attn = layer()
    hidden, context = torch.randn(2, 32, 3, 5), torch.randn(2, 6, 24)
    text = torch.randn(2, 1, 6)
    whole = torch.cat([text, torch.zeros(2, 1, 15)], dim=-1)
    mask = {
        "text": text,
        "text and picture": whole,
        "every head": whole.repeat_interleave(4, dim=0),
        "every query": whole.expand(2, 15, 21),
    }[covers]
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context, attention_mask=text)
        ours = patched(attn)(hidden, encoder_hidden_states=context, attention_mask=mask)
        unmasked = attn(hidden, encoder_hidden_states=context)
    assert torch.allclose(ours, expected, atol=1e-5)
    assert not torch.allclose(ours, unmasked, atol=1e-3)


@pytest.mark.parametrize("only_cross", [False, True])
def test_a_bool_mask_equals_cropped_text(only_cross: bool) -> None:
    attn = patched(layer(only_cross_attention=only_cross))
    hidden, context = torch.randn(2, 32, 3, 5), torch.randn(2, 6, 24)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[:, 4:] = False
    with torch.no_grad():
        masked = attn(hidden, encoder_hidden_states=context, attention_mask=mask)
        cropped = attn(hidden, encoder_hidden_states=context[:, :4])
    assert torch.allclose(masked, cropped, atol=1e-5)


def test_a_mask_of_another_length_is_refused() -> None:
    attn = patched(layer())
    hidden, context = torch.randn(2, 32, 3, 5), torch.randn(2, 6, 24)
    with pytest.raises(InvalidInputs, match=r"covers 15 positions .* 6 keys"):
        attn(hidden, encoder_hidden_states=context, attention_mask=torch.zeros(2, 1, 15))


@pytest.mark.parametrize("shape", [(2, 32, 3, 5), (2, 32, 15)])
def test_without_a_text_the_picture_stands_for_it(shape: tuple[int, ...]) -> None:
    ours, expected = both(layer(added_kv_proj_dim=32), torch.randn(shape))
    assert ours.shape == shape
    assert torch.allclose(ours, expected, atol=1e-5)


def test_spatial_norm_is_honoured() -> None:
    attn = layer("sliced", spatial_norm_dim=8)
    ours, expected = both(
        attn, torch.randn(2, 32, 4, 4), encoder_hidden_states=torch.randn(2, 6, 24),
        temb=torch.randn(2, 8, 2, 2),
    )  # fmt: skip
    assert torch.allclose(ours, expected, atol=1e-5)


def test_scores_beyond_fp16_where_the_module_asks_for_fp32(op_dtypes: set[torch.dtype]) -> None:
    attn = layer("plain", upcast_attention=True).half()
    hidden, context = torch.randn(2, 32, 3, 5).half(), torch.randn(2, 6, 24).half()
    with torch.no_grad():
        attn.to_q.weight *= 300
        attn.add_k_proj.weight *= 300
    ours, expected = both(attn, hidden, encoder_hidden_states=context)
    query, key = attn.to_q(hidden.flatten(2).mT).float(), attn.add_k_proj(context).float()
    assert (query @ key.mT).abs().max() > 65504
    assert ours.dtype == torch.float16
    assert op_dtypes == {torch.float32}
    assert (ours - expected).abs().max() <= 1.6e-2
    attn.upcast_attention = False
    with torch.no_grad():
        assert not host.AttnAddedKVProcessor()(attn, hidden, context).isfinite().all()


def test_gradients_equal_stock() -> None:
    gradients = []
    for enable in (False, True):
        attn = layer()
        if enable:
            patched(attn)
        torch.manual_seed(1)
        hidden, context = torch.randn(2, 32, 3, 5), torch.randn(2, 6, 24)
        attn(hidden, encoder_hidden_states=context).square().mean().backward()
        gradients.append([p.grad for p in attn.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


@pytest.fixture
def added_unet() -> UNet2DConditionModel:
    """DeepFloyd IF's kind of UNet: three layers with added keys, and a pooled text."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=8, norm_num_groups=8,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        cross_attention_dim=32, attention_head_dim=8, encoder_hid_dim=32,
        cross_attention_norm="group_norm",
        addition_embed_type="text", addition_embed_type_num_heads=2,
    ).eval()  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
def test_case_083_added_keys_and_values(
    added_unet: Any, unet_out: Any, calls: list[str], masked: bool
) -> None:
    mask = torch.ones(2, 7)
    mask[1, 3:] = 0
    call = {"encoder_attention_mask": mask} if masked else {}
    stock = {m: m.processor for m in added_unet.modules() if isinstance(m, Attention)}
    expected = unet_out(added_unet, **call)
    patched(added_unet)
    assert torch.allclose(unet_out(added_unet, **call), expected, atol=1e-4)
    assert len(calls) == len(stock) == 4
    ran = [layer for layer in sdx_patches.layers(added_unet) if layer.patched]
    assert [layer.running for layer in ran] == calls
    sdx_patches.restore(added_unet, owner="test")
    assert all(attn.processor is processor for attn, processor in stock.items())
    assert torch.equal(unet_out(added_unet, **call), expected)


def test_an_op_that_adds_one_hundredth_changes_the_output(
    added_unet: Any, unet_out: Any, shift_op: Any
) -> None:
    expected = unet_out(patched(added_unet))
    shift_op()
    assert (unet_out(added_unet) - expected).abs().max() > 1e-4


def test_slicing_and_defaults_as_on_a_plain_layer(added_unet: Any, unet_out: Any) -> None:
    expected = unet_out(patched(added_unet))
    added_unet.set_attention_slice(1)
    with pytest.warns(UserWarning, match="enable_attention_slicing"):
        assert torch.allclose(unet_out(added_unet), expected, atol=1e-4)
    added_unet.set_attention_slice(None)
    assert torch.allclose(unet_out(added_unet), expected, atol=1e-4)
    attentions = [m for m in added_unet.modules() if isinstance(m, Attention)]
    assert {type(m.processor) for m in attentions} == {SdxEagerAttnAddedKVProcessor}
    added_unet.set_default_attn_processor()
    assert torch.allclose(unet_out(added_unet), expected, atol=1e-4)
    sdx_patches.restore(added_unet, owner="test")
    assert {type(m.processor) for m in attentions} == {host.AttnAddedKVProcessor}


def test_fusing_projections_is_refused_as_without_us(added_unet: Any) -> None:
    with pytest.raises(ValueError, match="added KV"):
        added_unet.fuse_qkv_projections()
    with pytest.raises(ValueError, match="added KV"):
        patched(added_unet).fuse_qkv_projections()


def test_the_host_recognises_the_layer_kind(added_unet: Any) -> None:
    # enabling xFormers installs its own processor of the kind that it finds
    patched(added_unet)
    for attn in (m for m in added_unet.modules() if isinstance(m, Attention)):
        assert isinstance(attn.processor, host.AttnAddedKVProcessor2_0)
        assert type(attn.processor)().stock is None
