"""Cases 115, 117, 119, 120: seams of tiles, odd autoencoders, colours, what tiles take."""

import dataclasses
import itertools

import pytest
import torch
from diffusers import AutoencoderKL

import sdx_accel
from sdx_accel.budget.machine import Machine
from sdx_accel.budget.profile import PhaseProfile
from sdx_accel.budget.units import parse_vram
from sdx_accel.runtime import trace
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import describe, load
from sdx_accel.runtime.phase_calls import Job, set_bands, set_tiling, twin
from sdx_accel.runtime.planning import plan_job
from sdx_accel.runtime.profiler import TILES
from sdx_patches.vae_tiles import equal_spans

TINY = "random:sdxl-tiny"


def _noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def pipe():
    loaded = load(TINY, dtype="fp32")
    loaded.set_progress_bar_config(disable=True)
    yield loaded
    loaded.disable_xattn()


def _run(pipe, **arguments):
    arguments = {"height": 64, "width": 64, "output_type": "pt", **arguments}
    generator = torch.Generator().manual_seed(0)
    return pipe("a red apple", num_inference_steps=1, generator=generator, **arguments).images


# 115: seams and steps of colour between tiles


def test_case_115_tiles_that_the_user_chose_are_diffusers_own_to_the_bit(pipe):
    latents, picture = _noise(1, 4, 20, 28), _noise(1, 3, 96, 160)
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 64, 8
    decoded = pipe.vae.decode(latents).sample
    encoded = pipe.vae.encode(picture).latent_dist.mean
    for quality in ("exact", "near"):
        pipe.enable_xattn("torch", vram=8, device="cpu", quality=quality, fused=False, learn=False)
        assert torch.equal(pipe.vae.decode(latents).sample, decoded)
        assert torch.equal(pipe.vae.encode(picture).latent_dist.mean, encoded)
    pipe.vae.disable_tiling()
    assert not torch.equal(pipe.vae.decode(latents).sample, decoded)


@pytest.mark.parametrize("tile", TILES)
def test_case_115_tiles_always_overlap(tile):
    for length in range(8, 520, 3):
        spans = equal_spans(length, tile // 8)
        laps = [before[1] - after[0] for before, after in itertools.pairwise(spans)]
        # a quarter of a tile: 12 latents of the smallest, to the latent that they are rounded to
        assert all(4 * (lap + 1) >= spans[0][1] for lap in laps)
        assert all(lap >= 5 for lap in laps)


def test_case_115_the_planner_takes_the_largest_tile_that_fits():
    description = architecture(TINY)
    dtypes = dict.fromkeys(description.components, "float32")
    job = Job(1088, 1088)

    def plan(gib, tile=None):
        return plan_job(
            description, dataclasses.replace(job, tile=tile), dtypes, Machine.generic(),
            parse_vram(gib), "near",
        )  # fmt: skip

    sizes = [tile for tile in TILES if tile < job.height]
    floors = {tile: plan(1, tile).smallest_budget_gib for tile in sizes}
    # smaller tiles take less, down to what a step needs
    assert [*floors.values()] == sorted(floors.values(), reverse=True)
    assert len({*floors.values()}) >= 2
    chosen = set()
    for gib in sorted({*floors.values()}):
        taken = plan(gib)
        tile = taken.job["tile"]
        chosen.add(tile)
        # bands of rows, which have no seams, are taken where they do as well
        for larger in (size for size in sizes if tile is not None and size > tile):
            other = plan(gib, larger)
            assert not other.feasible or other.moved_gib_per_picture > taken.moved_gib_per_picture
    assert chosen & {*sizes}


# 117: autoencoders without convolutions around the latents


def _built(convolutions):
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(16, 32, 32, 32), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=4, layers_per_block=1,
        norm_num_groups=8, use_quant_conv=convolutions, use_post_quant_conv=convolutions,
    )  # fmt: skip
    return vae.eval().requires_grad_(False)


@pytest.fixture
def bare():
    vae = _built(False)
    assert vae.quant_conv is None
    assert vae.post_quant_conv is None
    return vae


