"""Wide heads: every ladder fits its architecture, as pure arithmetic."""

import pytest
import torch

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
