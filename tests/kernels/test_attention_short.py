"""Attention over few keys: a program that holds all of them, against fp64."""

import math
import random

import pytest
import torch

from sdx_kernels import KeyPaddingMask, count, memory_efficient_attention, target
from sdx_kernels.reference.attention import attention
from sdx_kernels.testing import (
    assert_close,
    at_end_of_nan,
    math_peer,
    poisoned_empty,
    random_inputs,
    reference64,
)
from sdx_kernels.tuning.attention import SHARED_MEMORY
from sdx_kernels.tuning.attention_short import (
    MAX_SHORT_KEYS,
    ShortConfig,
    candidates,
    ladder_for_short,
    parts_for,
    segments,
    short_shared_bytes,
)

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
pytestmark = pytest.mark.usefixtures("interpreter")


def config(keys: int, rows: int = 16, programs: int = 1) -> ShortConfig:
    first, rest = segments(keys)
    return ShortConfig(rows, first, 4, 1, "test", rest=rest, programs=programs)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    rows: int = 16,
    programs: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    from sdx_kernels._triton.attention_short import launch_attention_short

    with poisoned_empty():
        out, lse = launch_attention_short(
            q,
            k,
            v,
            bias,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            key_mask=key_mask,
            output_dtype=q.dtype,
            with_lse=True,
            ladder=(config(k.shape[1], rows, programs),),
        )
    assert lse is not None
    return out, lse


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    **kwargs: int,
) -> None:
    out, lse = run(q, k, v, bias, **kwargs)
    assert_close(out, reference64(q, k, v, bias), peer=math_peer(q, k, v, bias))
    _, truth = attention(q.double(), k.double(), v.double(), scale=q.shape[-1] ** -0.5, bias=bias)
    assert torch.equal(lse == -math.inf, truth == -math.inf)
    # four ulp of fp32 where scores are large
    bound = 2e-5 + 2**-22 * truth.nan_to_num(neginf=0.0).abs()
    assert ((lse - truth).nan_to_num().abs() < bound).all()


@pytest.mark.parametrize("mask", ["none", "keys", "bias"])
def test_the_operator_reaches_it_by_name(mask: str) -> None:
    q, k, v = random_inputs(2, 19, 77, 2, 40, dtype=torch.float16)
    exists = torch.arange(77).expand(2, -1) < 60
    masks = {"none": None, "keys": KeyPaddingMask(exists), "bias": torch.randn(2, 2, 19, 77)}
    before = count("triton-short")
    out = memory_efficient_attention(q, k, v, masks[mask], op="triton-short")
    assert count("triton-short") == before + 1
    assert_close(out, reference64(q, k, v, masks[mask]), peer=math_peer(q, k, v, masks[mask]))
    memory_efficient_attention(q, k, v, masks[mask], op="triton-short")
    assert count("triton-short") == before + 2


# some of the lengths the slow test covers, drawn once: the ends and what text encoders give always
SLICE = sorted({1, 16, 17, 77, 154, 257} | set(random.Random(20).sample(range(1, 258), 9)))


