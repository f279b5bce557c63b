"""Attention of UNets and VAEs: equal to stock, and really running."""

from typing import Any

import pytest
import torch
from diffusers import StableCascadeUNet, VQModel
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

import sdx_patches
from sdx_kernels import registry
from sdx_kernels.errors import InvalidInputs
from sdx_patches import attention, text_encoders
from sdx_patches.plain import SdxPlainAttnProcessor


def patched(root: Any, **settings: Any) -> Any:
    sdx_patches.patch(root, owner="test", **settings)
    return root


def classes(root: nn.Module) -> set[type]:
    return {type(m.processor) for m in root.modules() if isinstance(m, Attention)}


@pytest.mark.parametrize(("build", "attentions"), [("tiny_sd", 13), ("tiny_sdxl", 24)])
def test_latents_equal_stock_and_every_layer_ran(
    request: pytest.FixtureRequest, latents: Any, calls: list[str], build: str, attentions: int
) -> None:
    make = request.getfixturevalue(build)
    expected = latents(make())
    pipe = patched(make())
    layers = sdx_patches.layers(pipe)
    assert len(layers) == attentions
    assert {layer.running for layer in layers} == {"not run yet"}
    assert not calls
    before = registry.launches.total()
    assert torch.allclose(latents(pipe), expected, atol=1e-4)
    assert registry.launches.total() - before == len(calls) > 0
    after = {layer.path: layer.running for layer in sdx_patches.layers(pipe)}
    # output_type="latent" decodes nothing, so only the autoencoder's layers are left
    assert {path for path, running in after.items() if running == "not run yet"} == {
        path for path in after if path.startswith("vae.")
    }
    assert {running for running in after.values() if running != "not run yet"} == set(calls)


def test_pictures_equal_stock(tiny_sd: Any, latents: Any) -> None:
    expected = latents(tiny_sd(), output_type="pt")
    pipe = patched(tiny_sd())
    assert torch.allclose(latents(pipe, output_type="pt"), expected, atol=1e-4)
    running = {layer.path: layer.running for layer in sdx_patches.layers(pipe)}
    assert running["vae.decoder.mid_block.attentions.0"] != "not run yet"
    assert running["vae.encoder.mid_block.attentions.0"] == "not run yet"


