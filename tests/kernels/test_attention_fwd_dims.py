"""The forward kernel's head dims: any K and Kv, in one power of two or in two; and its ladders."""

import itertools
import math

import pytest
import torch

from sdx_kernels.bias import Band
from sdx_kernels.reference.attention import attention
from sdx_kernels.testing import (
    HEAD_DIMS,
    assert_close,
    at_end_of_nan,
    poisoned_empty,
    random_inputs,
)
from sdx_kernels.tuning.attention import (
    MAX_HEAD_DIM,
    SHARED_MEMORY,
    AttentionConfig,
    ladder_for,
    padded,
    shared_bytes,
    split,
)

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

CAPABILITIES = sorted(capability for capability in SHARED_MEMORY if capability >= (8, 0))

#: the dims at which the parts change, on both sides
BORDERS = (16, 17, 32, 33, 49, 64, 65, 81, 97, 128, 129, 145, 161, 192, 193)

KINDS = ("biased", "band", "packed", "key_mask", "dropout")


def check(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    bias: torch.Tensor | None = None,
    band: Band | None = None,
    ladder: tuple[AttentionConfig, ...] | None = None,
) -> None:
    from sdx_kernels._triton.attention_fwd import launch_attention_fwd

    q, k, v = inputs
    if ladder is None:
        ladder = ladder_for(
            (8, 6), q.shape[3], v.shape[3], q.dtype, k.shape[1], bias is not None, band is not None
        )
    with poisoned_empty():
        out, _ = launch_attention_fwd(
            q, k, v, bias, scale=0.2, band=band, output_dtype=q.dtype, with_lse=False, ladder=ladder
        )
    allowed = None if band is None else band.allowed(q.shape[1], k.shape[1], "cpu")[None, None]
    q, k, v = (t.double() for t in inputs)
    assert_close(out, attention(q, k, v, scale=0.2, bias=bias, allowed=allowed)[0])


def beside_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with NaN after each row's channels, and nothing after the last row."""
    width = tensor.shape[3]
    wide = tensor.new_full((*tensor.shape[:3], width + 9), math.nan)
    wide[..., 9:] = tensor
    return at_end_of_nan(wide)[..., 9:]


@pytest.mark.parametrize("dim", sorted({*HEAD_DIMS, *BORDERS}))
def test_any_head_dim_beside_nan(interpreter: None, dim: int) -> None:
    dtype = torch.float16 if dim % 2 else torch.float32
    q, k, v = random_inputs(1, 9, 45, 1, dim, dtype=dtype)
    check((beside_nan(q), beside_nan(k), beside_nan(v)))


@pytest.mark.parametrize(
    ("dim", "value_dim"), [(40, 80), (96, 24), (1, 160), (160, 33), (72, 256), (200, 40)]
)
def test_key_and_value_widths_differ(interpreter: None, dim: int, value_dim: int) -> None:
    q, k, v = random_inputs(1, 19, 45, 4, dim, value_dim)
    inputs = beside_nan(q)[:, :, :2], beside_nan(k)[:, :, ::2], beside_nan(v)[:, :, 1::2]
    check(inputs, bias=torch.randn(1, 2, 1, 45), band=Band(11, 3))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_head_dim(interpreter: None, dtype: torch.dtype) -> None:
    for dim in range(1, MAX_HEAD_DIM + 1):
        inputs = random_inputs(1, 17, 33, 1, dim, MAX_HEAD_DIM + 1 - dim, dtype=dtype)
        check(inputs)
        check(inputs, bias=torch.rand(17, 33) > 0.3, band=Band(20, 0))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_configuration_computes_the_same(interpreter: None, dtype: torch.dtype) -> None:
    for dim in (40, 64, 80, 120, 160, 200):
        configs: set[AttentionConfig] = set()
        for capability, biased in itertools.product(CAPABILITIES, (False, True)):
            configs.update(ladder_for(capability, dim, dim, dtype, 77, biased, True))
            configs.update(ladder_for(capability, dim, dim, dtype, 77, dropout=biased))
        inputs = random_inputs(1, 130, 77, 1, dim, dtype=dtype)
        for config in configs:
            check(inputs, ladder=(config,))
            check(inputs, bias=torch.randn(130, 77), band=Band(40, 9), ladder=(config,))


def test_the_parts_of_a_head_dim() -> None:
    named = {40: (32, 16), 64: (64, 0), 80: (64, 16), 96: (64, 32), 120: (128, 0), 160: (128, 32)}
    assert {dim: split(dim, 2) for dim in named} == named
    powers = [1 << n for n in range(4, 9)]
    for dim, itemsize in itertools.product(range(1, MAX_HEAD_DIM + 1), (2, 4)):
        first, second = split(dim, itemsize)
        assert first in powers
        assert second in (0, *powers)
        assert dim <= first + second <= padded(dim)
        # the narrowest sum of two powers of two from 32 + 16 to 128 + 32 that holds the dim
        pairs = [a + b for a in (32, 64, 128) for b in (16, 32) if a > b and a + b >= dim]
        if second:
            assert first + second == min(pairs) < padded(dim)
        else:
            widest = 160 if itemsize == 2 else 64
            assert all(width >= padded(dim) for width in pairs) or dim > widest


def test_every_kind_has_a_ladder_that_fits() -> None:
    dims = (1, 40, 64, 80, 96, 120, 128, 160, 192, 200, 256)
    chosen = itertools.product(*((False, True) for _ in KINDS))
    for kind in [dict(zip(KINDS, flags, strict=True)) for flags in chosen]:
        for capability, dim in itertools.product(CAPABILITIES, dims):
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                # 49,152 bytes are what any card grants
                for limit in (SHARED_MEMORY[capability], 49152):
                    ladder = ladder_for(
                        capability, dim, dim, dtype, 300, shared_memory_bytes=limit, **kind
                    )
                    assert ladder, (kind, capability, dim, dtype, limit)
                    assert all(config.source for config in ladder)
                    sizes = [
                        shared_bytes(c, dim, dim, dtype.itemsize, kind["biased"]) for c in ladder
                    ]
                    assert sizes == sorted(sizes, reverse=True)
                    assert sizes[0] <= limit


def test_beyond_the_widest_dim_there_is_no_ladder() -> None:
    assert ladder_for((9, 0), MAX_HEAD_DIM + 1, 64, torch.float16, 77) == ()
    assert ladder_for((9, 0), 64, MAX_HEAD_DIM + 1, torch.float16, 77) == ()
    assert ladder_for((9, 0), 0, 64, torch.float16, 77) == ()


def test_short_keys_have_a_step_of_their_own() -> None:
    for capability in CAPABILITIES:
        short, long = (
            ladder_for(capability, 64, 64, torch.float16, keys)[0] for keys in (77, 4096)
        )
        assert short.block_n == 32
        assert long.block_n == 64
