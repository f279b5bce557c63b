"""What users replace on layers, classes and models of the host stays theirs, and is called."""

import functools
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0

import sdx_accel  # noqa: F401  (attaches enable_xattn)
import sdx_patches


def attentions(unet: Any) -> list[Attention]:
    return [module for module in unet.modules() if isinstance(module, Attention)]


def keep_maps(attn: Attention) -> list[torch.Tensor]:
    """As scripts that draw attention maps do."""
    maps: list[torch.Tensor] = []
    scores = attn.get_attention_scores

    def keeping(*args: Any, **kwargs: Any) -> torch.Tensor:
        maps.append(scores(*args, **kwargs))
        return maps[-1]

    attn.get_attention_scores = keeping  # type: ignore[method-assign]
    return maps


@pytest.mark.parametrize("order", ["before", "between", "after"])
def test_attention_scores_that_a_user_keeps(tiny_unet: Any, unet_out: Any, order: str) -> None:
    unet = tiny_unet()
    attn = attentions(unet)[0]
    if order == "after":
        unet.enable_xattn()
    unet.set_attn_processor(AttnProcessor())
    if order == "between":
        unet.enable_xattn()
    maps = keep_maps(attn)
    # one more call takes layers over; it has to leave this one
    unet.enable_xattn()
    unet_out(unet)
    assert len(maps) == 1
    left = [layer for layer in sdx_patches.layers(unet) if not layer.patched]
    assert [layer.running for layer in left] == ["AttnProcessor"]
    assert "get_attention_scores() was replaced" in left[0].reason
    unet.disable_xattn()
    assert {type(m.processor) for m in attentions(unet)} == {AttnProcessor}
    assert "get_attention_scores" in vars(attn)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_call_that_was_replaced_on_the_class(
    tiny_unet: Any, unet_out: Any, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    called: list[Any] = []
    stock = AttnProcessor2_0.__call__

    def mine(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(self)
        return stock(self, *args, **kwargs)

    unet = tiny_unet()
    monkeypatch.setattr(
        AttnProcessor2_0, "__call__", functools.wraps(stock)(mine) if wrapped else mine
    )
    unet.enable_xattn()
    unet_out(unet)
    assert len(called) == 8
    layers = sdx_patches.layers(unet)
    assert not any(layer.patched for layer in layers)
    assert all("__call__ of AttnProcessor2_0 was replaced" in layer.reason for layer in layers)
    monkeypatch.undo()
    unet.enable_xattn()
    assert all(layer.patched for layer in sdx_patches.layers(unet))


def test_another_class_of_the_host_in_its_place(
    tiny_unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AttnProcessor2_0, "__call__", AttnProcessor.__call__)
    unet = tiny_unet()
    unet.enable_xattn()
    assert not any(layer.patched for layer in sdx_patches.layers(unet))


def test_methods_that_were_replaced_on_the_class(
    tiny_unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attention, "head_to_batch_dim", lambda *args, **kwargs: args[1])
    unet = tiny_unet()
    unet.enable_xattn()
    assert {layer.patched for layer in sdx_patches.layers(unet)} == {False}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_users_default_processor_stays(tiny_unet: Any, when: str) -> None:
    unet = tiny_unet()
    called: list[str] = []

    def mine() -> None:
        called.append("mine")

    if when == "before":
        unet.set_default_attn_processor = mine
    unet.enable_xattn()
    unet.enable_xattn()
    if when == "after":
        unet.set_default_attn_processor = mine
    unet.set_default_attn_processor()
    assert called == ["mine"]
    assert all(layer.patched for layer in sdx_patches.layers(unet))
    unet.disable_xattn()
    assert vars(unet)["set_default_attn_processor"] is mine


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_users_printed_line_stays(tiny_unet: Any, when: str) -> None:
    unet = tiny_unet()
    attn = attentions(unet)[0]
    if when == "before":
        attn.extra_repr = lambda: "mine"  # type: ignore[method-assign]
    unet.enable_xattn()
    if when == "after":
        attn.extra_repr = lambda: "mine"  # type: ignore[method-assign]
    assert "mine" in repr(attn)
    unet.disable_xattn()
    assert attn.extra_repr() == "mine"
