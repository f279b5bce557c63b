"""Objects that are no pipeline, and switches and devices that are none."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, ModelMixin, UNet2DConditionModel

import sdx_accel
from sdx_accel.errors import RefusedError
from sdx_accel.runtime.checkpoints import load


@pytest.fixture(scope="module")
def pipe() -> Any:
    return load("random:sdxl-tiny", dtype="fp32")


@pytest.mark.parametrize("thing", [object(), None, 5, {}], ids=lambda thing: type(thing).__name__)
@pytest.mark.parametrize(
    "call",
    [
        DiffusionPipeline.enable_xattn,
        DiffusionPipeline.disable_xattn,
        DiffusionPipeline.xattn_report,
        ModelMixin.enable_xattn,
        ModelMixin.disable_xattn,
        ModelMixin.xattn_report,
        sdx_accel.plan,
    ],
    ids=lambda call: f"{call.__module__}.{call.__qualname__}",
)
def test_what_is_no_pipeline_is_named(call: Callable[[Any], Any], thing: Any) -> None:
    with pytest.raises(TypeError, match="expected a diffusers pipeline or") as raised:
        call(thing)
    assert f"got {type(thing).__name__}; pass the pipeline itself" in str(raised.value)


def test_a_single_model_cannot_be_planned(pipe: Any) -> None:
    with pytest.raises(TypeError, match="got UNet2DConditionModel; pass the pipeline itself"):
        sdx_accel.plan(pipe.unet, vram=8)
    assert sdx_accel.plan(pipe, vram=8).feasible


def touched(pipe: Any) -> bool:
    return any(layer.patched for layer in pipe.xattn_report().layers)


@pytest.mark.parametrize("vram", [None, 8])
@pytest.mark.parametrize("name", ["fused", "learn"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_a_switch_is_true_or_false(pipe: Any, vram: Any, name: str, value: Any) -> None:
    with pytest.raises(RefusedError, match=f"{name} is True or False, got {value!r}"):
        pipe.enable_xattn(vram=vram, **{name: value})
    with pytest.raises(RefusedError, match=f"{name} is True or False"):
        pipe.unet.enable_xattn(**{name: value})
    assert not touched(pipe)


@pytest.mark.parametrize("vram", [None, 8])
@pytest.mark.parametrize("device", ["bogus", "cuda:x", 1.5, object()])
def test_a_device_that_is_none(pipe: Any, vram: Any, device: Any) -> None:
    with pytest.raises(RefusedError, match="is none that torch knows"):
        pipe.enable_xattn(vram=vram, device=device)
    assert not touched(pipe)


@pytest.mark.parametrize("vram", [None, 8])
def test_a_card_that_is_not_there(pipe: Any, vram: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RefusedError, match="sees no CUDA device"):
        pipe.enable_xattn(vram=vram, device="cuda")
    assert not touched(pipe)


def test_a_device_without_a_budget_changes_nothing_and_that_is_said(
    pipe: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("sdx_accel"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="sdx_accel"):
        pipe.enable_xattn(device="cpu")
        assert "without vram there is none: it changes nothing" in caplog.text
        assert touched(pipe)
        pipe.disable_xattn()
        caplog.clear()
        pipe.enable_xattn()
        assert "without vram" not in caplog.text
    pipe.disable_xattn()
    assert isinstance(pipe.unet, UNet2DConditionModel)
