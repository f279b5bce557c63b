"""A VAE that does not fit as a whole works in bands of rows: planned, held, and taken back."""

import gc
from typing import Any

import pytest
import torch

import sdx_accel
from sdx_accel.budget.plan import Plan
from sdx_accel.runtime.checkpoints import load
from sdx_patches import vae_bands
from sdx_patches.vae import bands_of, chosen_bands, enable_bands


def plan(vram: float, pixels: int = 1024, **changes: Any) -> Plan:
    return sdx_accel.plan(
        "random:sdxl", vram=vram, height=pixels, width=pixels, device="cpu", **changes
    )


def test_the_decode_is_what_it_is_without_a_budget_while_it_fits() -> None:
    for vram in (24, 8, 4):
        made = plan(vram)
        assert made.feasible
        assert made.numerics["vae_mode"] == "bands of rows (fast)"
        assert made.job["bands"] == "fast"
    # what stays beside the decode: at 8 GiB all of the UNet
    decode = plan(8).phase("decode")
    assert decode is not None
    kept, every = decode.resident_units["unet"].split("/")
    assert kept == every


def test_without_fused_kernels_the_whole_decode_is_kept_while_it_fits() -> None:
    pipe = load("random:sdxl-tiny")
    pipe.enable_xattn(vram=20, device="cpu", fused=False)
    report = pipe.xattn_report()
    assert report.plan is not None
    assert report.plan.numerics["vae_mode"] == "whole picture"
    assert bands_of(pipe.vae) is None
    pipe.enable_xattn(vram=20, device="cpu")
    assert bands_of(pipe.vae) == "fast"
    pipe.disable_xattn()
    assert bands_of(pipe.vae) is None


@pytest.mark.slow  # 23 s: traces SDXL at 2048²
def test_a_picture_of_four_megapixels_fits_eight_gibibytes() -> None:
    made = plan(8, 2048)
    assert made.feasible
    assert made.numerics["vae_mode"] == "bands of rows (fast)"
    assert made.predicted_peak_gib <= 8
    assert "bands of rows (fast)" in made.explain()
    decode = made.phase("decode")
    assert decode is not None
    # a whole fp32 decode takes 20 GiB of activations there
    assert decode.activations_gib < 7
    assert plan(6, 2048).numerics["vae_mode"] == "bands of rows (low)"


@pytest.mark.parametrize("quality", ["exact", pytest.param("near", marks=pytest.mark.slow)])
def test_the_smallest_budget_is_that_of_bands(quality: str) -> None:
    smallest = plan(24, quality=quality).smallest_budget_gib
    at = plan(smallest, quality=quality)
    assert at.feasible
    assert at.smallest_budget_gib == smallest
    below = plan(smallest - 0.06, quality=quality)
    assert not below.feasible
    assert below.smallest_budget_gib == smallest


def test_more_budget_is_never_worse() -> None:
    fast, modes, moved = "bands of rows (fast)", [], []
    for quarter in range(10, 48, 2):
        made = plan(quarter / 4)
        if made.feasible:
            modes.append(made.numerics["vae_mode"])
            moved.append(made.moved_gib_per_picture)
    assert modes == sorted(modes, key=lambda mode: mode == fast)
    assert {"bands of rows (low)", fast} == set(modes)
    wide = [size for size, mode in zip(moved, modes, strict=True) if mode == fast]
    assert wide == sorted(wide, reverse=True)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    # the tiny model's picture would be a single band
    monkeypatch.setattr(vae_bands, "LOW_ELEMENTS", 1 << 18)
    monkeypatch.setattr(vae_bands, "FAST_ELEMENTS", 1 << 18)
    pipe = load("random:sdxl-tiny")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(pipe: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    call = {"num_inference_steps": 1, "height": 512, "width": 512, "output_type": "pt"}
    images: torch.Tensor = pipe("a cat", generator=generator, **call).images
    return images


def _tight(pipe: Any) -> float:
    """A budget that only bands keep at 512 px."""
    sizes = {"height": 512, "width": 512, "device": "cpu", "dtype": "fp32"}
    low = sdx_accel.plan(pipe, vram=20, **sizes).smallest_budget_gib
    made = sdx_accel.plan(pipe, vram=low, **sizes)
    assert made.job["bands"] == "low"
    return low


def test_a_held_pipeline_decodes_in_bands_and_gives_its_decoder_back(held: Any) -> None:
    expected = picture(held)
    held.enable_xattn(vram=_tight(held), device="cpu")
    ours = picture(held)
    assert bands_of(held.vae) == "low"
    assert (ours - expected).abs().max() < 1e-4
    held.enable_xattn(vram=20, device="cpu")
    assert bands_of(held.vae) == "fast"
    held.enable_xattn(vram=_tight(held), device="cpu")
    picture(held)
    held.disable_xattn()
    assert bands_of(held.vae) is None
    assert "forward" not in vars(held.vae.encoder)
    assert torch.equal(picture(held), expected)


def test_a_pipeline_dropped_while_held_leaves_no_bands_of_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vae_bands, "LOW_ELEMENTS", 1 << 18)
    monkeypatch.setattr(vae_bands, "FAST_ELEMENTS", 1 << 18)
    pipe = load("random:sdxl-tiny")
    pipe.set_progress_bar_config(disable=True)
    pipe.enable_xattn(vram=_tight(pipe), device="cpu")
    picture(pipe)
    left = pipe.vae
    assert bands_of(left) == "low"
    del pipe
    gc.collect()
    # those of the patch, which nobody has taken off
    assert bands_of(left) == "fast"
    assert not chosen_bands(left)


def test_bands_that_a_user_switched_on_are_planned_and_stay(held: Any) -> None:
    enable_bands(held.vae)
    held.enable_xattn(vram=20, device="cpu")
    picture(held)
    report = held.xattn_report()
    assert report.plan is not None
    assert report.plan.numerics["vae_mode"] == "bands of rows (low)"
    held.disable_xattn()
    assert bands_of(held.vae) == "low"


def test_another_decoder_is_planned_as_a_whole(held: Any) -> None:
    own = held.vae.decoder.forward
    held.vae.decoder.forward = lambda sample: own(sample)
    made = sdx_accel.plan(held, vram=20, height=512, width=512, device="cpu")
    assert made.numerics["vae_mode"] == "whole picture"
    held.enable_xattn(vram=20, device="cpu")
    assert bands_of(held.vae) is None


def test_the_plan_says_which_numerics_are_not_those_without_a_budget() -> None:
    low, fast = plan(2.5), plan(8)
    line = (
        "other last digits than without a budget: vae_mode is bands of rows (low), not bands of "
        "rows (fast)"
    )
    assert [word for word in low.advice if "last digits" in word] == [line]
    assert line in low.explain()
    assert not any("last digits" in word for word in fast.advice)
    assert len(fast.numerics["attention_table"]) == 12
    assert fast.numerics["attention_table"] == low.numerics["attention_table"]
