"""The demo model on a card: our kernels draw what stock draws, and a budget draws it again."""

import gc

import numpy as np
import pytest
import torch

from sdx_accel import demo
from sdx_kernels import launches

pytestmark = pytest.mark.gpu

PROMPTS = ("a red apple", "dog face", "rocket", "snowman")


def _draw(pipe):
    generators = [torch.Generator().manual_seed(7) for _ in PROMPTS]
    arguments = {"num_inference_steps": 20, "height": 128, "width": 128, "output_type": "np"}
    return pipe(list(PROMPTS), generator=generators, **arguments).images


def _ours():
    return sum(calls for name, calls in launches.items() if name.startswith("triton"))


def _psnr(one, other):
    """Of pictures in 0…1, in dB."""
    return 10 * np.log10(1 / max(np.mean((one - other) ** 2), 1e-12))


@pytest.mark.parametrize(
    ("dtype", "least"),
    [(torch.float32, 40), pytest.param(torch.float16, 30, marks=pytest.mark.slow)],
    ids=str,
)
def test_ours_draws_what_stock_draws_and_a_budget_the_same(dtype, least):
    pipe = demo.load()
    pipe.set_progress_bar_config(disable=True)
    pipe.to("cuda", dtype)
    stock = _draw(pipe)
    before = _ours()
    pipe.enable_xattn()
    ours = _draw(pipe)
    assert _ours() > before
    for one, other in zip(ours, stock, strict=True):
        assert _psnr(one, other) >= least
    pipe.disable_xattn()
    pipe.to("cpu")
    gc.collect()
    pipe.enable_xattn(vram=2)
    held = _draw(pipe)
    report = pipe.xattn_report()
    pipe.disable_xattn()
    # pixels: the plan keeps the decode of a run without a budget
    assert np.array_equal(held, ours)
    for phase in report.phases:
        assert phase.measured_peak_gib <= phase.predicted_peak_gib
