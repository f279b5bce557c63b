"""Image prompts, layer by layer: equal to stock."""

from typing import Any

import pytest
import torch
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import Attention

import sdx_accel  # noqa: F401  (attaches enable_xattn)
import sdx_patches
from sdx_kernels.errors import InvalidInputs
from sdx_patches.ip_adapter import SdxIPAdapterAttnProcessor

from .ip_adapter_case import STOCK, both, layer, patched, prompt


@pytest.mark.parametrize("stock", list(STOCK))
@pytest.mark.parametrize("tokens", [(4,), (16,), (257,), (4, 16), (4, 4, 1)])
def test_one_and_several_adapters_equal_stock(
    calls: list[str], tokens: tuple[int, ...], stock: str
) -> None:
    attn = layer(stock, tokens)
    attn.processor.scale[:] = [0.7, -0.5, 1.5][: len(tokens)]
    ours, expected = both(attn, prompt(*tokens))
    assert torch.allclose(ours, expected, atol=1e-5)
    assert len(calls) == 1 + len(tokens)
    attn.processor.scale[0] = 0
    calls.clear()
    with torch.no_grad():
        attn(torch.randn(2, 15, 32), encoder_hidden_states=prompt(*tokens))
    assert len(calls) == len(tokens), "an adapter of scale 0 costs nothing"


def test_the_hosts_xformers_one_hands_over_its_weights() -> None:
    # it cannot run here, but ours in its place can
    attn = layer()
    hidden, context = torch.randn(2, 15, 32), prompt(4)
    other = host.IPAdapterXFormersAttnProcessor(hidden_size=32, cross_attention_dim=24)
    other.load_state_dict(attn.processor.state_dict())
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context)
        attn.set_processor(other)
        assert torch.allclose(
            patched(attn)(hidden, encoder_hidden_states=context), expected, atol=1e-5
        )
    sdx_patches.restore(attn, owner="test")
    assert attn.processor is other


@pytest.mark.parametrize("images", [1, 3])
def test_several_images_without_masks_are_one_sequence(images: int) -> None:
    ours, expected = both(layer(), prompt(4, images=images))
    assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("cross_norm", [None, "layer_norm", "group_norm"])
def test_every_part_of_a_module_is_honoured(cross_norm: str | None, extras: bool) -> None:
    more: dict[str, Any] = dict(
        rescale_output_factor=3.0, residual_connection=True, norm_num_groups=4, spatial_norm_dim=8
    )
    attn = layer(
        cross_attention_norm=cross_norm, cross_attention_norm_num_groups=4,
        **more if extras else {},
    )  # fmt: skip
    hidden = torch.randn(2, 32, 4, 4) if extras else torch.randn(2, 16, 32)
    call = {"encoder_hidden_states": prompt(4), "temb": torch.randn(2, 8, 2, 2)}
    with torch.no_grad():
        expected = attn(hidden, **call)
        ours = patched(attn)(hidden, **call)
    assert ours.shape == expected.shape
    assert torch.allclose(ours, expected, atol=1e-5)


def test_unscaled_scores_and_fp32_products_are_honoured(op_dtypes: set[torch.dtype]) -> None:
    # the host's 2_0 ignores both, its plain one does not
    attn = layer("plain", scale_qk=False)
    ours, expected = both(attn, prompt(4))
    assert torch.allclose(ours, expected, atol=1e-5)
    attn = layer("plain", upcast_attention=True).half()
    with torch.no_grad():
        attn.to_q.weight *= 2000
        hidden = torch.randn(2, 15, 32).half()
        text, images = prompt(4)
        context = (text.half(), [image.half() for image in images])
        expected = attn(hidden, encoder_hidden_states=context)
        ours = patched(attn)(hidden, encoder_hidden_states=context)
    assert op_dtypes == {torch.float32}
    assert ours.isfinite().all()
    assert (ours - expected).abs().max() <= 1.6e-2


