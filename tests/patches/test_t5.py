"""T5's family of encoders: a position bias, unscaled scores, padding; equal to stock."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MT5Config,
    MT5EncoderModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5EncoderModel,
)

import sdx_patches
from sdx_patches import text_encoders

FAMILY = {
    "T5": (T5Config, T5EncoderModel),
    "mT5": (MT5Config, MT5EncoderModel),
    "UMT5": (UMT5Config, UMT5EncoderModel),
}
IDS = torch.arange(3, 24).reshape(1, 21).repeat(3, 1)

MASKS: dict[str, Tensor | None] = {
    "none": None,
    "nothing padded": torch.ones_like(IDS),
    "padded": (torch.arange(21) < torch.tensor([[21], [9], [1]])).long(),
    "padded on the left": (torch.arange(21) >= torch.tensor([[0], [9], [20]])).long(),
    "one prompt of padding only": (torch.arange(21) < torch.tensor([[21], [9], [0]])).long(),
}


def config(kind: str = "T5", **changes: Any) -> Any:
    settings: dict[str, Any] = dict(
        vocab_size=100, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return FAMILY[kind][0](**settings | changes)


def encoder(kind: str = "T5", settings: Any = None) -> Any:
    torch.manual_seed(0)
    model: Any = FAMILY[kind][1](settings or config(kind)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_()  # so that a lost position bias shows
    return model


def run(model: Any, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(IDS, attention_mask=mask).last_hidden_state
    return out


@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("kind", list(FAMILY))
def test_hidden_states_equal_stock(calls: list[str], kind: str, mask: str) -> None:
    model = encoder(kind)
    expected = run(model, MASKS[mask])
    sdx_patches.patch(model, owner="test")
    assert torch.allclose(run(model, MASKS[mask]), expected, atol=1e-5)
    assert len(calls) == 2
    layers = sdx_patches.layers(model)
    assert [layer.running for layer in layers] == calls
    sdx_patches.restore(model, owner="test")
    assert torch.equal(run(model, MASKS[mask]), expected)


def test_padding_and_position_change_something() -> None:
    # guards the test above against a mask or a bias that is never added
    model = encoder()
    sdx_patches.patch(model, owner="test")
    padded = run(model, MASKS["padded"])
    assert torch.allclose(padded[0], run(model)[0], atol=1e-5)
    assert not torch.allclose(padded[1, :9], run(model)[1, :9], atol=1e-3)
    with torch.no_grad():
        cropped = model(IDS[1:2, :9]).last_hidden_state
    assert torch.allclose(padded[1, :9], cropped[0], atol=1e-5)
    biases = [p for name, p in model.named_parameters() if "relative_attention_bias" in name]
    before = run(model)
    with torch.no_grad():
        biases[0].zero_()
    assert not torch.allclose(run(model), before, atol=1e-3)


def test_without_padding_the_position_bias_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    attend = text_encoders.attend

    def noted(
        query: Tensor, key: Tensor, value: Tensor, bias: Any, *args: Any, **kwargs: Any
    ) -> Any:
        shapes.append(tuple(bias.shape))
        assert args[1] == 1.0, "T5 does not scale its scores"
        return attend(query, key, value, bias, *args, **kwargs)

    monkeypatch.setattr(text_encoders, "attend", noted)
    model = encoder()
    sdx_patches.patch(model, owner="test")
    run(model)
    assert shapes == [(1, 4, 21, 21)] * 2


@pytest.mark.parametrize("kind", list(FAMILY))
def test_an_op_that_adds_one_hundredth_changes_the_output(kind: str, shift_op: Any) -> None:
    model = encoder(kind)
    sdx_patches.patch(model, owner="test")
    expected = run(model)
    shift_op()
    assert (run(model) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("kind", list(FAMILY))
def test_a_shared_configuration_switches_only_the_patched_encoder(kind: str) -> None:
    shared = config(kind)
    model, stranger = encoder(kind, shared), encoder(kind, shared)
    configs = [(m, vars(m)["config"]) for m in model.modules() if "config" in vars(m)]
    sdx_patches.patch(model, owner="test")
    assert all(layer.patched for layer in sdx_patches.layers(model))
    assert not any(layer.patched for layer in sdx_patches.layers(stranger))
    assert shared._attn_implementation == "sdpa"
    sdx_patches.restore(model, owner="test")
    assert len(configs) > 3
    assert all(vars(module)["config"] is original for module, original in configs)


@pytest.mark.parametrize("kind", list(FAMILY))
def test_the_switch_is_not_saved(kind: str, tmp_path: Any) -> None:
    model = encoder(kind)
    sdx_patches.patch(model, owner="test")
    model.save_pretrained(tmp_path)
    assert text_encoders.NAME not in (tmp_path / "config.json").read_text()


def test_an_implementation_asked_for_by_name_is_left_alone() -> None:
    model = encoder()
    model.set_attn_implementation("eager")
    expected = run(model, MASKS["padded"])
    sdx_patches.patch(model, owner="test")
    assert torch.equal(run(model, MASKS["padded"]), expected)
    layers = sdx_patches.layers(model)
    assert {layer.running for layer in layers} == {"eager"}
    assert not any(layer.patched for layer in layers)


def test_a_decoder_stays_stock_beside_its_encoder() -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config()).eval()
    call = {"attention_mask": MASKS["padded"], "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(IDS, **call)
    sdx_patches.patch(model, owner="test")
    assert torch.equal(model.generate(IDS, **call), expected)
    layers = {layer.path: layer for layer in sdx_patches.layers(model)}
    assert all(
        layer.patched == path.startswith("encoder.") and (layer.patched or layer.reason)
        for path, layer in layers.items()
    )
    assert sum("decoder's" in layer.reason for layer in layers.values()) == 4


def test_gradients_equal_stock() -> None:
    gradients = []
    for enable in (False, True):
        model = encoder()
        if enable:
            sdx_patches.patch(model, owner="test")
        model(IDS, attention_mask=MASKS["padded"]).last_hidden_state.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))
