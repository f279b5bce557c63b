"""Image prompts in whole models: the same weights, and the loaders still know them."""

import copy
import pickle
from typing import Any

import pytest
import torch
from diffusers import MotionAdapter, UNetMotionModel
from diffusers.hooks import apply_layerwise_casting
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import Attention
from torch import Tensor

import sdx_accel  # noqa: F401  (attaches enable_xattn)
import sdx_patches
from sdx_patches.ip_adapter import SdxIPAdapterAttnProcessor
from sdx_patches.plain import SdxEagerAttnProcessor, SdxPlainAttnProcessor

from .ip_adapter_case import both, layer, patched, prompt


def adapter(unet: Any, dim: int = 16, seed: int = 3) -> dict[str, Any]:
    """An IP-Adapter file's contents, for images embedded in `dim` numbers."""
    generator = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    width = unet.config.cross_attention_dim
    names = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    layers = {}
    for number, name in enumerate(names):
        rows = unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for part in ("to_k_ip", "to_v_ip"):
            layers[f"{2 * number + 1}.{part}.weight"] = weights(rows, width)
    projection = {
        "proj.weight": weights(4 * width, dim), "proj.bias": weights(4 * width),
        "norm.weight": torch.ones(width), "norm.bias": torch.zeros(width),
    }  # fmt: skip
    return {"image_proj": projection, "ip_adapter": layers}


def load(unet: Any, count: int = 1) -> Any:
    states = [adapter(unet, seed=3 + number) for number in range(count)]
    unet._load_ip_adapter_weights(states, low_cpu_mem_usage=False)
    return unet


def images(seed: int = 5, count: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 1, 16, generator=generator) for _ in range(count)]


def prompted(unet_out: Any, unet: Any) -> Tensor:
    out: Tensor = unet_out(unet, added_cond_kwargs={"image_embeds": images()})
    return out


def cross(unet: Any) -> list[Attention]:
    return [m for m in unet.modules() if isinstance(m, Attention) and m.is_cross_attention]


@pytest.mark.parametrize("build", ["tiny_sd", "tiny_sdxl"])
@pytest.mark.parametrize("order", ["load first", "enable first"])
def test_case_064_loading_and_enabling_in_any_order(
    request: pytest.FixtureRequest, latents: Any, calls: list[str], build: str, order: str
) -> None:
    make = request.getfixturevalue(build)
    call = {"ip_adapter_image_embeds": images()}
    stock = make()
    without = latents(stock)
    load(stock.unet)
    stock.set_ip_adapter_scale(0.6)
    expected = latents(stock, **call)
    assert (expected - without).abs().max() > 1e-2, "the image prompt has to change something"
    pipe = make()
    if order == "load first":
        load(pipe.unet)
    patched(pipe)
    if order == "enable first":
        load(pipe.unet)
    pipe.set_ip_adapter_scale(0.6)
    assert torch.allclose(latents(pipe, **call), expected, atol=1e-4)
    assert {type(attn.processor) for attn in cross(pipe.unet)} == {SdxIPAdapterAttnProcessor}
    assert all(layer.patched for layer in sdx_patches.layers(pipe))
    # two steps: each cross-attention attends the text and one image
    encoder_layers = sum(layer.path.startswith("text") for layer in sdx_patches.layers(pipe))
    unet_layers = sum(layer.path.startswith("unet") for layer in sdx_patches.layers(pipe))
    assert len(calls) == 2 * encoder_layers + 2 * (unet_layers + len(cross(pipe.unet)))


def test_an_op_that_adds_one_hundredth_changes_the_output(
    tiny_unet: Any, unet_out: Any, shift_op: Any
) -> None:
    unet = patched(load(tiny_unet()))
    expected = prompted(unet_out, unet)
    shift_op()
    assert (prompted(unet_out, unet) - expected).abs().max() > 1e-4


def test_case_066_the_weights_are_the_same_ones(tiny_unet: Any, unet_out: Any) -> None:
    unet = load(tiny_unet(), count=2)
    stock = [attn.processor for attn in cross(unet)]
    before = {id(p) for p in unet.parameters()}
    states = unet.state_dict()
    patched(unet)
    for attn, processor in zip(cross(unet), stock, strict=True):
        assert isinstance(attn.processor, host.IPAdapterAttnProcessor2_0)
        assert attn.processor.to_k_ip is processor.to_k_ip
        assert attn.processor.to_v_ip is processor.to_v_ip
        assert attn.processor.scale is processor.scale
    assert {id(p) for p in unet.parameters()} == before
    assert list(unet.state_dict()) == list(states)
    assert all(torch.equal(unet.state_dict()[name], states[name]) for name in states)
    sdx_patches.restore(unet, owner="test")
    assert [attn.processor for attn in cross(unet)] == stock
    assert {id(p) for p in unet.parameters()} == before
    assert not any("stock" in vars(processor) for processor in stock)