@pytest.mark.parametrize("keys", SLICE)
def test_a_slice_of_key_counts(keys: int) -> None:
    q, k, v = random_inputs(1, 19, keys, 1, 24, dtype=torch.float16, seed=keys)
    check(*(at_end_of_nan(t) for t in (q, k, v)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_key_count(dtype: torch.dtype) -> None:
    for keys in range(1, 258):
        q, k, v = random_inputs(2, 37, keys, 2, 64, dtype=dtype, seed=keys)
        check(*(at_end_of_nan(t) for t in (q, k, v)), programs=keys % 2)


@pytest.mark.parametrize("programs", [0, 1, 3], ids=["a-tile", "looping", "three"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_query_tiles_of_a_program(dtype: torch.dtype, programs: int) -> None:
    q, k, v = random_inputs(2, 85, 77, 2, 40, dtype=dtype)
    check(q, k, v, programs=programs)


@pytest.mark.parametrize("dims", [(1, 3), (80, 80), (128, 64)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    q, k, v = random_inputs(1, 17, 77, 2, dims[0], dims[1])
    check(q, k, v)


def test_fused_views_and_grouped_heads_beside_nan() -> None:
    buffer = torch.full((1, 90, 3, 4, 48), math.nan, dtype=torch.float16)
    inputs = random_inputs(1, 77, 77, 4, 40, dtype=torch.float16)
    for index, tensor in enumerate(inputs):
        buffer[:, :77, index, :, :40] = tensor
    q, k, v = (buffer[:, :77, index, :, :40] for index in range(3))
    out, _ = run(q, k, v)
    assert torch.equal(out, run(*inputs)[0])
    grouped, _ = run(q, k[:, :, :2], v[:, :, :2])
    assert_close(grouped, reference64(inputs[0], inputs[1][:, :, :2], inputs[2][:, :, :2]))


def test_strides_that_are_no_multiple_of_16_bytes() -> None:
    wide = torch.full((1, 33, 2, 27), math.nan, dtype=torch.float16)
    q, k, v = random_inputs(1, 33, 33, 2, 24, dtype=torch.float16)
    odd = []
    for tensor in (q, k, v):
        odd.append(wide.clone()[..., :24])
        odd[-1].copy_(tensor)
    assert torch.equal(run(*odd)[0], run(q, k, v)[0])


@pytest.mark.parametrize("keys", [30, 77])
def test_biases_by_their_strides(keys: int) -> None:
    q, k, v = random_inputs(2, 19, keys, 2, 24)
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(2, 2, 19, keys, generator=generator)
    mask = torch.rand(2, 1, 19, keys, generator=generator) > 0.5
    mask[:, :, 5] = False
    low = torch.zeros(19, keys)
    low[3] = torch.finfo(torch.float32).min
    for bias in (
        dense,
        dense[:1, :, :1],
        dense.transpose(2, 3).contiguous().transpose(2, 3),
        mask,
        mask[:1, :, :, :1],
        low,
    ):
        check(q, k, v, bias)
    assert torch.equal(run(q, k, v, mask)[0][:, 5], torch.zeros(2, 2, 24))
    mean = v.mean(1)
    assert (run(q, k, v, low)[0][:, 3] - mean).abs().max() < 1e-6


@pytest.mark.parametrize("biased", [False, True])
def test_masked_keys_are_never_read(biased: bool) -> None:
    q, k, v = random_inputs(3, 20, 77, 2, 24, dtype=torch.float16)
    exists = torch.rand(3, 77, generator=torch.Generator().manual_seed(1)) > 0.4
    exists[1] = False
    bias = torch.randn(1, 2, 20, 77) if biased else None
    out, lse = run(q, k, v, bias, key_mask=exists)
    truth, truth_lse = attention(
        q.double(),
        k.double(),
        v.double(),
        scale=24**-0.5,
        bias=bias,
        allowed=exists[:, None, None],
    )
    assert_close(out, truth)
    assert torch.equal(out[1], torch.zeros(20, 2, 24, dtype=torch.float16))
    assert torch.equal(lse == -math.inf, truth_lse == -math.inf)
    assert (lse - truth_lse).nan_to_num().abs().max() < 2e-5
    for tensor in (k, v):
        tensor[~exists] = math.nan
    assert torch.equal(run(q, k, v, bias, key_mask=exists)[0], out)


def test_nan_of_a_bias_masked_key_stays() -> None:
    q, k, v = random_inputs(1, 20, 30, 1, 16)
    v[:, 7] = math.nan
    mask = torch.ones(1, 1, 20, 30, dtype=torch.bool)
    mask[..., 7] = False
    assert run(q, k, v, mask)[0].isnan().all()


def test_scores_that_overflow_a_maximum_less_exponential() -> None:
    q, k, v = random_inputs(1, 20, 77, 1, 64, dtype=torch.float16)
    check(q * 30, k * 4, v)
    out, _ = run(q, k, v, scale=-3.0)
    assert_close(out, reference64(q, k, v, scale=-3.0))


def test_two_runs_give_the_same_bits() -> None:
    inputs = random_inputs(1, 30, 77, 2, 40, dtype=torch.float16)
    first, again = run(*inputs), run(*inputs)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_segments_hold_every_length_tightly() -> None:
    assert [segments(keys) for keys in (1, 16, 17, 77, 154, 257)] == [
        (16, 0),
        (16, 0),
        (32, 0),
        (64, 16),
        (128, 32),
        (256, 16),
    ]
    for keys in range(1, MAX_SHORT_KEYS + 1):
        first, rest = segments(keys)
        assert keys <= first + rest < 1.5 * keys + 16
        # the first segment is not masked where there is a second
        assert rest == 0 or first < keys
        assert all(part & (part - 1) == 0 and part != 8 for part in (first, rest))


def test_every_tile_belongs_to_one_program() -> None:
    for queries in (1, 64, 1000, 4096):
        for multiprocessors in (1, 20, 132):
            shape = config(77, rows=64, programs=4)
            tiles = -(-queries // 64)
            parts = parts_for(shape, 2, 10, queries, multiprocessors)
            assert 1 <= parts <= tiles
            shares = [len(range(part, tiles, parts)) for part in range(parts)]
            assert sum(shares) == tiles
            assert min(shares) >= 1
    # SDXL's 4096 queries on an H200: 22 programs of 3 tiles a head, 440 for 132 multiprocessors
    assert parts_for(config(77, rows=64, programs=4), 2, 10, 4096, 132) == 22
    assert parts_for(config(77, rows=64, programs=0), 2, 10, 4096, 132) == 64


@pytest.mark.parametrize("capability", sorted(set(SHARED_MEMORY) - {(7, 5)}))
def test_the_ladder_fits_every_card(capability: tuple[int, int]) -> None:
    for head_dim in (40, 64, 80, 128):
        for keys in (1, 77, 96, 154, 257, MAX_SHORT_KEYS):
            ladder = ladder_for_short(capability, head_dim, head_dim, torch.float16, keys)
            named = candidates(capability, head_dim, head_dim, torch.float16, keys)
            for step in (*ladder, *named.values()):
                assert step.block_n + step.rest >= keys
                assert step.source
                assert short_shared_bytes(step, head_dim, head_dim, 2) <= SHARED_MEMORY[capability]
            assert ladder or (head_dim > 64 and keys > 96), (head_dim, keys)
    assert ladder_for_short(capability, 64, 64, torch.float16, MAX_SHORT_KEYS + 1) == ()
    assert ladder_for_short(capability, 160, 160, torch.float16, 77) == ()
    assert ladder_for_short(capability, 64, 64, torch.float32, 77) == ()


def test_the_grid_follows_the_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_inputs(1, 85, 20, 1, 16)
    one, _ = run(q, k, v)
    many = target.Target("cpu", multiprocessors=3)
    monkeypatch.setattr(target, "of", lambda device: many)
    three, _ = run(q, k, v)
    assert torch.equal(one, three)