def test_a_text_mask_masks_the_text_only() -> None:
    mask = torch.zeros(2, 1, 6)
    mask[:, :, 4:] = -10000.0
    attn = layer()
    ours, expected = both(attn, prompt(4), attention_mask=mask)
    assert torch.allclose(ours, expected, atol=1e-5)
    with pytest.raises(InvalidInputs, match="covers 10 positions"):
        attn(torch.randn(2, 15, 32), prompt(4), attention_mask=torch.zeros(2, 1, 10))


MASKS: dict[str, Any] = {
    "one": [torch.rand(1, 1, 8, 8), None],
    "two images, one scale": [torch.rand(1, 2, 8, 8), None],
    "two images, two scales": [torch.rand(1, 2, 8, 8), None],
    "both adapters": [torch.rand(1, 2, 8, 8), torch.rand(1, 2, 8, 8)],
    "one tensor": torch.rand(2, 1, 8, 8),
}


@pytest.mark.parametrize("stock", list(STOCK))
@pytest.mark.parametrize("kind", list(MASKS))
def test_masks_equal_stock(kind: str, stock: str) -> None:
    attn = layer(stock, (4, 4))
    attn.processor.scale[:] = [[0.5, 0.0], 1.0] if kind == "two images, two scales" else [0.5, 1.0]
    images = 1 if kind in ("one", "one tensor") else 2
    hidden = torch.randn(2, 16, 32)
    call = {"encoder_hidden_states": prompt(4, 4, images=images), "ip_adapter_masks": MASKS[kind]}
    with torch.no_grad():
        expected = attn(hidden, **call)
        ours = patched(attn)(hidden, **call)
        unmasked = attn(hidden, encoder_hidden_states=prompt(4, 4)) if images == 1 else None
    assert torch.allclose(ours, expected, atol=1e-5)
    assert unmasked is None or not torch.allclose(ours, unmasked, atol=1e-3)


@pytest.mark.parametrize(
    ("masks", "scales", "message"),
    [
        ([None], [1.0, 1.0], "1 ip_adapter_masks for 2 adapters and 2 image prompts"),
        ([torch.rand(1, 8, 8), None], [1.0, 1.0], r"tensor \(1, images, height, width\)"),
        ([torch.rand(1, 3, 8, 8), None], [1.0, 1.0], "2 images and 3 masks"),
        ([torch.rand(1, 2, 8, 8), None], [[1.0], 1.0], "1 scales and 2 masks"),
        (None, [[1.0, 2.0], 1.0], "one scale per image needs ip_adapter_masks"),
    ],
)
def test_masks_that_do_not_match_are_refused(masks: Any, scales: Any, message: str) -> None:
    attn = patched(layer(tokens=(4, 4)))
    attn.processor.scale[:] = scales
    with pytest.raises(InvalidInputs, match=message):
        attn(
            torch.randn(2, 16, 32), encoder_hidden_states=prompt(4, 4, images=2),
            ip_adapter_masks=masks,
        )  # fmt: skip


def test_an_image_prompt_at_the_end_of_the_text_still_works() -> None:
    attn = layer()
    text, images = prompt(4)
    joined = torch.cat([text, images[0][:, 0]], dim=1)
    hidden = torch.randn(2, 15, 32)
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=(text, images))
        patched(attn)
        with pytest.warns(FutureWarning, match=r"pass the tuple"):
            assert torch.allclose(attn(hidden, encoder_hidden_states=joined), expected, atol=1e-5)


@pytest.mark.parametrize("crosses", [False, True])
def test_made_without_arguments_it_attends_the_text(crosses: bool) -> None:
    torch.manual_seed(0)
    width = 24 if crosses else None
    attn = Attention(query_dim=32, cross_attention_dim=width, heads=4, dim_head=8).eval()
    text, images = prompt(4)
    contexts = [text, (text, images)] if crosses else [None]
    hidden = torch.randn(2, 15, 32)
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=text if crosses else None)
        attn.set_processor(SdxIPAdapterAttnProcessor())
        for context in contexts:
            ours = attn(hidden, encoder_hidden_states=context)
            assert torch.allclose(ours, expected, atol=1e-6)
