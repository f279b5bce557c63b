"""Equal tiles: all of one size, blended without a trace, and off again as they were found."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny

from sdx_patches.vae_tiles import (
    disable_tiles,
    enable_tiles,
    equal_spans,
    tiles_of,
)

from .vae_case import build


@pytest.mark.parametrize("largest", [2, 3, 7, 48, 64, 96, 128, 200])
@pytest.mark.parametrize("length", [3, 8, 13, 65, 97, 128, 129, 200, 512])
def test_spans_are_equal_and_cover_everything(length: int, largest: int) -> None:
    spans = equal_spans(length, largest)
    assert len({end - start for start, end in spans}) == 1
    assert spans[0][0] == 0
    assert spans[-1][1] == length
    size = spans[0][1]
    assert size <= largest or len(spans) == 1
    assert size == length if length <= largest else size < length
    laps = [a[1] - b[0] for a, b in itertools.pairwise(spans)]
    # a quarter of a tile, as diffusers has it, to the latent that starts are rounded to
    assert all(lap >= 0 for lap in laps)
    assert all(lap + 1 >= size / 4 for lap in laps)
    # of three tiles no two may overlap but neighbours: weights of the two add up to one
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[2:], strict=False))
    assert max(laps, default=0) - min(laps, default=0) <= 1


def test_a_picture_of_1024_is_cut_in_four_of_592_not_in_one_and_slivers() -> None:
    assert equal_spans(128, 96) == ((0, 74), (54, 128))
    assert equal_spans(128, 64) == ((0, 52), (38, 90), (76, 128))


def sizes_of(vae: AutoencoderKL, half: str, call: Any) -> list[tuple[int, int]]:
    seen = []
    handle = getattr(vae, half).register_forward_pre_hook(
        lambda _, args: seen.append(tuple(args[0].shape[2:]))
    )
    call()
    handle.remove()
    return seen


def test_all_tiles_of_decode_and_encode_have_one_size() -> None:
    vae = build()
    enable_tiles(vae, 48)
    latents, picture = torch.randn(1, 4, 16, 13), torch.randn(1, 3, 64, 52)
    decoded = sizes_of(vae, "decoder", lambda: vae.decode(latents))
    encoded = sizes_of(vae, "encoder", lambda: vae.encode(picture))
    assert decoded == [(10, 8)] * 4
    assert encoded == [(40, 32)] * 4
    # the stock loop begins a tile at every stride
    vae = build()
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size = 48, 12
    assert (7, 4) in sizes_of(vae, "decoder", lambda: vae.decode(latents))


def test_a_side_that_fits_one_tile_is_not_cut() -> None:
    vae = build()
    enable_tiles(vae, 48)
    assert sizes_of(vae, "decoder", lambda: vae.decode(torch.randn(1, 4, 12, 20))) == [(12, 12)] * 2
    assert sizes_of(vae, "decoder", lambda: vae.decode(torch.randn(1, 4, 12, 12))) == [(12, 12)]


class _Enlarge(torch.nn.Module):
    """A decoder that knows no neighbours: its tiles have to give the whole picture back."""

    def forward(self, sample: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.nn.functional.interpolate(sample[:, :3], scale_factor=4.0)


def test_blending_adds_nothing() -> None:
    vae = build()
    vae.decoder, vae.post_quant_conv = _Enlarge(), torch.nn.Identity()
    latents = torch.randn(2, 4, 37, 22, dtype=torch.float64)
    whole = vae.decode(latents).sample
    enable_tiles(vae, 32)
    tiled = vae.decode(latents, return_dict=False)[0]
    assert tiled.shape == whole.shape
    torch.testing.assert_close(tiled, whole, rtol=0, atol=1e-7)


def test_encode_of_tiles_is_near_the_whole_and_has_its_shape() -> None:
    vae = build()
    picture = torch.randn(2, 3, 64, 80)
    whole = vae.encode(picture).latent_dist.mode()
    enable_tiles(vae, 48)
    tiled = vae.encode(picture).latent_dist.mode()
    assert tiled.shape == whole.shape
    assert (tiled - whole).abs().mean() < 0.2 * whole.abs().mean()
    assert not torch.equal(tiled, whole)


@pytest.mark.parametrize("user", [None, (True, 40, 10), (False, 24, 6)])
def test_off_leaves_what_was_there(user: tuple[bool, int, int] | None) -> None:
    vae = build()
    if user is not None:
        vae.use_tiling, vae.tile_sample_min_size, vae.tile_latent_min_size = user
    latents = torch.randn(1, 4, 16, 16)
    expected, before = vae.decode(latents).sample, dict(vars(vae))
    assert tiles_of(vae) is None
    enable_tiles(vae, 48)
    enable_tiles(vae, 32)
    assert tiles_of(vae) == 32
    assert not torch.equal(vae.decode(latents).sample, expected)
    disable_tiles(vae)
    disable_tiles(vae)
    assert tiles_of(vae) is None
    assert dict(vars(vae)) == before
    assert torch.equal(vae.decode(latents).sample, expected)


def test_switched_off_by_the_user_it_is_off() -> None:
    vae = build()
    latents = torch.randn(1, 4, 16, 16)
    expected = vae.decode(latents).sample
    enable_tiles(vae, 32)
    vae.disable_tiling()
    assert tiles_of(vae) is None
    assert torch.equal(vae.decode(latents).sample, expected)
    enable_tiles(vae, 32)
    # other sizes are for the stock loop
    vae.tile_sample_min_size, vae.tile_latent_min_size = 40, 10
    assert tiles_of(vae) is None
    stock = build()
    stock.enable_tiling()
    stock.tile_sample_min_size, stock.tile_latent_min_size = 40, 10
    assert torch.equal(vae.decode(latents).sample, stock.decode(latents).sample)
    disable_tiles(vae)
    # what the user chose since is the user's
    assert (vae.use_tiling, vae.tile_sample_min_size, vae.tile_latent_min_size) == (True, 40, 10)
    assert "tiled_decode" not in vars(vae)


def test_copies_run_their_own_weights_and_can_be_switched_off() -> None:
    vae = build()
    latents = torch.randn(1, 4, 16, 16)
    whole = vae.decode(latents).sample
    enable_tiles(vae, 32)
    expected = vae.decode(latents).sample
    for twin in (copy.deepcopy(vae), pickle.loads(pickle.dumps(vae))):
        assert torch.equal(twin.decode(latents).sample, expected)
        twin.decoder.conv_out.bias.add_(1)
        assert not torch.equal(twin.decode(latents).sample, expected)
        twin.decoder.conv_out.bias.sub_(1)
        disable_tiles(twin)
        torch.testing.assert_close(twin.decode(latents).sample, whole)
    assert torch.equal(vae.decode(latents).sample, expected)


def test_other_autoencoders_keep_their_own_loop() -> None:
    tiny = AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    before = dict(vars(tiny))
    enable_tiles(tiny, 32)
    assert tiny.use_tiling
    assert tiny.tile_sample_min_size == 32
    assert "tiled_decode" not in vars(tiny)
    assert tiles_of(tiny) == 32
    disable_tiles(tiny)
    assert dict(vars(tiny)) == before
