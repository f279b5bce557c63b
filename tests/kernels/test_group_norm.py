"""Group norm in parts against torch's in fp64: values, statistics, rows beyond the picture."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from sdx_kernels.errors import InvalidInputs
from sdx_kernels.ops import group_norm as module
from sdx_kernels.ops.group_norm import GroupMoments, group_norm, store_rows, upsampled_rows

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

OPS = ("triton", "reference")
#: largest error on values of unit size: half an ulp of what is written, and fp32's own sums
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def truth(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    w, b = (None if t is None else t.double() for t in (weight, bias))
    return F.group_norm(x.double(), groups, w, b, 1e-6)


def picture(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"),
    # ten and three channels a group, one pixel, one channel a group, more than one slot and block
    [((2, 320, 5, 7), 32), ((1, 30, 17, 33), 10), ((3, 8, 1, 1), 2), ((1, 24, 9, 40), 24),
     ((1, 160, 6, 100), 32)],
    ids=str,
)  # fmt: skip
def test_it_is_torchs_group_norm(
    op: str, dtype: torch.dtype, shape: tuple[int, ...], groups: int
) -> None:
    x = picture(*shape, dtype=dtype)
    weight, bias = picture(shape[1], dtype=dtype, seed=1), picture(shape[1], dtype=dtype, seed=2)
    expected = truth(x, groups, weight, bias)
    ours = group_norm(x, groups, weight, bias, 1e-6, op=op)
    assert ours.dtype == dtype
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert (ours - expected).abs().max() <= TOLERANCE[dtype] * max(1.0, float(weight.abs().max()))
    silu = group_norm(x, groups, weight, bias, 1e-6, silu=True, op=op)
    assert (silu - F.silu(expected)).abs().max() <= TOLERANCE[dtype] * 2
    plain = group_norm(x, groups, op=op)
    torch.testing.assert_close(plain.double(), F.group_norm(x.double(), groups), atol=4e-3, rtol=0)


@pytest.mark.parametrize("op", OPS)
def test_a_mean_far_from_zero_does_not_cancel(op: str) -> None:
    # summed squares would keep nothing of a deviation of 1 beside a mean of 3000 in fp32
    x = picture(1, 32, 40, 50) + 3000
    ours = group_norm(x, 8, op=op)
    assert (ours - truth(x, 8, None, None)).abs().max() < 1e-3


@pytest.mark.parametrize("op", OPS)
def test_parts_in_any_order_are_the_whole(op: str) -> None:
    x = picture(2, 16, 23, 30).contiguous(memory_format=torch.channels_last)
    # halves that differ much: statistics of a part alone would show
    x[:, :, 11:] = x[:, :, 11:] * 0.01 + 4
    cuts = list(pairwise((0, 4, 5, 17, 23)))
    moments = GroupMoments(x, [(bottom - top) * 30 for top, bottom in cuts], op)
    for index in (2, 0, 3, 1):
        top, bottom = cuts[index]
        moments.store(index, x[:, :, top:bottom])
    moments.settle(4, None, None, 1e-6)
    expected = truth(x, 4, None, None)
    for top, bottom in ((-1, 6), (5, 18), (20, 24), (-2, 26)):
        rows = moments.normalized(x, top, bottom)
        first, last = max(top, 0), min(bottom, 23)
        inside = rows[:, :, first - top : last - top]
        torch.testing.assert_close(inside.double(), expected[:, :, first:last], atol=1e-5, rtol=0)
        # the padding of the convolution that reads them: zeros, not the norm of zeros
        outside = torch.cat((rows[:, :, : first - top], rows[:, :, last - top :]), 2)
        assert outside.numel() == 2 * 16 * (bottom - top - last + first) * 30
        assert not outside.any()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_stored_is_the_sum_and_its_statistics(op: str, batch: int) -> None:
    rows, residual = (picture(batch, 48, 6, 22, dtype=torch.float16, seed=i) for i in (0, 1))
    bias = picture(48, seed=2)
    expected = (rows.double() + bias.double()[:, None, None] + residual.double()) / 2
    # a band inside a larger tensor, which is also the residual
    home = torch.full((batch, 48, 10, 22), 7.0, dtype=torch.float16)
    home = home.contiguous(memory_format=torch.channels_last)
    band = home[:, :, 2:8]
    band.copy_(residual)
    moments = GroupMoments(home, [6 * 22], op)
    moments.store(0, rows, band, bias=bias, residual=band, divisor=2.0)
    assert (band - expected).abs().max() <= 2e-3
    assert (home[:, :, :2] == 7).all()
    assert (home[:, :, 8:] == 7).all()
    moments.settle(6, None, None, 1e-6)
    normed = moments.normalized(band, 0, 6)
    # of the rounded values: what later passes read
    torch.testing.assert_close(normed.double(), truth(band, 6, None, None), atol=4e-3, rtol=0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_addend_alone(op: str, dtype: torch.dtype) -> None:
    rows = picture(2, 16, 3, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)
    other, bias = picture(2, 16, 3, 5, dtype=dtype, seed=1), picture(16, dtype=dtype, seed=2)
    cases = (
        ({}, rows.double()),
        ({"divisor": 4.0}, rows.double() / 4),
        ({"bias": bias}, rows.double() + bias.double()[:, None, None]),
        ({"residual": other}, rows.double() + other.double()),
    )
    for given, expected in cases:
        out = torch.full_like(rows, 9)
        before = rows.clone()
        store_rows(rows, out, op=op, **given)
        assert (out - expected).abs().max() <= TOLERANCE[dtype]
        assert torch.equal(rows, before)


@pytest.mark.parametrize("op", OPS)
def test_memory_beside_a_tensor_does_not_matter(op: str) -> None:
    home = torch.full((1, 40, 12, 9), float("nan")).contiguous(memory_format=torch.channels_last)
    x = picture(1, 40, 5, 9)
    home[:, :, 3:8] = x
    moments = GroupMoments(home, [45], op)
    moments.store(0, home[:, :, 3:8])
    moments.settle(5, None, None, 1e-6)
    ours = moments.normalized(home[:, :, 3:8], -1, 6)[:, :, 1:-1]
    torch.testing.assert_close(ours.double(), truth(x, 5, None, None), atol=1e-5, rtol=0)


@pytest.mark.parametrize("op", OPS)
def test_equal_inputs_give_equal_bits(op: str) -> None:
    x = picture(1, 64, 33, 31, dtype=torch.float16)
    first = group_norm(x, 32, silu=True, op=op)
    assert all(torch.equal(group_norm(x, 32, silu=True, op=op), first) for _ in range(3))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [(0, 8), (-1, 9), (3, 4), (2, 7)], ids=str)
def test_upsampled_rows_are_torchs(op: str, rows: tuple[int, int]) -> None:
    x = picture(2, 12, 4, 5, dtype=torch.float16)
    whole = F.pad(F.interpolate(x, scale_factor=2.0, mode="nearest"), (0, 0, 1, 1))
    top, bottom = rows
    ours = upsampled_rows(x, top, bottom, op=op)
    assert torch.equal(ours, whole[:, :, top + 1 : bottom + 1])
    assert ours.is_contiguous(memory_format=torch.channels_last)


def test_fp64_stays_fp64() -> None:
    x = picture(2, 24, 6, 5).double()
    ours = group_norm(x, 6, silu=True)
    torch.testing.assert_close(ours, F.silu(F.group_norm(x, 6)), atol=1e-12, rtol=0)


def test_nothing_is_computed_on_the_meta_device() -> None:
    x = torch.empty(1, 64, 8, 8, device="meta", dtype=torch.float16)
    ours = group_norm(x, 32, silu=True)
    assert ours.is_meta
    assert ours.shape == x.shape


def test_an_empty_picture_stays_empty() -> None:
    assert group_norm(torch.empty(0, 8, 4, 4), 2).shape == (0, 8, 4, 4)
    assert group_norm(torch.empty(1, 8, 0, 4), 2).shape == (1, 8, 0, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: group_norm(x[0], 2), "3 dimensions"),
        (lambda x: group_norm(x, 3), "8 channels do not divide into 3 groups"),
        (lambda x: group_norm(x, 0), "0 groups"),
        (lambda x: group_norm(x, 2, torch.ones(8)), "together or not at all"),
        (lambda x: group_norm(x, 2, torch.ones(4), torch.ones(4)), "8 elements"),
        (lambda x: group_norm(x, 2, op="fast"), "'triton', 'reference' or None"),
        (lambda x: store_rows(x, x.contiguous(), bias=x[0, :, 0, 0], op="triton"), "channels last"),
    ],
)
def test_bad_input_is_refused_in_words(
    call: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    with pytest.raises(InvalidInputs, match=words):
        call(picture(2, 8, 4, 4))


def test_the_reference_serves_where_the_kernels_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.implementation(torch.device("cpu"), torch.float32) == "reference"
    card = module.target.Target("cuda", (7, 5), 65536, "a card", 40)
    monkeypatch.setattr(module.target, "of", lambda device: card)
    monkeypatch.setattr(module.target, "interpreting", lambda: False)
    device = torch.device("cuda", 0)
    assert module.implementation(device, torch.float16) == "triton"
    # Turing has no bf16 arithmetic
    assert module.implementation(device, torch.bfloat16) == "reference"
    assert module.implementation(device, torch.float64) == "reference"
    monkeypatch.setattr(module.target, "triton_status", lambda: (False, "no Triton"))
    assert module.implementation(device, torch.float16) == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((1, 128, 1024, 1024), 32),
        ((2, 512, 96, 64), 32),
        ((1, 320, 31, 17), 32),
        ((1, 30, 9, 9), 3),
    ],
    ids=str,
)
def test_on_a_card_it_is_torchs_group_norm(
    dtype: torch.dtype, shape: tuple[int, ...], groups: int
) -> None:
    x = (picture(*shape) * 2 + 1).to("cuda", dtype)
    weight, bias = (picture(shape[1], seed=s).to("cuda", dtype) for s in (1, 2))
    # twice: the second launch starts the binary that the first has compiled
    for _ in range(2):
        ours = group_norm(x, groups, weight, bias, 1e-6, silu=True)
    expected = F.silu(truth(x, groups, weight, bias))
    error = float((ours - expected).abs().max())
    stock = F.silu(F.group_norm(x, groups, weight, bias, 1e-6))
    assert error <= max(TOLERANCE[dtype], 1.5 * float((stock - expected).abs().max()))
    assert torch.equal(ours, group_norm(x, groups, weight, bias, 1e-6, silu=True))


@pytest.mark.gpu
def test_a_binary_is_found_again_only_for_what_it_serves() -> None:
    # unaligned starts, odd strides and sizes, and aligned ones, in turns
    for _ in range(2):
        for channels, skip in ((30, 0), (32, 0), (30, 1), (32, 1)):
            home = (
                picture(1, channels, 12, 9).to("cuda").contiguous(memory_format=torch.channels_last)
            )
            x = home[:, :, skip:]
            ours = group_norm(x, 2)
            torch.testing.assert_close(ours, F.group_norm(x, 2), atol=1e-5, rtol=0)
