"""What a decode in bands needs of SDXL's own autoencoder, from a trace on the meta device."""

import pytest
import torch

from sdx_accel.budget.profile import PhaseProfile
from sdx_accel.runtime import trace
from sdx_accel.runtime.checkpoints import describe
from sdx_accel.runtime.phase_calls import twin
from sdx_patches.vae import disable_bands, enable_bands

GIB = 2**30


def smallest_gib(pixels: int, dtype: str, low: bool | None, encode: bool = False) -> float:
    """What the allocator can be pressed to beside the weights; `low` None = whole picture."""
    vae = twin(describe("random:sdxl"), "vae", dtype).eval().requires_grad_(False)
    if low is not None:
        enable_bands(vae, low)
    shape = (1, 3, pixels, pixels) if encode else (1, 4, pixels // 8, pixels // 8)
    given = torch.empty(shape, dtype=vae.dtype, device="meta")

    def call() -> torch.Tensor:
        with torch.no_grad():
            if encode:
                return vae.encode(given).latent_dist.mean
            return vae.decode(given).sample

    fixed = [*vae.parameters(), *vae.buffers()]
    try:
        events, curve = trace.record(call, fixed=fixed, inputs=[given], repeat=1)
    finally:
        disable_bands(vae)  # the twin is shared
    return PhaseProfile("decode", events, curve, ()).smallest_bytes / GIB


@pytest.mark.parametrize(
    ("pixels", "dtype", "low", "limit"),
    [
        (1024, "float16", True, 1.0),
        (1024, "float16", False, 1.25),
        pytest.param(1024, "bfloat16", True, 1.0, marks=pytest.mark.slow),
        pytest.param(1024, "float32", True, 2.0, marks=pytest.mark.slow),
        pytest.param(2048, "float16", True, 3.0, marks=pytest.mark.slow),
        pytest.param(1024, "float32", False, 2.5, marks=pytest.mark.slow),
        pytest.param(2048, "float32", True, 6.0, marks=pytest.mark.slow),
        pytest.param(4096, "float16", True, 24.0, marks=pytest.mark.slow),
        pytest.param(4096, "float32", True, 24.0, marks=pytest.mark.slow),
    ],
)
def test_a_decode_in_bands_keeps_its_limit(
    pixels: int, dtype: str, low: bool, limit: float
) -> None:
    assert smallest_gib(pixels, dtype, low) <= limit


def test_the_whole_decode_does_not() -> None:
    assert smallest_gib(1024, "float16", None) > 2.3


def test_an_encode_in_bands_keeps_its_limit() -> None:
    assert (
        smallest_gib(1024, "float16", True, encode=True)
        <= 1.0
        < smallest_gib(1024, "float16", None, encode=True)
    )