@pytest.fixture
def twin_with_convolutions(bare):
    """The same with convolutions that change nothing."""
    vae = _built(True)
    vae.load_state_dict(bare.state_dict(), strict=False)
    for conv in (vae.quant_conv, vae.post_quant_conv):
        torch.nn.init.zeros_(conv.bias)
        torch.nn.init.dirac_(conv.weight)
    return vae


def _stock(vae):
    pass


def _patched(vae):
    vae.enable_xattn()


def _stock_tiles(vae):
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size = 96, 12
    vae.enable_xattn()


def _equal_tiles(vae):
    set_tiling(vae, 96)


def _bands(vae):
    set_bands(vae, "fast")


def _low_bands(vae):
    set_bands(vae, "low")


@pytest.mark.parametrize(
    "begin", [_stock, _patched, _stock_tiles, _equal_tiles, _bands, _low_bands]
)
def test_case_117_an_autoencoder_without_quant_convolutions(bare, twin_with_convolutions, begin):
    latents, picture = _noise(2, 4, 16, 24), _noise(2, 3, 128, 192)
    decoded, encoded = [], []
    for vae in (bare, twin_with_convolutions):
        begin(vae)
        decoded.append(vae.decode(latents).sample)
        encoded.append(vae.encode(picture).latent_dist.mean)
    torch.testing.assert_close(*decoded, atol=1e-4, rtol=0)
    torch.testing.assert_close(*encoded, atol=1e-4, rtol=0)
    assert decoded[0].shape == picture.shape


def test_case_117_it_is_planned_and_held(pipe, bare):
    whole = type(pipe)(**{**pipe.components, "vae": bare})
    whole.set_progress_bar_config(disable=True)
    expected = _run(whole)
    for quality in ("exact", "near"):
        whole.enable_xattn(vram=8, device="cpu", quality=quality, learn=False)
        torch.testing.assert_close(_run(whole), expected, atol=1e-4, rtol=0)
    tight = sdx_accel.plan(
        whole, vram=0.86, quality="near", height=448, width=448, device="cpu", dtype="fp32"
    )
    assert tight.smallest_budget_gib > 0
    whole.disable_xattn()


