"""No seam of bands in the trained demo autoencoder, nor in a random one; tiles have some."""

import copy
from typing import Any

import pytest
import torch

from sdx_accel.bench import seams
from sdx_accel.runtime.checkpoints import describe, load
from sdx_accel.runtime.random_models import build_random_component
from sdx_patches import vae_bands
from sdx_patches.vae import disable_bands, enable_bands
from sdx_patches.vae_bands import bands
from sdx_patches.vae_tiles import disable_tiles, enable_tiles, equal_spans

SIZE = 128
#: bands of 16 rows in the last level, of 48 channels
ELEMENTS = 16 * 48 * SIZE


@pytest.fixture(scope="module")
def trained() -> Any:
    return load("demo", dtype="fp32").vae.eval().requires_grad_(False)


@pytest.fixture(scope="module", params=["demo", "random"])
def case(request: pytest.FixtureRequest, trained: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(autoencoder in fp32, latents, their decode in fp64)."""
    latents = trained.encode(seams.scene(SIZE)).latent_dist.mode()
    vae = trained
    if request.param == "random":
        vae = build_random_component(describe("demo").components["vae"], torch.float32)
        vae.requires_grad_(False)
        latents = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    truth = copy.deepcopy(vae).double().decode(latents.double()).sample
    return vae, latents, truth


def _cuts() -> list[tuple[int, int]]:
    return list(bands(SIZE, 48 * SIZE))


@pytest.mark.parametrize("low", [True, False])
def test_bands_in_fp32_are_the_whole_decode_without_a_border(
    case: Any, low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vae_bands, "LOW_ELEMENTS", ELEMENTS)
    monkeypatch.setattr(vae_bands, "FAST_ELEMENTS", ELEMENTS)
    vae, latents, truth = case
    whole = vae.decode(latents).sample
    enable_bands(vae, low)
    banded = vae.decode(latents).sample
    disable_bands(vae)
    assert len(_cuts()) == 8
    # of the range of pictures
    assert (banded - whole).abs().max() <= 1e-4 * 2
    figures = seams.compare(banded, truth, _cuts(), [(0, SIZE)])
    assert figures["border"] <= 1.5
    assert figures["psnr"] > 100
    assert figures["tone"] < 1e-2


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        # a CPU takes seventy times as long for it
        pytest.param(torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bands_in_sixteen_bits_are_as_exact_as_the_whole_without_a_border(
    case: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vae_bands, "LOW_ELEMENTS", ELEMENTS)
    monkeypatch.setattr(vae_bands, "FAST_ELEMENTS", ELEMENTS)
    vae, latents, truth = case
    vae = copy.deepcopy(vae).to(dtype)
    whole = (vae.decode(latents.to(dtype)).sample.double() - truth).abs().max()
    enable_bands(vae)
    banded = vae.decode(latents.to(dtype)).sample.double()
    assert (banded - truth).abs().max() <= 2 * whole
    assert seams.compare(banded, truth, _cuts(), [(0, SIZE)])["border"] <= 1.5


def test_the_figures_see_a_seam(case: Any) -> None:
    vae, latents, truth = case
    enable_tiles(vae, 64)
    tiled = vae.decode(latents).sample
    disable_tiles(vae)
    spans = [(8 * start, 8 * end) for start, end in equal_spans(SIZE // 8, 8)]
    figures = seams.compare(tiled, truth, spans, spans)
    assert figures["psnr"] < 45
    assert figures["tone"] > 0.5
    # bands whose tone steps by 2 of 255, each with a line of 8 at its border: 8/16 of a level more
    stepped = truth.clone()
    for index, (top, bottom) in enumerate(_edges()):
        stepped[:, :, top:bottom] += (index % 2) * 4 / 255
        stepped[:, :, top] += 16 / 255
    figures = seams.compare(stepped, truth, _edges(), [(0, SIZE)])
    assert figures["border"] > 1.5
    assert figures["tone"] == pytest.approx(2.5, abs=0.05)
    assert figures["psnr"] == pytest.approx(43, abs=6)


def _edges() -> list[tuple[int, int]]:
    return [(top, top + 16) for top in range(0, SIZE, 16)]


def test_the_table_has_a_row_for_every_mode() -> None:
    rows = seams.run(128, (64,))
    assert [(row["weights"], row["mode"]) for row in rows] == [
        (weights, mode)
        for weights in ("demo", "random")
        for mode in (
            "bands, fast",
            "bands, low",
            "equal tiles of at most 64",
            "diffusers' tiles of 64",
        )
    ]
    for row in rows:
        exact = row["mode"].startswith("bands")
        assert (row["psnr"] > 100) is exact
        assert (row["tone"] < 0.01) is exact
