"""Wide heads: every ladder fits its architecture, as pure arithmetic, and is gone down in need."""

from typing import Any

import pytest
import torch

from sdx_kernels.testing import assert_close, random_inputs, reference64
from sdx_kernels.tuning.attention import SHARED_MEMORY
from sdx_kernels.tuning.attention_wide import (
    WideKind,
    WideOnePassConfig,
    candidates,
    grad_candidates,
    shared_bytes,
    wide_grad_ladder_for,
    wide_ladder_for,
)

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_ladder_fits_its_architecture(architecture: int) -> None:
    capability = divmod(architecture, 10)
    for dtype in (HALF, torch.bfloat16, FULL):
        for bias in (None, dtype):
            kind = WideKind(512, 512, dtype, bias)
            ladders = wide_ladder_for(capability, kind), wide_grad_ladder_for(capability, kind)
            others = candidates(capability, kind), grad_candidates(capability, kind)
            assert all(len(ladder) > 1 for ladder in ladders)
            for config in (*ladders[0], *ladders[1], *others[0].values(), *others[1].values()):
                assert shared_bytes(config, kind) <= SHARED_MEMORY[capability]
                assert config.source
            for config in ladders[0]:
                if isinstance(config, WideOnePassConfig):
                    assert architecture // 10 == 9
                    continue
                assert config.scores.block_n % config.mix.chunk == 0
    for kind in (WideKind(513, 64, HALF), WideKind(64, 0, HALF)):
        assert not wide_ladder_for(capability, kind)
        assert not wide_grad_ladder_for(capability, kind)
    assert not wide_ladder_for((7, 5), WideKind(512, 512, HALF))


@pytest.mark.parametrize("limit", [49152, 65536, 101376, 166912, 232448])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, FULL], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_case_045_tiles_of_512_dims_fit_any_limit(
    limit: int, dtype: torch.dtype, biased: bool
) -> None:
    """Also a limit that no card of that architecture has: the driver's word counts."""
    kind = WideKind(512, 512, dtype, torch.bool if biased else None, bias_grad=biased)
    for architecture in ARCHITECTURES:
        capability = divmod(architecture, 10)
        for ladder_for in (wide_ladder_for, wide_grad_ladder_for):
            ladder: Any = ladder_for(capability, kind, limit)
            assert ladder
            assert all(shared_bytes(config, kind) <= limit for config in ladder)


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_case_045_a_refused_launch_of_512_dims_goes_on_with_smaller_tiles(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    from triton.runtime.errors import OutOfResources

    from sdx_kernels._triton import attention_launch, attention_wide_launch

    tried: list[Any] = []

    def two_passes(config: Any, kind: WideKind) -> Any:
        tried.append(config)
        if len(tried) <= refusals:
            raise OutOfResources(135168, 101376, "shared memory")
        return real(config, kind)

    real = attention_wide_launch._two_passes
    monkeypatch.setattr(attention_wide_launch, "_two_passes", two_passes)
    monkeypatch.setattr(attention_launch, "_steps", {})
    inputs = random_inputs(1, 5, 20, 1, 512, dtype=dtype)
    ladder = wide_ladder_for((8, 6), WideKind(512, 512, dtype))
    assert len(ladder) > 1

    def run() -> torch.Tensor:
        settings: Any = {"output_dtype": dtype, "with_lse": False, "scale": 512**-0.5}
        call = attention_wide_launch.launch_attention_wide_fwd
        out, _ = call(*inputs, None, **settings, ladder=ladder)
        return out

    refusals = 1
    assert_close(run(), reference64(*inputs))
    assert tried == list(ladder[:2])
    # the next call does not try again what was refused
    run()
    assert tried[2:] == [ladder[1]]
    attention_launch._steps.clear()
    refusals = 10**6
    with pytest.raises(attention_launch.LaunchRefused, match="shared memory"):
        run()
