"""Quality `near`: tiles of one size, planned as they run, and taken back."""

import gc
from typing import Any

import pytest
import torch

import sdx_accel
from sdx_accel.budget.machine import Machine
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.profiler import Job, profile_job
from sdx_patches.vae_tiles import disable_tiles, enable_tiles, has_equal_tiles, tiles_of

TINY = "random:sdxl-tiny"
SIDE, TILE = 448, 384


def _smallest(**job: Any) -> int:
    description = architecture(TINY)
    dtypes = dict.fromkeys(description.components, "float32")
    profile = profile_job(description, Job(SIDE, SIDE, **job), dtypes)
    return next(phase.smallest_bytes for phase in profile.phases if phase.name == "decode")


def test_the_plan_names_the_tiles_and_counts_them_as_they_run() -> None:
    near = sdx_accel.plan(
        TINY, vram=0.86, quality="near", height=SIDE, width=TILE, machine=Machine.generic()
    )
    assert near.job["tile"] == TILE
    # two of 256 where the stock loop has 384 and 160; a side of 384 is not cut
    assert near.numerics["vae_mode"] == "equal tiles of 384 × 256 px"
    ours, stock = _smallest(tile=TILE), _smallest(tile=TILE, stock_tiles=True)
    # (256/384)² of a tile's activations, beside a picture that both hold
    assert ours < 0.65 * stock
    assert stock < _smallest()
    # the traced module is shared
    assert _smallest(tile=TILE) == ours


def _load() -> Any:
    pipe = load(TINY, dtype="fp32")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def pipe() -> Any:
    return _load()


def _run(pipe: Any, side: int = SIDE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.tensor(
        pipe(
            "a", height=side, width=side, num_inference_steps=1, generator=generator,
            output_type="np",
        ).images
    )  # fmt: skip


def _hold(pipe: Any) -> None:
    whole = sdx_accel.plan(pipe, vram=8, height=SIDE, width=SIDE, dtype="fp32", device="cpu")
    pipe.enable_xattn(vram=whole.smallest_budget_gib - 0.05, device="cpu", quality="near")


def test_held_tiles_are_equal_and_end_with_the_plan(pipe: Any) -> None:
    before = dict(vars(pipe.vae))
    enable_tiles(pipe.vae, TILE)
    expected = _run(pipe)
    disable_tiles(pipe.vae)
    _hold(pipe)
    sizes = []
    pipe.vae.decoder.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[2:]))
    picture = _run(pipe)
    assert pipe.xattn_report().plan.job["tile"] == TILE
    assert has_equal_tiles(pipe.vae)
    assert sizes == [(32, 32)] * 4
    torch.testing.assert_close(picture, expected, rtol=0, atol=1e-5)
    _run(pipe, 64)
    assert tiles_of(pipe.vae) is None
    assert not pipe.vae.use_tiling
    _run(pipe)
    assert tiles_of(pipe.vae) == TILE
    pipe.disable_xattn()
    pipe.vae.decoder._forward_pre_hooks.clear()
    assert dict(vars(pipe.vae)) == before


def test_a_pipeline_dropped_while_held_leaves_no_tiles() -> None:
    pipe = _load()
    vae, names = pipe.vae, ("use_tiling", "tile_sample_min_size", "tile_latent_min_size")
    before = [getattr(vae, name) for name in names]
    _hold(pipe)
    _run(pipe)
    assert tiles_of(vae) == TILE
    del pipe
    gc.collect()
    assert [getattr(vae, name) for name in names] == before
    assert not {"tiled_decode", "_tiled_encode", "_sdx_tiles"} & {*vars(vae)}


def test_tiles_of_the_user_keep_the_stock_loop_and_are_planned_so(pipe: Any) -> None:
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = TILE, TILE // 8
    stock = _run(pipe)
    pipe.enable_xattn(vram=8, device="cpu", quality="near")
    torch.testing.assert_close(_run(pipe), stock, rtol=0, atol=1e-5)
    plan = pipe.xattn_report().plan
    assert plan.job["stock_tiles"]
    assert plan.numerics["vae_mode"] == "tiles of 384 px"
    pipe.disable_xattn()
    assert pipe.vae.use_tiling