# 119: colours


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_case_119_latents_are_scaled_exactly_once(pipe, held, shifted):
    factor, means, stds = 0.37, [0.5, -1.0, 0.25, 2.0], [2.0, 0.5, 1.5, 1.0]
    pipe.vae.register_to_config(scaling_factor=factor)
    if shifted:
        pipe.vae.register_to_config(latents_mean=means, latents_std=stds)
    if held:
        pipe.enable_xattn(vram=8, device="cpu", learn=False)
    given = []
    with pytest.MonkeyPatch.context() as patch:
        decoder = pipe.vae.decoder
        inner = type(pipe.vae.post_quant_conv).forward

        def forward(self, sample):
            if self is pipe.vae.post_quant_conv:
                given.append(sample.clone())
            return inner(self, sample)

        patch.setattr(type(pipe.vae.post_quant_conv), "forward", forward)
        _run(pipe)
    assert decoder is pipe.vae.decoder
    latents = _run(pipe, output_type="latent")
    wanted = latents / factor
    if shifted:
        mean, std = (torch.tensor(values).view(1, 4, 1, 1) for values in (means, stds))
        wanted = latents * std / factor + mean
    assert len(given) == 1
    torch.testing.assert_close(given[0], wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def trained():
    """The demo's autoencoder, and latents of a picture that it makes."""
    vae = load("demo", dtype="fp32").vae.eval().requires_grad_(False)
    rows = torch.linspace(-1, 1, 64)
    picture = torch.stack([rows.expand(64, 64), rows[:, None].expand(64, 64), -rows.expand(64, 64)])
    return vae, vae.encode(picture[None]).latent_dist.mean


@pytest.mark.parametrize("bands", [None, "fast", "low"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_119_sixteen_bits_keep_the_mean_colour(trained, dtype, bands):
    vae, latents = trained
    expected = vae.decode(latents).sample
    weights = {name: value.clone() for name, value in vae.state_dict().items()}
    try:
        set_bands(vae.to(dtype), bands)
        mine = vae.decode(latents.to(dtype)).sample.float()
    finally:
        set_bands(vae.float(), None)
        vae.load_state_dict(weights)
    tones = (mine - expected).mean(dim=(0, 2, 3)).abs() / 2
    # the limit of the case, of a range of 1
    assert tones.max() < 1 / 255
    assert expected.std() > 0.2


@pytest.mark.parametrize("held", [False, True])
def test_case_119_slices_of_a_batch_are_the_batch(pipe, held):
    latents, picture = _noise(3, 4, 8, 8), _noise(3, 3, 64, 64)
    if held:
        pipe.enable_xattn(vram=8, device="cpu", learn=False)
    decoded, encoded = pipe.vae.decode(latents).sample, pipe.vae.encode(picture).latent_dist.mean
    pipe.vae.enable_slicing()
    calls = []
    handle = pipe.vae.decoder.mid_block.attentions[0].register_forward_pre_hook(
        lambda _, args: calls.append(args[0].shape[0])
    )
    torch.testing.assert_close(pipe.vae.decode(latents).sample, decoded, atol=1e-5, rtol=0)
    handle.remove()
    assert calls == [1, 1, 1]
    mine = pipe.vae.encode(picture).latent_dist.mean
    torch.testing.assert_close(mine, encoded, atol=1e-5, rtol=0)
    pipe.vae.disable_slicing()


# 120: tiles that take more memory than the whole


def _needs(vae, tile, bands, encode):
    """Bytes that the allocator can be pressed to beside the weights, of a picture of 1024²."""
    shape = (1, 3, 1024, 1024) if encode else (1, 4, 128, 128)
    given = torch.empty(shape, dtype=vae.dtype, device="meta")

    def call():
        if encode:
            return vae.encode(given).latent_dist.mean
        return vae.decode(given).sample

    set_tiling(vae, tile)
    set_bands(vae, bands)
    try:
        fixed = [*vae.parameters(), *vae.buffers()]
        events, curve = trace.record(call, fixed=fixed, inputs=[given], repeat=1)
    finally:
        set_tiling(vae, None)
        set_bands(vae, None)  # the twin is shared
    return PhaseProfile("decode", events, curve, ()).smallest_bytes


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
def test_case_120_tiles_take_less_than_the_whole(encode):
    vae = twin(describe("random:sdxl"), "vae", "float16").eval().requires_grad_(False)
    whole, *tiled = (_needs(vae, tile, None, encode) for tile in (None, 768, 512))
    # three quarters and half a side, and the picture that both hold
    assert tiled[0] < 0.6 * whole
    assert tiled[1] < 0.4 * whole
    assert tiled == sorted(tiled, reverse=True)


@pytest.mark.parametrize("quality", ["exact", "near"])
def test_case_120_nothing_is_kept_for_a_gradient(pipe, quality):
    pipe.vae.requires_grad_(True)
    pipe.enable_xattn(vram=8, device="cpu", quality=quality, learn=False)
    set_tiling(pipe.vae, 32)
    seen = []
    handle = pipe.vae.decoder.mid_block.attentions[0].register_forward_hook(
        lambda module, args, out: seen.append((out.requires_grad, out.grad_fn))
    )
    with torch.enable_grad():
        picture = _run(pipe, height=128, width=128)
    handle.remove()
    set_tiling(pipe.vae, None)
    assert not picture.requires_grad
    assert set(seen) == {(False, None)}
    pipe.disable_xattn()
    # who asks for gradients gets them, also through tiles
    set_tiling(pipe.vae, 32)
    with torch.enable_grad():
        latents = _noise(1, 4, 8, 8).requires_grad_()
        pipe.vae.decode(latents).sample.sum().backward()
    set_tiling(pipe.vae, None)
    assert latents.grad is not None
