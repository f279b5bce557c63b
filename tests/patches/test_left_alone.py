"""What must not be replaced: weights, maps, added keys, joint attention; each with its reason."""

from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import Attention
from torch import Tensor

import sdx_patches
from sdx_patches.attention import SdxAttnProcessor, SdxFusedAttnProcessor


def patched(root: Any, **settings: Any) -> Any:
    sdx_patches.patch(root, owner="test", **settings)
    return root


def test_case_066_trained_processor_weights_are_kept(tiny_unet: Any) -> None:
    unet = tiny_unet()
    trained = [m for m in unet.modules() if isinstance(m, Attention)][:2]
    for attn, cls in zip(
        trained, (host.IPAdapterAttnProcessor2_0, host.CustomDiffusionAttnProcessor2_0), strict=True
    ):
        attn.set_processor(cls(hidden_size=64, cross_attention_dim=32))
    kept = [attn.processor for attn in trained]
    before = {id(p) for p in unet.parameters()}
    patched(unet)
    assert {id(p) for p in unet.parameters()} == before
    assert [attn.processor for attn in trained] == kept
    left = [layer for layer in sdx_patches.layers(unet) if not layer.patched]
    assert [layer.running for layer in left] == [type(p).__name__ for p in kept]
    assert all("trained weights" in layer.reason for layer in left)
    sdx_patches.restore(unet, owner="test")
    assert {id(p) for p in unet.parameters()} == before


class RecordingProcessor(host.AttnProcessor):
    """Somebody's own: keeps the attention probabilities of its layer."""

    def __init__(self) -> None:
        self.maps: list[Tensor] = []

    def __call__(self, attn: Attention, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        query = attn.head_to_batch_dim(attn.to_q(hidden_states))
        key = attn.head_to_batch_dim(attn.to_k(hidden_states))
        self.maps.append(attn.get_attention_scores(query, key))
        return super().__call__(attn, hidden_states, *args, **kwargs)


def test_case_081_attention_maps_of_a_users_processor(tiny_unet: Any, unet_out: Any) -> None:
    maps: list[list[Tensor]] = []
    for enable in (False, True):
        unet = tiny_unet()
        recording = [
            m for m in unet.modules() if isinstance(m, Attention) and not m.is_cross_attention
        ]
        for attn in recording[:2]:
            attn.set_processor(RecordingProcessor())
        if enable:
            patched(unet)
        unet_out(unet)
        maps.append([m for attn in recording[:2] for m in attn.processor.maps])
    assert len(maps[0]) == len(maps[1]) == 2
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*maps, strict=True))
    left = [layer for layer in sdx_patches.layers(unet) if not layer.patched]
    assert [layer.running for layer in left] == ["RecordingProcessor"] * 2
    assert all("attention maps" in layer.reason for layer in left)


def test_case_083_added_keys_and_values_stay_stock(unet_out: Any) -> None:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=8, norm_num_groups=8,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        cross_attention_dim=32, attention_head_dim=8, encoder_hid_dim=32,
        addition_embed_type="text", addition_embed_type_num_heads=2,
    ).eval()  # fmt: skip
    expected = unet_out(unet)
    patched(unet)
    assert torch.equal(unet_out(unet), expected)
    layers = [layer for layer in sdx_patches.layers(unet) if layer.running.startswith("Attn")]
    assert layers
    assert all(not layer.patched and "keys and values" in layer.reason for layer in layers)
    sdx_patches.restore(unet, owner="test")


def test_case_085_joint_attention_still_returns_two_tensors() -> None:
    torch.manual_seed(0)
    attn = Attention(
        query_dim=32, heads=4, dim_head=8, context_pre_only=False, added_kv_proj_dim=32,
        processor=host.JointAttnProcessor2_0(),
    ).eval()  # fmt: skip
    hidden, context = torch.randn(1, 6, 32), torch.randn(1, 3, 32)
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context)
        ours = patched(attn)(hidden, encoder_hidden_states=context)
    assert [tensor.shape for tensor in ours] == [(1, 6, 32), (1, 3, 32)]
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert "two tensors" in sdx_patches.layers(attn)[0].reason


def test_class_names_do_not_trip_the_hosts_checks() -> None:
    for cls in (SdxAttnProcessor, SdxFusedAttnProcessor):
        assert not any(word in str(cls) for word in ("XFormers", "Added", "flash"))
        assert cls().stock is None
