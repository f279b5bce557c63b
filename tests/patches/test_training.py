"""Training through a patched UNet gives the gradients of the stock one, and the same bits twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig
from torch import Tensor, nn

import sdx_patches
from sdx_patches.attention import SdxAttnProcessor

Gradients = dict[str, Tensor]
LAYERS = ["to_q", "to_k", "to_v", "to_out.0"]


def add_lora(unet: UNet2DConditionModel) -> None:
    """An adapter on every attention projection whose two factors both get gradients."""
    unet.requires_grad_(False)
    torch.manual_seed(1)
    unet.add_adapter(LoraConfig(r=2, target_modules=LAYERS, init_lora_weights=False))


def enable(unet: UNet2DConditionModel) -> None:
    sdx_patches.patch(unet, owner="training")


def checkpoint(unet: UNet2DConditionModel) -> None:
    unet.enable_gradient_checkpointing()


def gradients(unet: UNet2DConditionModel, autocast: torch.dtype | None = None) -> Gradients:
    """Gradients of one step in training mode, by parameter name; equal inputs every time."""
    dtype = next(unet.parameters()).dtype
    generator = torch.Generator().manual_seed(3)
    sample, target = torch.randn(2, 2, 4, 8, 8, generator=generator).to(dtype)
    context = torch.randn(2, 7, unet.config.cross_attention_dim, generator=generator).to(dtype)
    unet.train()
    unet.zero_grad()
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        predicted = unet(sample, 10, context).sample
    nn.functional.mse_loss(predicted.to(dtype), target).backward()
    return {name: p.grad.clone() for name, p in unet.named_parameters() if p.grad is not None}


def error(got: Gradients, exact: Gradients) -> dict[str, float]:
    assert got.keys() == exact.keys()
    return {name: (got[name].double() - exact[name]).abs().max().item() for name in exact}


@pytest.fixture
def exact(tiny_unet: Callable[..., Any]) -> Gradients:
    """The stock model's gradients in fp64, from the fp32 weights and inputs."""
    unet = tiny_unet()
    add_lora(unet)
    found = gradients(unet.double())
    assert len(found) == 8 * len(LAYERS) * 2
    assert all(gradient.abs().max() > 0 for gradient in found.values())
    return found


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16 autocast"])
@pytest.mark.parametrize("op", [None, "sdpa-math"], ids=["auto", "sdpa-math"])
def test_lora_gradients_are_those_of_the_stock_model(
    tiny_unet: Callable[..., Any],
    exact: Gradients,
    op: str | None,
    autocast: torch.dtype | None,
    checkpointing: bool,
) -> None:
    stock, ours = tiny_unet(), tiny_unet()
    for unet in (stock, ours):
        add_lora(unet)
        if checkpointing:
            checkpoint(unet)
    sdx_patches.patch(ours, owner="training", attention_op=op)
    expected, got = gradients(stock, autocast), gradients(ours, autocast)
    assert all(layer.running != "not run yet" for layer in sdx_patches.layers(ours))
    eps = torch.finfo(autocast or torch.float32).eps
    stock_error, our_error = error(expected, exact), error(got, exact)
    for name, reference in exact.items():
        largest = reference.abs().max().item()
        assert our_error[name] <= max(3 * stock_error[name], 4 * eps * largest), name
    again = gradients(ours, autocast)
    assert all(torch.equal(again[name], got[name]) for name in got)


@pytest.mark.parametrize(
    "order",
    [
        (enable, add_lora, checkpoint),
        (add_lora, enable, checkpoint),
        (checkpoint, add_lora, enable),
    ],
    ids=lambda order: ", ".join(step.__name__ for step in order),
)
def test_the_order_of_the_calls_does_not_matter(
    tiny_unet: Callable[..., Any], exact: Gradients, order: tuple[Callable[[Any], None], ...]
) -> None:
    unet = tiny_unet()
    for step in order:
        step(unet)
    trained = {name for name, p in unet.named_parameters() if p.requires_grad}
    found = gradients(unet)
    assert found.keys() == trained == exact.keys()
    assert max(error(found, exact).values()) <= 1e-5
    sdx_patches.restore(unet, owner="training")
    assert {name for name, p in unet.named_parameters() if p.requires_grad} == trained


def test_all_weights_train_without_an_adapter(tiny_unet: Callable[..., Any]) -> None:
    stock, ours = tiny_unet(), tiny_unet()
    enable(ours)
    expected, got = gradients(stock), gradients(ours)
    assert got.keys() == expected.keys() == {name for name, _ in stock.named_parameters()}
    assert all(torch.allclose(got[n], expected[n], rtol=0, atol=1e-6) for n in expected)


def test_a_wrong_gradient_is_found(
    tiny_unet: Callable[..., Any], exact: Gradients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is cut off from the graph leaves the output and some gradients as they were."""
    project = SdxAttnProcessor.project

    def detached(self: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = project(self, *args)
        return query, key.detach(), value

    unet = tiny_unet()
    add_lora(unet)
    enable(unet)
    monkeypatch.setattr(SdxAttnProcessor, "project", detached)
    found = gradients(unet)
    assert not any(".to_k." in name for name in found)
    kept = {name: exact[name] for name in found}
    assert max(error(found, kept).values()) > 1e-5
