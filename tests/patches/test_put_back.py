"""What comes off however it came there: replaced models, kept processors, parts of TorchScript."""

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPAGPipeline
from diffusers.models import attention_processor as host
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    SlicedAttnProcessor,
)
from torch import nn

import sdx_accel  # noqa: F401  (attaches enable_xattn)
import sdx_patches
from sdx_patches import session as sessions
from sdx_patches.attention import SdxAttnProcessor
from sdx_patches.session import ATTRIBUTE, Settings, Site


def ours(root: nn.Module) -> list[str]:
    """Paths at which anything of ours is left."""
    return [
        path
        for path, module in root.named_modules()
        if ATTRIBUTE in vars(module)
        or isinstance(getattr(module, "processor", None), SdxAttnProcessor)
        or getattr(getattr(module, "config", None), "_attn_implementation", "") == "sdx_accel"
    ]


def kinds(unet: Any) -> list[type]:
    return [type(processor) for processor in unet.attn_processors.values()]


class Traced(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.fixture(params=["script", "trace"])
def torchscript(request: pytest.FixtureRequest) -> nn.Module:
    if request.param == "script":
        return torch.jit.script(Traced())
    return torch.jit.trace(Traced(), torch.zeros(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_a_part_of_torchscript_is_passed_by(
    tiny_sd: Any, latents: Any, torchscript: nn.Module, whole: bool
) -> None:
    pipe = tiny_sd()
    expected = latents(pipe)
    if whole:
        pipe.register_modules(safety_checker=torchscript)
    else:
        pipe.unet.mid_block.add_module("extra", torchscript)
    pipe.enable_xattn()
    layers = pipe.xattn_report().layers
    assert len(layers) == 13
    assert all(layer.patched for layer in layers)
    pipe.safety_checker, checker = None, pipe.safety_checker
    assert torch.allclose(latents(pipe), expected, atol=1e-4)
    pipe.safety_checker = checker
    pipe.disable_xattn()
    assert [ours(part) for part in (pipe.unet, pipe.vae, pipe.text_encoder)] == [[], [], []]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_part_that_came_later_does_not_keep_the_others(
    tiny_sd: Any, torchscript: nn.Module
) -> None:
    class Broken(nn.Module):
        def modules(self) -> Any:
            raise OSError("broken")

    pipe = tiny_sd()
    pipe.enable_xattn()
    pipe.register_modules(safety_checker=torchscript)
    unet, pipe.unet = pipe.unet, Broken()
    with pytest.raises(OSError, match="broken"):
        pipe.disable_xattn()
    assert [ours(part) for part in (unet, pipe.vae, pipe.text_encoder)] == [[], [], []]


@pytest.mark.parametrize("pictures", [False, True])
def test_processors_that_were_kept_while_ours_was_on(
    tiny_unet: Any, unet_out: Any, pictures: bool
) -> None:
    def play(unet: Any) -> Any:
        keep = dict(unet.attn_processors)
        for processors in (AttnProcessor(), dict(keep)):
            unet.set_attn_processor(processors)
            if pictures:
                unet_out(unet)
        # as loading and unloading an image prompt does
        unet.set_attn_processor({n: type(p)() for n, p in unet.attn_processors.items()})
        return unet

    twin, unet = play(tiny_unet()), tiny_unet()
    unet.enable_xattn()
    play(unet)
    unet.disable_xattn()
    assert kinds(unet) == kinds(twin) == [AttnProcessor2_0] * 8
    assert not ours(unet)


def test_one_that_cannot_be_made_anew_is_the_one_that_was_there_last(
    tiny_unet: Any, unet_out: Any
) -> None:
    unet = tiny_unet()
    sliced = SlicedAttnProcessor(2)
    unet.set_attn_processor(sliced)
    unet.enable_xattn()
    keep = dict(unet.attn_processors)
    for processors in (AttnProcessor(), keep):
        unet.set_attn_processor(processors)
        unet_out(unet)
    # the host's own cannot be made of their class alone, ours can
    unet.set_attn_processor({n: type(p)() for n, p in unet.attn_processors.items()})
    unet.disable_xattn()
    assert all(processor is sliced for processor in unet.attn_processors.values())


@pytest.mark.parametrize("kind", [AttnProcessor, AttnProcessor2_0])
def test_processors_that_are_put_back_after_ours_is_off(
    tiny_unet: Any, unet_out: Any, calls: list[str], kind: type
) -> None:
    unet = tiny_unet()
    expected = unet_out(unet)
    unet.set_attn_processor(kind())
    stock = dict(unet.attn_processors)
    unet.enable_xattn()
    kept = dict(unet.attn_processors)
    unet.disable_xattn()
    unet.set_attn_processor(dict(kept))
    assert torch.allclose(unet_out(unet), expected, atol=1e-4)
    assert not calls, "nothing is enabled"
    assert not any(layer.patched for layer in sdx_patches.layers(unet))
    unet.disable_xattn()
    assert all(a is b for a, b in zip(unet.attn_processors.values(), stock.values(), strict=True))
    # and the same with processors that the host has made from their class meanwhile
    unet.set_attn_processor({name: type(p)() for name, p in kept.items()})
    assert torch.allclose(unet_out(unet), expected, atol=1e-4)
    assert not calls
    unet.enable_xattn()
    unet_out(unet)
    assert calls
    unet.disable_xattn()
    assert kinds(unet) == [kind] * 8
    assert not ours(unet)


def test_fused_projections_of_processors_that_were_put_back(tiny_unet: Any) -> None:
    unet = tiny_unet()
    unet.enable_xattn()
    kept = dict(unet.attn_processors)
    unet.disable_xattn()
    unet.set_attn_processor(dict(kept))
    unet.fuse_qkv_projections()
    unet.disable_xattn()
    unet.unfuse_qkv_projections()
    assert kinds(unet) == [AttnProcessor2_0] * 8


def test_switching_off_in_a_call_with_perturbed_attention(tiny_sd: Any, latents: Any) -> None:
    parts = {name: part for name, part in tiny_sd().components.items() if name != "image_encoder"}
    pipe = StableDiffusionPAGPipeline(
        **parts, pag_applied_layers=["mid"], requires_safety_checker=False
    )
    pipe.set_progress_bar_config(disable=True)
    expected = latents(pipe, pag_scale=0.9)

    def disable(pipe: Any, step: int, time: Any, values: Any) -> Any:
        pipe.disable_xattn()
        return values

    pipe.enable_xattn()
    on = latents(pipe, pag_scale=0.9, callback_on_step_end=disable)
    assert torch.allclose(on, expected, atol=1e-4)
    assert torch.equal(latents(pipe, pag_scale=0.9), expected)
    pipe.disable_xattn()
    assert not ours(pipe.unet)
    assert {type(m.processor) for m in pipe.unet.modules() if isinstance(m, Attention)} == {
        host.AttnProcessor2_0
    }


@pytest.mark.parametrize("by", ["pipeline", "everyone"])
@pytest.mark.parametrize("part", ["text_encoder", "unet", "vae"])
def test_a_model_that_was_replaced_is_given_back(
    tiny_sd: Any, tiny_unet: Any, part: str, by: str
) -> None:
    pipe = tiny_sd()
    pipe.enable_xattn()
    gone = getattr(pipe, part)
    assert ours(gone)
    setattr(pipe, part, tiny_unet() if part == "unet" else None)
    if by == "everyone":
        sdx_patches.restore(pipe, owner=sdx_patches.EVERYONE)
    else:
        pipe.disable_xattn()
    assert not ours(gone)


def test_a_part_of_a_model_that_was_replaced_is_given_back(tiny_sd: Any) -> None:
    pipe = tiny_sd()
    pipe.enable_xattn()
    gone, pipe.vae.decoder = pipe.vae.decoder, tiny_sd().vae.decoder
    pipe.disable_xattn()
    assert not ours(gone)
    assert not ours(pipe.vae)


def test_a_replaced_model_keeps_its_other_owner(tiny_sd: Any) -> None:
    first, second = tiny_sd(), tiny_sd()
    second.unet = first.unet
    first.enable_xattn()
    second.enable_xattn()
    first.unet = None
    first.disable_xattn()
    assert ours(second.unet)
    second.disable_xattn()
    assert not ours(second.unet)


def test_nothing_is_kept_alive(tiny_sd: Any) -> None:
    pipe = tiny_sd()
    pipe.enable_xattn()
    unet, pipe.unet = weakref.ref(pipe.unet), None
    gc.collect()
    assert unet() is None
    root, before = weakref.ref(pipe), len(sessions._CLAIMED)
    del pipe
    gc.collect()
    assert root() is None
    assert len(sessions._CLAIMED) == before - 1


def test_settings_are_read_while_others_come_and_go(tiny_unet: Any) -> None:
    site = Site(owners={"first": Settings("torch")})
    module = nn.Identity()
    vars(module)[ATTRIBUTE] = site
    stop, failed = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                site.settings  # noqa: B018
            except RuntimeError as error:
                failed.append(error)
                return

    # as a reader that stands between two owners meets it, at each change
    for change in (
        lambda: sdx_patches.PatchSession(module, "second", Settings()).claim(module),
        lambda: sessions.release(module, "second"),
        lambda: sessions.release(module, sdx_patches.EVERYONE),
    ):
        reader = reversed(site.owners.values())
        change()
        next(reader)
    assert ATTRIBUTE not in vars(module)
    vars(module)[ATTRIBUTE] = site
    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(200):
        sdx_patches.PatchSession(module, "second", Settings()).claim(module)
        sessions.release(module, "second")
    stop.set()
    thread.join()
    assert failed == []


def test_a_shallow_copy_is_given_back_as_well(tiny_unet: Any) -> None:
    unet = tiny_unet()
    unet.enable_xattn()
    shallow = copy.copy(unet)
    unet.disable_xattn()
    shallow.disable_xattn()
    assert not ours(shallow)
    assert vars(shallow).keys() == vars(copy.copy(tiny_unet())).keys()
