"""A patched autoencoder works in bands by itself: when, when not, and back again."""

import copy
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from diffusers import AutoencoderKL
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import sdx_patches
from sdx_patches import vae as module
from sdx_patches.vae import bands_of, chosen_bands, disable_bands, enable_bands

from .vae_case import build


@pytest.fixture
def vae() -> AutoencoderKL:
    return build()


@pytest.fixture
def latents() -> torch.Tensor:
    return torch.randn(1, 4, 12, 8)


def decode(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return vae.decode(latents).sample


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which halves ran in bands."""
    ran: list[str] = []
    for kind in (module.BandedDecoder, module.BandedEncoder):
        own = kind.run

        def run(self: Any, sample: torch.Tensor, own: Any = own) -> torch.Tensor:
            ran.append(type(self.module).__name__)
            return own(self, sample)

        monkeypatch.setattr(kind, "run", run)
    yield ran
    monkeypatch.undo()


def test_a_patch_has_both_halves_work_in_bands(
    vae: AutoencoderKL, latents: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = decode(vae, latents)
    picture = torch.randn(1, 3, 32, 32)
    encoded = vae.encode(picture).latent_dist.mean
    before = {name: dict(vars(half)) for name, half in vae.named_children()}
    with sdx_patches.patch(vae, owner="a"), counted(monkeypatch) as ran:
        assert bands_of(vae) == "fast"
        assert not chosen_bands(vae)
        torch.testing.assert_close(decode(vae, latents), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(vae.encode(picture).latent_dist.mean, encoded, atol=1e-5, rtol=0)
        assert ran == ["Decoder", "Encoder"]
    assert bands_of(vae) is None
    assert {name: dict(vars(half)) for name, half in vae.named_children()} == before
    assert torch.equal(decode(vae, latents), expected)


def test_fused_false_leaves_the_forward_alone_and_the_last_call_holds(
    vae: AutoencoderKL, latents: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(monkeypatch) as ran:
        for fused, mode in ((False, None), (True, "fast"), (False, None)):
            sdx_patches.patch(vae, owner="a", fused=fused)
            assert bands_of(vae) == mode
            decode(vae, latents)
        # another owner's call holds for all, until it is taken back
        sdx_patches.patch(vae, owner="b", fused=True)
        assert bands_of(vae) == "fast"
        sdx_patches.restore(vae, owner="b")
        assert bands_of(vae) is None
        assert ran == ["Decoder"]
    sdx_patches.restore(vae, owner="a")
    assert "forward" not in vars(vae.decoder)


def test_chosen_bands_stand_before_the_patchs_in_either_order(vae: AutoencoderKL) -> None:
    with sdx_patches.patch(vae, owner="a"):
        enable_bands(vae, low=True)
        assert bands_of(vae) == "low"
        disable_bands(vae)
        assert bands_of(vae) == "fast"
        enable_bands(vae, low=True)
    assert bands_of(vae) == "low"
    with sdx_patches.patch(vae, owner="a"):
        assert bands_of(vae) == "low"
    assert bands_of(vae) == "low"
    disable_bands(vae)
    assert "forward" not in vars(vae.decoder)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_works_in_bands_of_its_own_and_is_given_back(
    vae: AutoencoderKL, latents: torch.Tensor, way: Any
) -> None:
    expected = decode(vae, latents)
    with sdx_patches.patch(vae, owner="a"):
        ours = decode(vae, latents)
        twin = way(vae)
    assert bands_of(twin) == "fast"
    assert torch.equal(decode(twin, latents), ours)
    sdx_patches.restore(twin, owner="anyone")
    assert "forward" not in vars(twin.decoder)
    assert torch.equal(decode(twin, latents), expected)


def _hook(vae: AutoencoderKL) -> None:
    vae.decoder.up_blocks[0].resnets[0].conv1.register_forward_hook(lambda *_: None)


def _activation_hook(vae: AutoencoderKL) -> None:
    vae.decoder.up_blocks[0].resnets[0].nonlinearity.register_forward_hook(
        lambda _, __, out: out * 0.5
    )


def _last_activation_hook(vae: AutoencoderKL) -> None:
    vae.decoder.conv_act.register_forward_hook(lambda _, __, out: out * 0.5)


def _dropout_hook(vae: AutoencoderKL) -> None:
    vae.decoder.mid_block.resnets[0].dropout.register_forward_hook(lambda _, __, out: out * 0.5)


def _replaced(vae: AutoencoderKL) -> None:
    layer = vae.decoder.up_blocks[1].resnets[0].norm2
    own = layer.forward
    layer.forward = lambda rows: own(rows)


def _circular(vae: AutoencoderKL) -> None:
    for layer in vae.modules():
        if isinstance(layer, nn.Conv2d):
            layer.padding_mode = "circular"
            layer._reversed_padding_repeated_twice = [n for n in layer.padding for _ in range(2)]


def _dilated(vae: AutoencoderKL) -> None:
    conv = vae.decoder.up_blocks[0].resnets[0].conv2
    conv.dilation = conv.padding = (2, 2)


def _without_activation(vae: AutoencoderKL) -> None:
    vae.decoder.conv_act = nn.Identity()


def _other_activation(vae: AutoencoderKL) -> None:
    vae.decoder.up_blocks[0].resnets[0].nonlinearity = nn.Tanh()


def _without_norm(vae: AutoencoderKL) -> None:
    vae.decoder.mid_block.resnets[1].norm1 = nn.Identity()


def _without_convolution(vae: AutoencoderKL) -> None:
    vae.decoder.up_blocks[0].upsamplers[0].use_conv = False


def _cast(vae: AutoencoderKL) -> None:
    vae.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)


def _weight_norm(vae: AutoencoderKL) -> None:
    nn.utils.parametrizations.weight_norm(vae.decoder.up_blocks[0].resnets[0].conv1)


def _adapter(vae: AutoencoderKL) -> None:
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["conv1", "conv_out"], init_lora_weights=False)
    inject_adapter_in_model(config, vae)
    vae.requires_grad_(False)


def _trainable(vae: AutoencoderKL) -> None:
    vae.decoder.conv_in.weight.requires_grad_()


CHANGES = (
    _activation_hook, _last_activation_hook, _dropout_hook, _hook, _replaced, _circular, _dilated,
    _without_activation, _other_activation, _without_norm, _without_convolution, _cast,
    _weight_norm, _adapter, _trainable,
)  # fmt: skip


@pytest.mark.parametrize("first", ["patched", "changed"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_stands_before_a_layer_is_not_passed_by(
    vae: AutoencoderKL,
    latents: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    first: str,
) -> None:
    twin = copy.deepcopy(vae)
    change(twin)
    expected = twin.decode(latents).sample
    if first == "patched":
        sdx_patches.patch(vae, owner="a")
    change(vae)
    if first == "changed":
        sdx_patches.patch(vae, owner="a")
    with counted(monkeypatch) as ran:
        assert torch.equal(vae.decode(latents).sample, expected)
        assert not ran


def test_weights_that_are_elsewhere_between_calls_are_not_read(
    vae: AutoencoderKL, latents: torch.Tensor
) -> None:
    expected = decode(vae, latents)
    sdx_patches.patch(vae, owner="a")
    cpu_offload(vae.decoder, torch.device("cpu"))
    assert vae.decoder.conv_in.weight.is_meta
    torch.testing.assert_close(decode(vae, latents), expected, atol=1e-5, rtol=0)
    sdx_patches.restore(vae, owner="a")
    assert torch.equal(decode(vae, latents), expected)
    # accelerate puts back the forward that it found: ours, which serves nobody any more
    remove_hook_from_module(vae.decoder, recurse=True)
    assert torch.equal(decode(vae, latents), expected)


def test_autocast_and_attention_hooks(
    vae: AutoencoderKL, latents: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = decode(vae, latents)
        with sdx_patches.patch(vae, owner="a", attention_op="torch"), counted(monkeypatch) as ran:
            assert torch.equal(decode(vae, latents), expected)
            assert not ran
    seen = []
    vae.decoder.mid_block.attentions[0].register_forward_hook(lambda *_: seen.append(1))
    with sdx_patches.patch(vae, owner="a"), counted(monkeypatch) as ran:
        decode(vae, latents)
    # attention is called as it is, its hooks with it
    assert ran == ["Decoder"]
    assert seen == [1]


@pytest.mark.parametrize("first", ["patched", "compiled"])
def test_a_compiled_decoder_is_the_stock_one_in_one_graph(
    vae: AutoencoderKL, latents: torch.Tensor, first: str
) -> None:
    expected = decode(vae, latents)
    if first == "patched":
        sdx_patches.patch(vae, owner="a")
    decoder = torch.compile(vae.decoder, fullgraph=True, backend="eager")
    if first == "compiled":
        sdx_patches.patch(vae, owner="a")
    with torch.no_grad():
        ours = decoder(vae.post_quant_conv(latents))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    vae.decoder.compile(fullgraph=True, backend="eager")
    assert "compiled" in module.unsupported(vae)
    torch.testing.assert_close(decode(vae, latents), expected, atol=1e-5, rtol=0)


def test_a_middle_without_attention_works_in_bands(latents: torch.Tensor) -> None:
    vae = build(mid_block_add_attention=False)
    expected = decode(vae, latents)
    with sdx_patches.patch(vae, owner="a"):
        assert bands_of(vae) == "fast"
        torch.testing.assert_close(decode(vae, latents), expected, atol=1e-5, rtol=0)
    assert "forward" not in vars(vae.decoder)


def test_a_replaced_decode_is_named() -> None:
    vae = build()
    vae.decode = torch.compile(vae.decode, backend="eager")
    assert "replaced" in module.unsupported(vae)


def test_a_plan_knows_what_would_not_run_in_bands(vae: AutoencoderKL) -> None:
    assert module.unsupported(vae) == ""
    handle = vae.encoder.conv_in.register_forward_hook(lambda *_: None)
    assert "hook" in module.unsupported(vae)
    handle.remove()
    # accelerate leaves each layer's own forward on it
    for half in (vae, vae.decoder):
        cpu_offload(half, torch.device("cpu"))
        remove_hook_from_module(half, recurse=True)
    assert "forward" in vars(vae.decoder.conv_in)
    assert module.unsupported(vae) == ""
    before = {n: dict(vars(m)) for n, m in vae.named_modules()}
    with sdx_patches.patch(vae, owner="a"):
        assert bands_of(vae) == "fast"
    assert {n: dict(vars(m)) for n, m in vae.named_modules()} == before


def test_attention_s_output_is_not_written_to(vae: AutoencoderKL, latents: torch.Tensor) -> None:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    attention = vae.decoder.mid_block.attentions[0]
    attention.register_forward_hook(lambda _, __, out: kept.append((out, out.clone())))
    with sdx_patches.patch(vae, owner="a"):
        decode(vae, latents)
    assert torch.equal(*kept[0])


def test_hooks_on_all_modules_see_all_of_them(vae: AutoencoderKL, latents: torch.Tensor) -> None:
    seen: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda layer, *_: seen.append(type(layer).__name__)
    )
    try:
        decode(vae, latents)
        stock = len(seen)
        with sdx_patches.patch(vae, owner="a", attention_op="torch"):
            decode(vae, latents)
    finally:
        hook.remove()
    assert len(seen) == 2 * stock


def test_vmap_and_tiny_pictures_have_stocks_words() -> None:
    vae = build(mid_block_add_attention=False)
    batch = torch.randn(3, 1, 4, 6, 5)
    expected = torch.func.vmap(lambda z: vae.decode(z).sample)(batch)
    with pytest.raises(RuntimeError) as stock:
        vae.encode(torch.randn(1, 3, 3, 2))
    with sdx_patches.patch(vae, owner="a"):
        ours = torch.func.vmap(lambda z: vae.decode(z).sample)(batch)
        with pytest.raises(RuntimeError, match=re.escape(str(stock.value)[:40])):
            vae.encode(torch.randn(1, 3, 3, 2))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_it_is_said_what_runs_and_why(vae: AutoencoderKL) -> None:
    assert sdx_patches.fused(vae) == {}
    sdx_patches.patch(vae, owner="a")
    assert sdx_patches.fused(vae) == {"": "bands of rows (fast), norms fused (reference)"}
    enable_bands(vae, low=True)
    assert "(low)" in sdx_patches.fused(vae)[""]
    disable_bands(vae)
    handle = vae.decoder.conv_in.register_forward_hook(lambda *_: None)
    assert "its own forward: somebody has put a hook" in sdx_patches.fused(vae)[""]
    handle.remove()
    sdx_patches.patch(vae, owner="a", fused=False)
    assert sdx_patches.fused(vae) == {"": "its own forward: fused kernels are not wanted"}
    sdx_patches.restore(vae, owner="a")
    assert sdx_patches.fused(vae) == {}
