"""The forward kernel's structures: bands, packed sequences, key masks, dropout; against fp64."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdx_kernels.bias import (
    AttentionBias,
    Band,
    BlockDiagonalMask,
    KeyPaddingMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
)
from sdx_kernels.checks import Dropout
from sdx_kernels.reference.attention import attention
from sdx_kernels.reference.dropout import keep_at, keep_mask
from sdx_kernels.testing import assert_close, at_end_of_nan, poisoned_empty, random_inputs
from sdx_kernels.tuning.attention import AttentionConfig, ladder_for

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")
tl = pytest.importorskip("triton.language")
parts = pytest.importorskip("sdx_kernels._triton.attention_parts")
pytestmark = pytest.mark.usefixtures("interpreter")

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor]

#: the interpreter computes with numpy, which warns of the NaN and infinities of these tests
numpy_warns = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

#: tiles smaller than any that is shipped: short inputs then have edges on all sides of whole tiles
SMALL = (AttentionConfig(32, 16, 4, 1, "test"),)


class Banded(AttentionBias):
    """Any band, those that no public class has too."""

    def __init__(self, left: int | None, right: int | None, from_end: bool = False) -> None:
        self._band = Band(left, right, from_end)

    @property
    def band(self) -> Band:
        return self._band

    def allowed(self, shape: Any, device: torch.device | str = "cpu") -> torch.Tensor:
        return self._band.allowed(shape[-2], shape[-1], device)


PACKED = BlockDiagonalMask.from_seqlens((5, 0, 33, 7), (19, 4, 40, 0))
SELF_PACKED = BlockDiagonalMask.from_seqlens((20, 0, 41), (33, 0, 41))

#: (structure, queries, keys)
STRUCTURES: dict[str, tuple[AttentionBias, int, int]] = {
    "triangle": (LowerTriangularMask(), 45, 70),
    "triangle-end": (LowerTriangularFromBottomRightMask(), 70, 45),
    "triangle-window": (LowerTriangularFromBottomRightLocalAttentionMask(19), 45, 77),
    "window": (LocalAttentionFromBottomRightMask(7, 21), 77, 77),
    "window-wide": (LocalAttentionFromBottomRightMask(50, 3), 70, 77),
    "lower": (Banded(9, None), 70, 50),
    "lower-end": (Banded(20, None, True), 33, 77),
    "both-top": (Banded(30, 11), 50, 99),
    "key-mask": (KeyPaddingMask(torch.rand(2, 77, generator=torch.manual_seed(0)) > 0.4), 35, 77),
    "packed": (PACKED, 45, 63),
    "packed-triangle": (PACKED.make_causal(), 45, 63),
    "packed-triangle-end": (SELF_PACKED.make_causal_from_bottomright(), 61, 74),
    "packed-window": (PACKED.make_local_attention(6), 45, 63),
    "packed-window-end": (SELF_PACKED.make_local_attention_from_bottomright(18), 61, 74),
}


def launch(
    inputs: Inputs,
    structure: AttentionBias | None = None,
    bias: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    ladder: tuple[AttentionConfig, ...] | None = None,
) -> Result:
    """Output and log-sum-exp of the kernel, in memory that held NaN."""
    from sdx_kernels._triton.attention_fwd import launch_attention_fwd

    q, k, v = inputs
    key_mask = structure.mask if isinstance(structure, KeyPaddingMask) else None
    band = None if structure is None else structure.band
    packed = None if structure is None else structure.packed("cpu")
    if ladder is None:
        ladder = ladder_for(
            (9, 0),
            q.shape[3],
            v.shape[3],
            q.dtype,
            k.shape[1],
            bias is not None,
            band is not None,
            packed=packed is not None,
            key_mask=key_mask is not None,
            dropout=dropout is not None,
        )
    with poisoned_empty():
        out, lse = launch_attention_fwd(
            q,
            k,
            v,
            bias,
            scale=q.shape[3] ** -0.5,
            key_mask=key_mask,
            band=band,
            packed=packed,
            dropout=dropout,
            output_dtype=q.dtype,
            with_lse=True,
            ladder=ladder,
        )
    assert lse is not None
    assert out.is_contiguous()
    return out, lse


def truth(
    inputs: Inputs,
    structure: AttentionBias | None = None,
    bias: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    p: float = 0.0,
) -> Result:
    q, k, v = (t.double() for t in inputs)
    allowed = None
    if structure is not None:
        allowed = structure.allowed((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
        allowed = allowed[(None,) * (4 - allowed.dim())]
    scale = q.shape[3] ** -0.5
    return attention(q, k, v, scale=scale, bias=bias, allowed=allowed, keep=keep, p=p)


def check(result: Result, expected: Result) -> None:
    (out, lse), (out64, lse64) = result, expected
    assert_close(out, out64)
    assert lse.shape == lse64.shape
    assert torch.equal(lse == -math.inf, lse64 == -math.inf)
    assert (lse - lse64).nan_to_num().abs().max() < (1e-5 if out.dtype == torch.float32 else 1e-3)
    nothing = (lse64 == -math.inf).transpose(1, 2)
    assert torch.equal(out[nothing], torch.zeros_like(out[nothing]))


def plain(batch: int, queries: int, keys: int, dtype: torch.dtype) -> Inputs:
    return random_inputs(batch, queries, keys, 1, 16, dtype=dtype)


def grouped(batch: int, queries: int, keys: int, dtype: torch.dtype) -> Inputs:
    q, k, v = random_inputs(batch, queries, keys, 4, 24, dtype=dtype)
    return q, k[:, :, 1:3], v[:, :, ::2]


def unequal(batch: int, queries: int, keys: int, dtype: torch.dtype) -> Inputs:
    q, k, v = random_inputs(batch, queries, keys, 1, 33, 7, dtype=dtype)
    return at_end_of_nan(q), at_end_of_nan(k), at_end_of_nan(v)


def fused(batch: int, queries: int, keys: int, dtype: torch.dtype) -> Inputs:
    """Views into one projection, as fused layers hand them on: 2 heads of 40, a key head of 24."""
    longest = max(queries, keys)
    joint = torch.randn(batch, longest, 3, 2, 40, generator=torch.manual_seed(1)).to(dtype)
    q, k, v = joint.unbind(2)
    return q[:, :queries], k[:, :keys, 1:], v[:, longest - keys :, :1, :24]


def batch_of(structure: AttentionBias) -> int:
    return 2 if isinstance(structure, KeyPaddingMask) else 1


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str) -> None:
    """All at once: odd lengths, a shared key head, strided views, K ≠ Kv."""
    structure, queries, keys = STRUCTURES[name]
    inputs = fused(batch_of(structure), queries, keys, torch.float32)
    check(launch(inputs, structure), truth(inputs, structure))


@pytest.mark.parametrize("name", ["triangle-window", "key-mask", "packed-window-end"])
def test_structures_in_fp16(name: str) -> None:
    structure, queries, keys = STRUCTURES[name]
    inputs = grouped(batch_of(structure), queries, keys, torch.float16)
    check(launch(inputs, structure), truth(inputs, structure))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("make", [plain, grouped, fused, unequal])
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure_one_by_one(
    name: str, make: Callable[..., Inputs], dtype: torch.dtype
) -> None:
    structure, queries, keys = STRUCTURES[name]
    inputs = make(batch_of(structure), queries, keys, dtype)
    for ladder in (None, SMALL):
        check(launch(inputs, structure, ladder=ladder), truth(inputs, structure))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1, 1), (50, 70), (70, 50), (33, 33), (1, 77)], ids=str)
@pytest.mark.parametrize("from_end", [False, True])
def test_every_band(from_end: bool, lengths: tuple[int, int]) -> None:
    inputs = plain(1, *lengths, torch.float32)
    for left, right in itertools.product((None, -3, 0, 5, 40, 10**12), repeat=2):
        structure = Banded(left, right, from_end)
        check(launch(inputs, structure, ladder=SMALL), truth(inputs, structure))


def test_a_bound_beyond_32_bits_is_none() -> None:
    inputs = plain(1, 33, 50, torch.float32)
    wide, _ = launch(inputs, Banded(10**12, 10**12, True), ladder=SMALL)
    assert_close(wide, truth(inputs)[0])


@triton.jit
def bounds_kernel(
    out_ptr, first, last, length, shift, left, right,
    LOWER: tl.constexpr, UPPER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes what `band_range` returns."""
    begin, inner, inner_end, end = parts.band_range(
        first, last, length, shift, left, right, LOWER, UPPER, BLOCK
    )
    tl.store(out_ptr, begin)
    tl.store(out_ptr + 1, inner)
    tl.store(out_ptr + 2, inner_end)
    tl.store(out_ptr + 3, end)