def test_saved_weights_load_into_a_stock_model(tiny_unet: Any, unet_out: Any) -> None:
    unet = patched(load(tiny_unet()))
    with torch.no_grad():
        for attn in cross(unet):
            attn.processor.to_k_ip[0].weight *= 3
    twin = load(tiny_unet())
    twin.load_state_dict(unet.state_dict())
    assert torch.allclose(prompted(unet_out, unet), prompted(unet_out, twin), atol=1e-4)
    again = patched(load(tiny_unet()))
    again.load_state_dict(twin.state_dict())
    assert torch.equal(prompted(unet_out, again), prompted(unet_out, unet))


def test_scales_set_at_any_time_hold(tiny_sd: Any, latents: Any) -> None:
    call = {"ip_adapter_image_embeds": images()}
    scales = [0.6, 0.0, {"up": {"block_0": [0.0]}}, 1.0]
    stock, pipe = tiny_sd(), tiny_sd()
    load(stock.unet)
    load(pipe.unet)
    patched(pipe)
    for number, scale in enumerate(scales):
        for each in (stock, pipe):
            each.set_ip_adapter_scale(scale)
        if number == 2:
            sdx_patches.restore(pipe, owner="test")
        assert torch.allclose(latents(pipe, **call), latents(stock, **call), atol=1e-4)
        if number == 2:
            patched(pipe)
    for attn in cross(pipe.unet):
        attn.processor.scale = [0.25]  # not in place: only ours knows of it
        attn.processor.note = "kept"
    sdx_patches.restore(pipe, owner="test")
    assert all(attn.processor.scale == [0.25] for attn in cross(pipe.unet))
    assert all(attn.processor.note == "kept" for attn in cross(pipe.unet))


def test_case_068_enabling_after_loading_leaves_no_slicing(tiny_sd: Any, latents: Any) -> None:
    call = {"ip_adapter_image_embeds": images()}
    pipe = tiny_sd()
    load(pipe.unet)
    expected = latents(pipe, **call)
    pipe.enable_xattn(vram=4)
    try:
        assert torch.allclose(latents(pipe, **call), expected, atol=1e-4)
        assert all(
            isinstance(attn.processor, host.IPAdapterAttnProcessor2_0) for attn in cross(pipe.unet)
        )
    finally:
        pipe.disable_xattn()


def test_case_071_unloading_leaves_the_fast_attention_on(tiny_sd: Any, latents: Any) -> None:
    pipe, twin = tiny_sd(), tiny_sd()
    expected = latents(pipe)
    stock = [m for m in pipe.unet.modules() if isinstance(m, Attention)]
    patched(pipe)
    for each in (pipe, twin):
        load(each.unet)
    assert not torch.allclose(latents(pipe, ip_adapter_image_embeds=images()), expected, atol=1e-2)
    for each in (pipe, twin):
        each.unload_ip_adapter()
    assert torch.allclose(latents(pipe), expected, atol=1e-4)
    assert {type(attn.processor) for attn in stock} == {SdxPlainAttnProcessor}
    unet = [layer for layer in sdx_patches.layers(pipe) if layer.path.startswith("unet.")]
    assert all(layer.patched and layer.running != "not run yet" for layer in unet)
    sdx_patches.restore(pipe, owner="test")
    assert torch.equal(latents(pipe), latents(twin))
    # loading and unloading make new plain processors, with us and without
    for attn in stock:
        assert type(attn.processor) is host.AttnProcessor2_0
        assert "processor" not in attn._modules


@pytest.mark.parametrize("pictures", [False, True])
def test_processors_that_were_kept_come_off_after_unloading(
    tiny_sd: Any, latents: Any, pictures: bool
) -> None:
    def play(pipe: Any) -> Any:
        keep = pipe.unet.attn_processors
        for processors in (host.AttnProcessor(), keep):
            pipe.unet.set_attn_processor(processors)
            if pictures:
                latents(pipe)
        load(pipe.unet)
        pipe.unload_ip_adapter()
        return pipe

    pipe, twin = tiny_sd(), play(tiny_sd())
    play(patched(pipe))
    sdx_patches.restore(pipe, owner="test")
    kinds = [[type(p) for p in each.unet.attn_processors.values()] for each in (pipe, twin)]
    assert kinds[0] == kinds[1]


def test_default_processors_as_without_us(tiny_unet: Any) -> None:
    ours, twin = patched(load(tiny_unet())), load(tiny_unet())
    for unet in (ours, twin):
        unet.set_default_attn_processor()
    assert {type(attn.processor) for attn in cross(ours)} == {SdxEagerAttnProcessor}
    sdx_patches.restore(ours, owner="test")
    assert [type(attn.processor) for attn in cross(ours)] == [
        type(attn.processor) for attn in cross(twin)
    ]


