"""Options and loaders of the host that replace processors after ours were put in."""

from typing import Any

import pytest
import torch
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import Attention
from torch import nn

import sdx_patches
from sdx_patches.plain import SdxFusedAttnProcessor, SdxPlainAttnProcessor, SdxSlicedAttnProcessor


def patched(root: Any, **settings: Any) -> Any:
    sdx_patches.patch(root, owner="test", **settings)
    return root


def classes(root: nn.Module) -> set[type]:
    return {type(m.processor) for m in root.modules() if isinstance(m, Attention)}


@pytest.mark.parametrize("order", ["fuse first", "enable first"])
def test_case_086_fused_projections_are_used_while_active(
    tiny_unet: Any, unet_out: Any, order: str
) -> None:
    expected = unet_out(tiny_unet())
    unet = tiny_unet()
    if order == "fuse first":
        unet.fuse_qkv_projections()
    patched(unet)
    if order == "enable first":
        unet.fuse_qkv_projections()
    assert torch.allclose(unet_out(unet), expected, atol=1e-4)
    assert classes(unet) == {SdxFusedAttnProcessor}
    changed = next(m for m in unet.modules() if isinstance(m, Attention))
    with torch.no_grad():
        changed.to_qkv.weight *= 1.5
    assert not torch.allclose(unet_out(unet), expected, atol=1e-4)
    unet.unfuse_qkv_projections()
    assert torch.allclose(unet_out(unet), expected, atol=1e-4)
    assert classes(unet) == {SdxPlainAttnProcessor}
    with torch.no_grad():
        changed.to_q.weight *= 1.5
    assert not torch.allclose(unet_out(unet), expected, atol=1e-4)


def test_case_087_slicing_after_enabling_warns_once(tiny_sd: Any, latents: Any) -> None:
    expected = latents(tiny_sd())
    pipe = patched(tiny_sd())
    pipe.enable_attention_slicing(1)
    with pytest.warns(UserWarning, match="enable_attention_slicing") as warned:
        assert torch.allclose(latents(pipe), expected, atol=1e-4)
    assert len(warned) == 1
    sliced = [layer for layer in sdx_patches.layers(pipe) if layer.path.startswith("unet.")]
    assert {layer.running for layer in sliced} == {"SlicedAttnProcessor"}
    assert all("disable_attention_slicing()" in layer.reason for layer in sliced)
    pipe.disable_attention_slicing()
    assert torch.allclose(latents(pipe), expected, atol=1e-4)
    assert all(layer.patched for layer in sdx_patches.layers(pipe))
    assert classes(pipe.unet) == {SdxPlainAttnProcessor}


def test_case_087_enabling_after_slicing_takes_over(tiny_sd: Any, latents: Any) -> None:
    pipe = tiny_sd()
    expected = latents(pipe)
    pipe.enable_attention_slicing(1)
    sliced = [m.processor for m in pipe.unet.modules() if isinstance(m, Attention)]
    patched(pipe)
    assert classes(pipe.unet) == {SdxSlicedAttnProcessor}
    assert torch.allclose(latents(pipe), expected, atol=1e-4)
    sdx_patches.restore(pipe, owner="test")
    assert [m.processor for m in pipe.unet.modules() if isinstance(m, Attention)] == sliced


def test_processors_made_anew_from_their_class_are_undone(tiny_unet: Any, unet_out: Any) -> None:
    unet = tiny_unet()
    stock = {m: m.processor for m in unet.modules() if isinstance(m, Attention)}
    expected = unet_out(unet)
    patched(unet, attention_op="torch")
    unet.set_attn_processor({name: type(p)() for name, p in unet.attn_processors.items()})
    assert torch.allclose(unet_out(unet), expected, atol=1e-4)
    assert {layer.requested for layer in sdx_patches.layers(unet)} == {"torch"}
    sdx_patches.restore(unet, owner="test")
    assert_made_anew(stock)


def assert_made_anew(stock: dict[Any, Any]) -> None:
    """Each layer has a new processor of the class it had, which is what it gets without us."""
    made = [attn.processor for attn in stock]
    assert [type(processor) for processor in made] == [type(old) for old in stock.values()]
    assert not {id(processor) for processor in made} & {id(old) for old in stock.values()}
    assert len({id(processor) for processor in made}) == len(stock)


def test_processors_are_put_back_after_the_host_replaced_them(tiny_sd: Any, latents: Any) -> None:
    pipe = patched(tiny_sd())
    replaced = host.AttnProcessor2_0()
    pipe.unet.set_attn_processor(replaced)
    pipe.vae.set_attn_processor(replaced)
    waiting = [layer for layer in sdx_patches.layers(pipe) if "since" in layer.reason]
    assert len(waiting) == 10
    latents(pipe, output_type="pt")
    assert classes(pipe.unet) == {SdxPlainAttnProcessor}
    assert classes(pipe.vae.decoder) == {SdxPlainAttnProcessor}
    sdx_patches.restore(pipe, owner="test")
    assert all(m.processor is replaced for m in pipe.unet.modules() if isinstance(m, Attention))


@pytest.mark.parametrize("runs", [False, True])
def test_fusing_after_processors_were_made_anew_is_undone(
    tiny_unet: Any, unet_out: Any, runs: bool
) -> None:
    unet = tiny_unet()
    stock = {m: m.processor for m in unet.modules() if isinstance(m, Attention)}
    patched(unet)
    unet.set_attn_processor({name: type(p)() for name, p in unet.attn_processors.items()})
    if runs:
        unet_out(unet)
    unet.fuse_qkv_projections()
    if runs:
        unet_out(unet)
        unet.unfuse_qkv_projections()
        sdx_patches.restore(unet, owner="test")
    else:
        sdx_patches.restore(unet, owner="test")
        unet.unfuse_qkv_projections()
    assert_made_anew(stock)


def test_a_compiled_model_is_patched_inside_its_wrapper(tiny_sd: Any) -> None:
    pipe = tiny_sd()
    pipe.unet = torch.compile(pipe.unet, backend="eager")
    pipe.vae.decoder = torch.compile(pipe.vae.decoder, backend="eager")
    wrappers = [pipe.unet, pipe.vae.decoder]
    keys = [set(vars(wrapper)) for wrapper in wrappers]
    patched(pipe)
    assert [set(vars(wrapper)) for wrapper in wrappers] == keys
    assert not any(wrapper._forward_pre_hooks for wrapper in wrappers)
    assert all(wrapper._orig_mod._forward_pre_hooks for wrapper in wrappers)
    assert {layer.path.split(".")[0] for layer in sdx_patches.layers(pipe) if layer.patched} == {
        "unet", "vae", "text_encoder",
    }  # fmt: skip
    assert sdx_patches.layers(pipe.unet) == sdx_patches.layers(pipe.unet._orig_mod)
    sdx_patches.restore(pipe, owner="test")
    assert not any(layer.patched for layer in sdx_patches.layers(pipe))
    assert not any(wrapper._orig_mod._forward_pre_hooks for wrapper in wrappers)