@pytest.mark.parametrize("part", ["attention", "text_encoders"])
def test_an_op_that_adds_one_hundredth_changes_the_latents(
    tiny_sd: Any, latents: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    module = {"attention": attention, "text_encoders": text_encoders}[part]
    pipe = patched(tiny_sd())
    expected = latents(pipe)
    run = module.attend

    def shifted(*args: Any, **kwargs: Any) -> Any:
        out, choice = run(*args, **kwargs)
        return out + 1e-2, choice

    monkeypatch.setattr(module, "attend", shifted)
    assert (latents(pipe) - expected).abs().max() > 1e-4


def test_the_requested_op_reaches_every_call(
    tiny_sd: Any, latents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    run = attention.attend

    def noted(*args: Any, op: str | None = None, **kwargs: Any) -> Any:
        asked.append(op)
        return run(*args, op=op, **kwargs)

    monkeypatch.setattr(attention, "attend", noted)
    monkeypatch.setattr(text_encoders, "attend", noted)
    pipe = patched(tiny_sd(), attention_op="torch")
    latents(pipe)
    assert set(asked) == {"torch"}
    assert {layer.requested for layer in sdx_patches.layers(pipe)} == {"torch"}


@pytest.mark.parametrize("keys", [1, 7, 8, 43, *range(64, 73)])
def test_case_003_key_masks_of_any_length_in_bf16(keys: int) -> None:
    torch.manual_seed(0)
    attn = Attention(query_dim=256, heads=8, dim_head=64).bfloat16().eval()
    hidden = torch.randn(2, 35, 256, dtype=torch.bfloat16)
    context = torch.randn(2, keys, 256, dtype=torch.bfloat16)
    mask = torch.zeros(2, 1, keys, dtype=torch.bfloat16)
    mask[:, :, keys - keys // 6 :] = -10000.0
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context, attention_mask=mask)
        ours = patched(attn)(hidden, encoder_hidden_states=context, attention_mask=mask)
    assert classes(attn) == {SdxPlainAttnProcessor}
    assert (ours - expected).abs().max() <= 1.6e-2


@pytest.mark.parametrize("kind", ["ones and zeros", "bool", "additive"])
def test_case_011_masked_text_equals_cropped_text(tiny_unet: Any, unet_out: Any, kind: str) -> None:
    unet = patched(tiny_unet())
    mask = torch.ones(2, 7)
    mask[:, 4:] = 0
    settings: dict[str, Tensor] = {"encoder_attention_mask": mask}
    if kind == "bool":
        settings = {"encoder_attention_mask": mask.bool()}
    elif kind == "additive":
        settings = {"encoder_attention_mask": ((1 - mask) * -10000.0)[:, None]}
    cropped = unet_out(unet, tokens=4)
    assert torch.allclose(unet_out(unet, **settings), cropped, atol=1e-4)
    assert not torch.allclose(unet_out(unet), cropped, atol=1e-4)


def test_case_011_a_mask_of_zeros_stays_finite(tiny_unet: Any, unet_out: Any) -> None:
    unet = patched(tiny_unet())
    assert unet_out(unet, encoder_attention_mask=torch.zeros(2, 7)).isfinite().all()


@pytest.mark.parametrize(
    "shape", [(2, 9), (2, 1, 9), (8, 1, 9), (2, 1, 1, 9), (2, 5, 9), (1, 5, 9)]
)
def test_case_011_every_mask_shape_is_broadcast(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    attn = Attention(query_dim=32, heads=4, dim_head=8).eval()
    hidden, context = torch.randn(2, 5, 32), torch.randn(2, 9, 32)
    mask = torch.randn(shape)
    full = mask.reshape(-1, shape[-2] if len(shape) > 2 else 1, 9)
    full = full if full.shape[0] == 8 else full.expand(2, -1, -1).repeat_interleave(4, dim=0)
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context, attention_mask=full)
        ours = patched(attn)(hidden, encoder_hidden_states=context, attention_mask=mask)
    assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("length", [1, 4, 14])
def test_case_012_a_mask_of_another_length_is_refused(
    tiny_unet: Any, unet_out: Any, length: int
) -> None:
    unet = patched(tiny_unet())
    with pytest.raises(InvalidInputs, match=rf"covers {length} positions .* 7 keys"):
        unet_out(unet, encoder_attention_mask=torch.ones(2, length))


def test_case_012_a_mask_of_another_batch_is_refused() -> None:
    attn = patched(Attention(query_dim=32, heads=4, dim_head=8))
    with pytest.raises(InvalidInputs, match=r"its first size must be 2 or 8"):
        attn(torch.randn(2, 5, 32), attention_mask=torch.zeros(3, 1, 5))


def test_case_039_scores_beyond_the_fp16_range(op_dtypes: set[torch.dtype]) -> None:
    torch.manual_seed(0)
    attn = Attention(query_dim=64, heads=1, dim_head=64, upcast_attention=True).eval()
    with torch.no_grad():
        attn.to_q.weight *= 100
        attn.to_k.weight *= 100
        attn = attn.half()
        hidden = torch.randn(1, 64, 64).half()
        scores = attn.to_q(hidden).float() @ attn.to_k(hidden).float().transpose(1, 2)
        assert scores.abs().max() > 65504
        ours = patched(attn)(hidden)
        assert ours.dtype == torch.float16
        assert op_dtypes == {torch.float32}
        sdx_patches.restore(attn, owner="test")
        expected = attn.float()(hidden.float())
    assert (ours - expected).abs().max() <= 2e-3


def test_case_050_a_picture_of_a_batch_alone(tiny_sd: Any, latents: Any) -> None:
    pipe = patched(tiny_sd())

    def seeded(*seeds: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    both = latents(pipe, num_images_per_prompt=2, generator=seeded(0, 1))
    for index in (0, 1):
        alone = latents(pipe, generator=seeded(index))
        assert torch.allclose(both[index], alone[0], atol=1e-4)
    prompts = {"prompt": ["a cat", "a dog"], "negative_prompt": ["", ""]}
    four = latents(pipe, num_images_per_prompt=2, generator=seeded(0, 1, 2, 3), **prompts)
    third = latents(pipe, prompt="a dog", negative_prompt="", generator=seeded(2))
    assert torch.allclose(four[2], third[0], atol=1e-4)


@pytest.mark.parametrize("qk_norm", [None, "layer_norm", "rms_norm"])
@pytest.mark.parametrize("cross_norm", [None, "layer_norm", "group_norm"])
@pytest.mark.parametrize("extras", [False, True])
def test_every_part_of_a_module_is_honoured(
    qk_norm: str | None, cross_norm: str | None, extras: bool
) -> None:
    torch.manual_seed(0)
    more: dict[str, Any] = (
        dict(rescale_output_factor=3.0, residual_connection=True, bias=True, norm_num_groups=4)
        if extras
        else {}
    )
    attn = Attention(
        query_dim=32, cross_attention_dim=48, heads=4, dim_head=8, qk_norm=qk_norm,
        cross_attention_norm=cross_norm, cross_attention_norm_num_groups=4, **more,
    ).eval()  # fmt: skip
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(2, 32, 3, 5) if extras else torch.randn(2, 15, 32)
    context = torch.randn(2, 6, 48)
    with torch.no_grad():
        expected = attn(hidden, encoder_hidden_states=context)
        ours = patched(attn)(hidden, encoder_hidden_states=context)
    assert ours.shape == expected.shape
    assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("installed", [host.AttnProcessor, host.AttnProcessor2_0])
def test_unscaled_scores_are_honoured_where_the_host_does(installed: Any) -> None:
    torch.manual_seed(0)
    attn = Attention(query_dim=32, heads=4, dim_head=8, scale_qk=False).eval()
    assert type(attn.processor) is host.AttnProcessor
    hidden = torch.randn(2, 15, 32)
    with torch.no_grad():
        expected = attn(hidden)
        attn.set_processor(installed())
        stock = attn(hidden)
        ours = patched(attn)(hidden)
    assert torch.allclose(ours, stock, atol=1e-5)
    # the host's 2_0 scales whatever the module says
    ignored = installed is host.AttnProcessor2_0
    assert torch.allclose(ours, expected, atol=1e-5) is not ignored


def test_softmax_in_fp32_is_nearer_than_the_16_bit_one() -> None:
    torch.manual_seed(0)
    attn = Attention(query_dim=32, heads=4, dim_head=8, upcast_softmax=True).half().eval()
    hidden = torch.randn(2, 300, 32).half()
    with torch.no_grad():
        ours = patched(attn)(hidden)
        sdx_patches.restore(attn, owner="test")
        attn.set_processor(host.AttnProcessor())
        with_fp32 = attn(hidden)
        attn.upcast_softmax = False
        expected = attn.float()(hidden.float())
    assert (ours - expected).abs().max() <= 2 * (with_fp32 - expected).abs().max() + 1e-4


def test_an_autoencoder_with_spatial_norm_equals_stock() -> None:
    torch.manual_seed(0)
    movq = VQModel(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"), latent_channels=4,
        norm_num_groups=8, norm_type="spatial", num_vq_embeddings=12, vq_embed_dim=4,
    ).eval()  # fmt: skip
    latent = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        expected = movq.decode(latent, force_not_quantize=True).sample
        ours = patched(movq).decode(latent, force_not_quantize=True).sample
    assert torch.allclose(ours, expected, atol=1e-4)
    ran = [layer for layer in sdx_patches.layers(movq) if layer.running != "not run yet"]
    assert ran
    assert all(layer.patched for layer in sdx_patches.layers(movq))


def test_a_model_without_a_list_of_processors_is_reached(calls: list[str]) -> None:
    torch.manual_seed(0)
    unet = StableCascadeUNet(
        in_channels=4, out_channels=4, timestep_ratio_embedding_dim=8, conditioning_dim=16,
        block_out_channels=(16, 32), num_attention_heads=(2, 4), down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1), clip_text_in_channels=16, clip_text_pooled_in_channels=16,
        clip_seq=4,
    ).eval()  # fmt: skip
    assert not hasattr(unet, "attn_processors")
    for parameter in unet.parameters():
        nn.init.normal_(parameter, std=0.1)
    call = dict(
        sample=torch.randn(2, 4, 8, 8), timestep_ratio=torch.tensor([0.5, 0.5]),
        clip_text_pooled=torch.randn(2, 1, 16), clip_text=torch.randn(2, 6, 16),
    )  # fmt: skip
    with torch.no_grad():
        expected = unet(**call).sample
        stock = [m.processor for m in unet.modules() if isinstance(m, Attention)]
        ours = patched(unet)(**call).sample
    assert torch.allclose(ours, expected, atol=1e-4)
    assert len(calls) == len(stock) == 4
    assert all(layer.patched for layer in sdx_patches.layers(unet))
    sdx_patches.restore(unet, owner="test")
    assert [m.processor for m in unet.modules() if isinstance(m, Attention)] == stock


def test_gradients_equal_stock(tiny_unet: Any) -> None:
    gradients = []
    for enable in (False, True):
        unet = tiny_unet()
        if enable:
            patched(unet)
        torch.manual_seed(1)
        sample, context = torch.randn(1, 4, 8, 8), torch.randn(1, 7, 32)
        unet(sample, 10, context).sample.square().mean().backward()
        gradients.append([p.grad for p in unet.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))