def test_processors_made_anew_from_their_class_get_their_weights_back(
    tiny_unet: Any, unet_out: Any
) -> None:
    unet = patched(load(tiny_unet()))
    stock = [attn.processor.stock for attn in cross(unet)]
    expected = prompted(unet_out, unet)
    for attn in cross(unet):
        attn.set_processor(type(attn.processor)())
    assert torch.equal(prompted(unet_out, unet), expected)
    sdx_patches.restore(unet, owner="test")
    assert [attn.processor for attn in cross(unet)] == stock


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_case_088_a_copy_has_weights_of_its_own(tiny_unet: Any, unet_out: Any, how: str) -> None:
    unet = patched(load(tiny_unet()))
    expected = prompted(unet_out, unet)
    twin = copy.deepcopy(unet) if how == "deepcopy" else pickle.loads(pickle.dumps(unet))
    assert list(twin.state_dict()) == list(unet.state_dict())
    assert torch.equal(prompted(unet_out, twin), expected)
    with torch.no_grad():
        for attn in cross(twin):
            attn.processor.to_v_ip[0].weight.zero_()
    assert not torch.allclose(prompted(unet_out, twin), expected, atol=1e-3)
    changed = prompted(unet_out, twin)
    sdx_patches.restore(twin, owner="test")
    assert torch.allclose(prompted(unet_out, twin), changed, atol=1e-4), "the copy's own weights"
    assert {type(attn.processor) for attn in cross(twin)} == {host.IPAdapterAttnProcessor2_0}
    assert torch.equal(prompted(unet_out, unet), expected)


def test_a_failure_half_way_puts_the_weights_back(
    tiny_unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = load(tiny_unet())
    stock = [attn.processor for attn in cross(unet)]
    monkeypatch.setattr(unet, "register_forward_pre_hook", None)
    with pytest.raises(TypeError):
        patched(unet)
    assert [attn.processor for attn in cross(unet)] == stock
    assert all("processor" in attn._modules for attn in cross(unet))


def test_training_and_device_moves_reach_the_shared_weights(tiny_unet: Any) -> None:
    unet = patched(load(tiny_unet()))
    stock = [attn.processor.stock for attn in cross(unet)]
    unet.train()
    unet.to(torch.float64)
    sdx_patches.restore(unet, owner="test")
    assert all(processor.training for processor in stock)
    assert all(p.dtype == torch.float64 for processor in stock for p in processor.parameters())


def test_weights_stored_in_eight_bits() -> None:
    # the host's own image projection reads the stored dtype and fails, so one layer alone
    attn = layer()
    apply_layerwise_casting(attn, torch.float8_e4m3fn, torch.float32)
    ours, expected = both(attn, prompt(4))
    assert attn.processor.to_k_ip[0].weight.dtype == torch.float8_e4m3fn
    assert torch.allclose(ours, expected, atol=1e-5)


def test_gradients_equal_stock(tiny_unet: Any) -> None:
    gradients = []
    for enable in (False, True):
        unet = load(tiny_unet())
        if enable:
            patched(unet)
        torch.manual_seed(1)
        sample, context = torch.randn(2, 4, 8, 8), torch.randn(2, 7, 32)
        out = unet(sample, 10, context, added_cond_kwargs={"image_embeds": images()}).sample
        out.square().mean().backward()
        gradients.append([p.grad for attn in cross(unet) for p in attn.processor.parameters()])
    assert all(grad is not None for grads in gradients for grad in grads)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fullgraph_compiles_as_the_stock_layer_does(masked: bool) -> None:
    attn = layer()
    hidden, call = torch.randn(2, 16, 32), {"encoder_hidden_states": prompt(4)}
    if masked:
        call["ip_adapter_masks"] = [torch.rand(1, 1, 8, 8)]
    for root in (attn, patched(attn)):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(root, backend="eager", fullgraph=True)
            assert torch.allclose(compiled(hidden, **call), root(hidden, **call), atol=1e-6)


def test_a_motion_model_made_from_it_keeps_the_image_prompt(tiny_unet: Any) -> None:
    def motion(unet: Any) -> UNetMotionModel:
        motions = MotionAdapter(
            block_out_channels=(32, 64), motion_layers_per_block=1, motion_norm_num_groups=8,
            motion_num_attention_heads=2,
        )  # fmt: skip
        return UNetMotionModel.from_unet2d(unet, motions)

    counts = [
        sum(
            type(p) is host.IPAdapterAttnProcessor2_0 for p in motion(unet).attn_processors.values()
        )
        for unet in (load(tiny_unet()), patched(load(tiny_unet())))
    ]
    assert counts[0] == counts[1] > 0
