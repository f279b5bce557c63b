"""Decode and encode in bands against the whole computation: the same picture, no seams."""

import copy
import itertools
import pickle

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny, VQModel

from sdx_patches import vae_bands
from sdx_patches.vae import disable_bands, enable_bands, unsupported
from sdx_patches.vae_bands import bands

from .vae_case import build


def band_size(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(vae_bands, "LOW_ELEMENTS", elements)
    monkeypatch.setattr(vae_bands, "FAST_ELEMENTS", elements)


@pytest.fixture(params=[1 << 9, 1 << 12, 1 << 30], ids=["smallest", "several", "one"])
def small_bands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    band_size(monkeypatch, request.param)
    return int(request.param)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, as a share of the expected values' range."""
    spread = expected.max() - expected.min()
    return float((actual.double() - expected.double()).abs().max() / spread)


def decode(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    return vae.decode(latents).sample


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("size", [(16, 24), (13, 9), (1, 1), (33, 2)], ids=str)
def test_decode_in_bands_is_the_whole_decode(
    small_bands: int, low: bool, size: tuple[int, int]
) -> None:
    vae = build()
    latents = torch.randn(2, 4, *size)
    expected = decode(vae, latents)
    enable_bands(vae, low)
    assert error(decode(vae, latents), expected) < 1e-5


@pytest.mark.parametrize("size", [(64, 48), (52, 36), (4, 4)], ids=str)
def test_encode_in_bands_is_the_whole_encode(small_bands: int, size: tuple[int, int]) -> None:
    vae = build()
    picture = torch.randn(2, 3, *size)
    expected = vae.encode(picture).latent_dist.mean
    enable_bands(vae)
    assert error(vae.encode(picture).latent_dist.mean, expected) < 1e-5


def test_the_norms_see_the_whole_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    # a picture whose halves differ much: statistics of a band alone would show at once
    band_size(monkeypatch, 1 << 9)
    vae = build()
    latents = torch.randn(1, 4, 24, 8)
    latents[:, :, :12] = latents[:, :, :12] * 0.01 + 4
    expected = decode(vae, latents)
    enable_bands(vae)
    assert error(decode(vae, latents), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_are_as_exact_as_the_whole_and_show_no_borders(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    band_size(monkeypatch, 1 << 12)
    vae = build()
    latents = torch.randn(1, 4, 40, 8)
    truth = decode(copy.deepcopy(vae).double(), latents.double())
    vae = vae.to(dtype)
    whole = decode(vae, latents.to(dtype)).double() - truth
    enable_bands(vae)
    banded = decode(vae, latents.to(dtype)).double() - truth
    assert banded.abs().max() <= 2 * whole.abs().max()
    # rows beside a border of the last level's bands, against all others
    height = truth.shape[2]
    cuts = [top for top, _ in bands(height, 16 * truth.shape[3])][1:]
    assert len(cuts) > 3
    border = torch.zeros(height, dtype=torch.bool)
    for cut in cuts:
        border[cut - 1 : cut + 1] = True
    rows = banded.abs().mean((0, 1, 3))
    assert rows[border].mean() <= 1.5 * rows[~border].mean()


def test_bands_cover_all_rows_once_and_begin_on_even_ones() -> None:
    for height in (1, 7, 8, 9, 64, 1023):
        for row in (1, 1 << 12, 1 << 20, 1 << 26):
            cuts = list(bands(height, row))
            assert cuts[0][0] == 0
            assert cuts[-1][1] == height
            assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
            assert all(top % 2 == 0 for top, _ in cuts)


def test_weights_and_latents_are_not_written() -> None:
    vae = build()
    before = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    latents, picture = torch.randn(1, 4, 8, 8), torch.randn(1, 3, 32, 32)
    kept = latents.clone(), picture.clone()
    enable_bands(vae)
    decode(vae, latents)
    vae.encode(picture)
    assert torch.equal(latents, kept[0])
    assert torch.equal(picture, kept[1])
    assert all(torch.equal(vae.state_dict()[name], tensor) for name, tensor in before.items())


def test_training_takes_the_stock_way() -> None:
    vae = build()
    latents = torch.randn(1, 4, 8, 8)
    stock = latents.clone().requires_grad_()
    decode(vae, stock).sum().backward()
    enable_bands(vae)
    ours = latents.clone().requires_grad_()
    decode(vae, ours).sum().backward()
    assert ours.grad is not None
    assert torch.equal(ours.grad, stock.grad)


def test_on_and_off_leave_nothing_behind() -> None:
    vae = build()
    latents = torch.randn(1, 4, 8, 8)
    expected = decode(vae, latents)
    before = {name: dict(vars(half)) for name, half in vae.named_children()}
    enable_bands(vae)
    enable_bands(vae, low=False)
    assert vae.decoder.forward.low is False
    disable_bands(vae)
    disable_bands(vae)
    assert {name: dict(vars(half)) for name, half in vae.named_children()} == before
    assert torch.equal(decode(vae, latents), expected)


def test_a_copy_runs_its_own_weights() -> None:
    vae = build()
    enable_bands(vae)
    latents = torch.randn(1, 4, 8, 8)
    expected = decode(vae, latents)
    for twin in (copy.deepcopy(vae), pickle.loads(pickle.dumps(vae))):
        assert twin.decoder.forward.module is twin.decoder
        assert torch.equal(decode(twin, latents), expected)
        twin.decoder.conv_out.bias.add_(1)
        assert not torch.equal(decode(twin, latents), expected)
    assert torch.equal(decode(vae, latents), expected)


def test_other_autoencoders_are_refused_with_the_reason() -> None:
    assert unsupported(build()) == ""
    tiny = AutoencoderTiny(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
                           num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1))  # fmt: skip
    with pytest.raises(ValueError, match="its decoder is DecoderTiny"):
        enable_bands(tiny)
    two_down, two_up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    spatial = VQModel(
        block_out_channels=(32, 32),
        norm_type="spatial",
        down_block_types=two_down,
        up_block_types=two_up,
    )
    assert "embeddings or other norms" in unsupported(spatial)
    attention = AutoencoderKL(
        block_out_channels=(32, 32),
        down_block_types=two_down,
        up_block_types=("UpDecoderBlock2D", "AttnUpDecoderBlock2D"),
    )
    assert "AttnUpDecoderBlock2D" in unsupported(attention)
    replaced = build()
    replaced.decoder.forward = lambda sample: sample
    with pytest.raises(ValueError, match="the forward of its decoder was replaced by function"):
        enable_bands(replaced)
    assert "forward" not in vars(replaced.encoder)