def test_the_range_of_a_band_is_tight() -> None:
    """Every visited tile has something to attend, and those without a test all of it."""
    block, rows = 4, 6
    bands = itertools.product((None, 1, 9), (None, -1, 5), (False, True))
    for left, right, from_end in bands:
        band = Band(left, right, from_end)
        for queries, keys in ((13, 19), (19, 13)):
            whole = band.allowed(queries, keys, "cpu")
            for first in range(0, queries, rows):
                last = min(first + rows, queries) - 1
                found = torch.zeros(4, dtype=torch.int64)
                bounds_kernel[(1,)](
                    found, first, last, keys, band.shift(queries, keys), left or 0, right or 0,
                    left is not None, right is not None, block,
                )  # fmt: skip
                begin, inner, inner_end, end = found.tolist()
                attended = whole[first : last + 1]
                columns = attended.any(0).nonzero().flatten().tolist()
                if not columns:
                    assert begin >= end
                    continue
                assert (begin, end) == (columns[0] // block * block, columns[-1] + 1)
                full = [
                    n for n in range(0, keys - block + 1, block) if attended[:, n : n + block].all()
                ]
                assert list(range(inner, inner_end, block)) == full
                assert begin <= inner <= inner_end


def test_tiles_that_no_row_attends_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from sdx_kernels._triton import attention_fwd

    loads: list[int] = []
    real = attention_fwd.load_rows

    def counted(*args: Any) -> object:
        loads.append(1)
        return real(*args)

    monkeypatch.setattr(attention_fwd, "load_rows", counted)
    inputs = random_inputs(1, 96, 96, 1, 16)

    def tiles(structure: AttentionBias | None, programs: int = 3) -> int:
        loads.clear()
        launch(inputs, structure, ladder=SMALL)
        # a q for each program of 32 queries, a k and a v for each tile of 16 keys
        return (len(loads) - programs) // 2

    assert tiles(None) == 3 * 6
    assert tiles(LowerTriangularMask()) == 2 + 4 + 6
    assert tiles(Banded(0, None)) == 6 + 4 + 2
    assert tiles(LocalAttentionFromBottomRightMask(16, 0)) == 2 + 3 + 3
    assert tiles(LocalAttentionFromBottomRightMask(0, 1)) == 3 + 3 + 2
    assert tiles(Banded(None, -96)) == 0
    # the grid has two tiles of queries for each sequence, of which the second sequence fills one
    packed = BlockDiagonalMask.from_seqlens((40, 8, 48), (16, 64, 16))
    assert tiles(packed, programs=6) == 2 * 1 + 1 * 4 + 2 * 1


@numpy_warns
@pytest.mark.parametrize("name", ["triangle", "window", "lower-end", "both-top"])
def test_nan_outside_the_band_never_leaks(name: str) -> None:
    structure, queries, keys = STRUCTURES[name]
    attended = structure.allowed((queries, keys))
    q, k, v = random_inputs(1, queries, keys, 1, 16, 40)
    clean, clean_lse = launch((q, k, v), structure, ladder=SMALL)
    for bad in (2, 37):
        reached = attended[:, bad]
        # the values' last channel lies in the second of the two parts that 40 is computed in
        for index, channel in ((1, 0), (2, -1)):
            inputs = q, k.clone(), v.clone()
            inputs[index][:, bad, :, channel] = math.nan
            out, lse = launch(inputs, structure, ladder=SMALL)
            assert torch.equal(out[:, ~reached], clean[:, ~reached])
            assert out[:, reached, :, channel].isnan().all()
            if index == 2:
                assert torch.equal(lse, clean_lse)


@numpy_warns
@pytest.mark.parametrize("band", [False, True])
def test_packed_sequences_are_those_alone(band: bool) -> None:
    mask = PACKED.make_causal() if band else PACKED
    inputs = random_inputs(1, 45, 63, 2, 40, dtype=torch.float16)
    inputs[2][:, 60] = math.nan
    out, lse = launch(inputs, mask)
    assert out.shape == (1, 45, 2, 40)
    assert lse.shape == (1, 2, 45)
    ladder = ladder_for((9, 0), 40, 40, torch.float16, 40, band=band, packed=True)
    sequences = zip(
        mask.split(out),
        lse.split(PACKED.query_lengths, dim=2),
        mask.split(inputs[0]),
        mask.split_kv(inputs[1]),
        mask.split_kv(inputs[2]),
        strict=True,
    )
    for part, part_lse, *alone in sequences:
        expected, expected_lse = launch(
            (alone[0], alone[1], alone[2]), LowerTriangularMask() if band else None, ladder=ladder
        )
        assert torch.equal(part.isnan(), expected.isnan())
        assert torch.equal(part.nan_to_num(), expected.nan_to_num())
        assert torch.equal(part_lse, expected_lse)


def test_sizes_of_zero() -> None:
    for lengths in ((), (0,), (0, 0)):
        mask = BlockDiagonalMask.from_seqlens(lengths)
        out, lse = launch(random_inputs(1, 0, 0, 2, 16), mask, ladder=SMALL)
        assert (out.shape, lse.shape) == ((1, 0, 2, 16), (1, 2, 0))
    for batch, queries in ((0, 4), (2, 0), (2, 4)):
        out, lse = launch(random_inputs(batch, queries, 0, 2, 16), ladder=SMALL)
        assert torch.equal(out, torch.zeros(batch, queries, 2, 16))
        assert torch.equal(lse, torch.full((batch, 2, queries), -math.inf))


@numpy_warns
@pytest.mark.parametrize("bias", ["none", "float", "bool"])
@pytest.mark.parametrize("band", [False, True])
def test_a_masked_key_is_never_read(bias: str, band: bool) -> None:
    q, k, v = random_inputs(2, 35, 77, 2, 40)
    # every other entry of a wider tensor, holes inside, and an item without any key
    mask = (torch.rand(2, 154, generator=torch.manual_seed(3)) > 0.4)[:, ::2]
    mask[1] = False
    for tensor in (k, v):
        tensor.masked_fill_(~mask[:, :, None, None], math.nan)
    dense = None
    if bias != "none":
        dense = torch.randn(2, 1, 35, 77) if bias == "float" else torch.rand(2, 1, 35, 77) > 0.3
    if bias == "float":
        assert dense is not None
        dense.masked_fill_(~mask[:, None, None], math.nan)
    from sdx_kernels._triton.attention_fwd import launch_attention_fwd

    limits = Band(30, 20) if band else None
    with poisoned_empty():
        out, lse = launch_attention_fwd(
            q, k, v, dense, scale=0.2, key_mask=mask, band=limits, output_dtype=q.dtype,
            with_lse=True, ladder=SMALL,
        )  # fmt: skip
    keys = mask[0].nonzero().flatten()
    allowed = (limits or Band()).allowed(35, 77, "cpu")[:, keys]
    cropped = None if dense is None else dense[:1, ..., keys]
    expected, expected_lse = attention(
        q[:1].double(), k[:1, keys].double(), v[:1, keys].double(), scale=0.2, bias=cropped,
        allowed=allowed[None, None],
    )  # fmt: skip
    assert lse is not None
    check((out[:1], lse[:1]), (expected, expected_lse))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(lse[1], torch.full_like(lse[1], -math.inf))


def dropped(structure: AttentionBias | None, dropout: Dropout, config: AttentionConfig) -> Result:
    """The weights [1|2, 45, 2, 64] after dropout, read off values that tell the keys apart."""
    batch = 1 if structure is not None and structure.packed("cpu") is not None else 2
    q, k, _ = random_inputs(batch, 45, 64, 2, 16)
    v = torch.eye(64)[None, :, None].expand(batch, 64, 2, 64)
    return launch((q, k, v), structure, dropout=dropout, ladder=(config,))


@pytest.mark.parametrize(("p", "seed"), [(0.1, -(2**62) + 7), (0.75, 5)])
def test_dropout_draws_the_references_mask_on_all_tiles(p: float, seed: int) -> None:
    dropout = Dropout(p, torch.tensor([seed]))
    keep = keep_mask(dropout.seed, 2, 2, range(45), range(64), p)
    for tile in ((32, 16), (16, 64), (64, 32)):
        out, lse = dropped(None, dropout, AttentionConfig(*tile, 4, 1, "test"))
        assert torch.equal(out.transpose(1, 2) != 0, keep)
        q, k, _ = random_inputs(2, 45, 64, 2, 16)
        weights = torch.einsum("bmhd,bnhd->bhmn", q, k).mul(0.25).softmax(-1)
        assert_close(out.transpose(1, 2), (weights * keep / (1 - p)).double())
        assert_close(lse, truth((q, k, k))[1])


def test_dropout_counts_within_a_packed_sequence() -> None:
    mask = BlockDiagonalMask.from_seqlens((20, 0, 25), (30, 3, 31))
    dropout = Dropout(0.4, torch.tensor([11]))
    out, _ = dropped(mask, dropout, AttentionConfig(16, 16, 4, 1, "test"))
    for number, (rows, keys) in {0: ((0, 20), (0, 30)), 2: ((20, 45), (33, 64))}.items():
        part = out[0, slice(*rows), :, slice(*keys)].transpose(0, 1)
        heads = torch.tensor([2 * number, 2 * number + 1])[:, None, None]
        row, key = torch.arange(part.shape[1])[:, None], torch.arange(part.shape[2])
        assert torch.equal(part != 0, keep_at(dropout.seed, heads, row, key, 0.4))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("window", torch.float32), ("key-mask", torch.float16), ("bias", torch.float32)],
    ids=str,
)
def test_dropout_with_structures(name: str, dtype: torch.dtype) -> None:
    structure, queries, keys = STRUCTURES.get(name, (None, 37, 45))
    # values of two parts, each of which must be scaled up
    inputs = random_inputs(2, queries, keys, 2, 16, 40, dtype=dtype)
    bias = torch.randn(2, 1, 1, keys) if name == "bias" else None
    dropout = Dropout(0.3, torch.tensor([1 << 40]))
    keep = keep_mask(dropout.seed, 2, 2, range(queries), range(keys), 0.3)
    result = launch(inputs, structure, bias, dropout)
    check(result, truth(inputs, structure, bias, keep, 0.3))


def test_dropout_repeats_and_follows_its_seed() -> None:
    inputs = random_inputs(1, 19, 33, 1, 16)
    first, again, other = (
        launch(inputs, dropout=Dropout(0.3, torch.tensor([seed])))[0] for seed in (7, 7, 8)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rows_beyond_32_bits_of_a_tile_are_copied() -> None:
    from sdx_kernels._triton.attention_launch import reach

    near = torch.empty(2, 9, 65537, 128, device="meta")
    assert reach(near, 1) is near
    far = torch.empty(2, 9, 65537, 256, device="meta")
    assert reach(far, 1).stride() == (9 * 65537 * 256, 256, 9 * 256, 1)
    bias = torch.empty(1, 1, 3, 5, device="meta").as_strided((1, 1, 3, 5), (0, 0, 2**25, 1))
    assert reach(bias, 2, 3).stride(2) == 5


def test_every_probability_is_the_same_kind_of_argument() -> None:
    """An int32 always: else a probability above a half would compile a kernel of its own."""
    from sdx_kernels._triton.attention_launch import dropout_draw

    for p in (1e-9, 0.1, 0.5, 0.75, 1 - 1e-9):
        threshold, rescale = dropout_draw(Dropout(p, torch.zeros(1)))
        assert threshold % 2**32 == int(p * 2**32)
        assert -(2**31) <= threshold < 2**31
        assert rescale == 1 / (1 - p)
