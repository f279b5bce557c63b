"""Attention's values: shapes, strides, dtypes and scales against fp64, by kernel and by default."""

import math
import subprocess
import sys
from collections.abc import Callable
from doctest import DocTestFinder, DocTestRunner

import pytest
import torch

import sdx_kernels
from sdx_kernels import (
    InvalidInputs,
    attend,
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)
from sdx_kernels.testing import (
    HEAD_DIMS,
    assert_close,
    at_end_of_nan,
    math_peer,
    poisoned_empty,
    random_inputs,
    reference64,
)

Run = Callable[..., torch.Tensor]
DTYPES = [torch.float32, torch.float16]


def check(run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: object) -> None:
    with poisoned_empty():
        out = run(q, k, v, **kwargs)
    assert_close(out, reference64(q, k, v, **kwargs), peer=math_peer(q, k, v, **kwargs))


def same_bits(run: Run, a: torch.Tensor, b: torch.Tensor) -> None:
    """Our kernel must give equal bits; torch's may take another path for other strides."""
    if run.__name__ == "triton_call":
        assert torch.equal(a, b)
    else:
        assert_close(a, b.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [40, 80, 160])
def test_case_013_head_dims_of_sd15(run: Run, head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = random_inputs(1, 65, 77, 8, head_dim, dtype=dtype)
    check(run, q, k, v)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_case_015_any_head_dim_beside_nan(run: Run, head_dim: int) -> None:
    q, k, v = random_inputs(1, 19, 45, 2, head_dim)
    wide_k, wide_v = (t.new_full((1, 45, 2, head_dim + 24), math.nan) for t in (k, v))
    wide_k[..., :head_dim], wide_v[..., :head_dim] = k, v
    check(run, q, wide_k[..., :head_dim], wide_v[..., :head_dim])


@pytest.mark.parametrize("shape", [(9, 12, 20, 128), (1, 9, 20, 128)], ids=str)
def test_case_017_short_sequences(run: Run, shape: tuple[int, int, int, int]) -> None:
    batch, length, heads, dim = shape
    # the interpreter takes a second for every 100 programs
    heads = 2 if run.__name__ == "triton_call" else heads
    q, k, v = random_inputs(batch, length, length, heads, dim, dtype=torch.float16)
    check(run, *(at_end_of_nan(t) for t in (q, k, v)))


def test_case_017_every_length_up_to_a_block(run: Run) -> None:
    for length in range(1, 71):
        q, k, v = random_inputs(1, length, length, 1, 64, dtype=torch.float16, seed=length)
        check(run, *(at_end_of_nan(t) for t in (q, k, v)))


def test_case_009_memory_beyond_the_length_never_leaks(run: Run) -> None:
    q, k, v = random_inputs(1, 33, 77, 2, 64)
    buffers = [t.new_full((1, 128, 2, 64), math.nan) for t in (k, v)]
    for buffer, tensor in zip(buffers, (k, v), strict=True):
        buffer[:, :77] = tensor
    out = run(q, buffers[0][:, :77], buffers[1][:, :77])
    assert torch.equal(out, run(q, k, v))
    assert out.isfinite().all()


def test_case_019_singletons(run: Run) -> None:
    for batch in (1, 2):
        for length in (1, 2):
            for heads in (1, 2):
                for dim in (1, 2):
                    q, k, v = random_inputs(batch, length, length, heads, dim)
                    check(run, q, k, v)
    q, k, v = random_inputs(1, 2, 1, 1, 1)
    assert torch.equal(run(q, k, v), v.expand(1, 2, 1, 1))


def test_case_019_strides_of_singleton_dims_mean_nothing(run: Run) -> None:
    q, k, v = random_inputs(1, 5, 7, 1, 1)
    odd = [t.as_strided(t.shape, (7919, 1, 4099, 31)) for t in (q, k, v)]
    same_bits(run, run(*odd), run(q, k, v))


def test_case_021_zero_sizes_do_not_kill_the_process() -> None:
    code = """
import torch
from sdx_kernels import memory_efficient_attention as mea
for dtype in (torch.bfloat16, torch.float32):
    for shape in ((0, 2, 0, 0), (1, 2, 1, 0), (0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8)):
        q, k, v = (torch.zeros(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        out = mea(q, k, v)
        assert out.shape == shape, out.shape
        out.sum().backward()
        assert q.grad.shape == shape
q, k, v = torch.ones(1, 3, 2, 8), torch.ones(1, 0, 2, 8), torch.ones(1, 0, 2, 5)
assert torch.equal(mea(q, k, v), torch.zeros(1, 3, 2, 5))
q, k, v = torch.ones(1, 3, 2, 0), torch.ones(1, 4, 2, 0), torch.randn(1, 4, 2, 5)
assert (mea(q, k, v) - v.mean(1, keepdim=True)).abs().max() < 1e-6
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    q = torch.zeros(1, 2, 1, 0)
    with pytest.raises(InvalidInputs, match="size 0"):
        attend(q, q, q, op="triton")


def test_case_022_layout_is_batch_seq_heads_dim(run: Run) -> None:
    q, k, v = random_inputs(2, 50, 50, 12, 4)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v))
    ).transpose(1, 2)
    assert (run(q, k, v) - theirs).abs().max() < 1e-5
    with pytest.raises(ValueError, match=r"\[batch, seq, heads, dim\].*\(2, 12, 50, 4\)"):
        run(q, k.transpose(1, 2), v.transpose(1, 2))
    flat = run(q[:, :, 0], k[:, :, 0], v[:, :, 0])
    assert flat.shape == (2, 50, 4)
    assert torch.equal(flat, run(q[:, :, :1], k[:, :, :1], v[:, :, :1])[:, :, 0])


def test_case_022_docstring_example_runs() -> None:
    runner = DocTestRunner()
    for test in DocTestFinder().find(memory_efficient_attention, "mea", globs={}):
        runner.run(test)
    assert runner.summarize(verbose=False).attempted > 0
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("expanded", [True, False], ids=["expanded", "single"])
def test_grouped_heads_share_a_key_head(run: Run, expanded: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 17, 3, 4, 16)
    k, v = torch.randn(2, 21, 3, 1, 16), torch.randn(2, 21, 3, 1, 24)
    truth = reference64(
        q.flatten(2, 3),
        k.expand(-1, -1, -1, 4, -1).flatten(2, 3),
        v.expand(-1, -1, -1, 4, -1).flatten(2, 3),
    ).unflatten(2, (3, 4))
    if expanded:
        k, v = k.expand(-1, -1, -1, 4, -1), v.expand(-1, -1, -1, 4, -1)
    out = run(q, k, v)
    assert out.shape == (2, 17, 3, 4, 24)
    assert_close(out, truth)
    bias = torch.randn(2, 3, 1, 17, 21)
    biased = run(q, k, v, attn_bias=bias)
    one = run(
        q[:, :, 1],
        k[:, :, 1, :1].expand(-1, -1, 4, -1),
        v[:, :, 1, :1].expand(-1, -1, 4, -1),
        attn_bias=bias[:, 1],
    )
    assert_close(biased[:, :, 1], one.double())


@pytest.mark.parametrize("scale", [None, 0.1, 1.0, 0.0, -0.3])
def test_case_023_scale_multiplies_scores_and_not_the_bias(run: Run, scale: float | None) -> None:
    q, k, v = random_inputs(1, 9, 9, 2, 16)
    bias = torch.randn(1, 2, 9, 9) * 3
    check(run, q, k, v, attn_bias=bias, scale=scale)
    if scale == 0.0:
        assert_close(run(q, k, v, scale=0.0), v.double().mean(1, keepdim=True).expand(q.shape))


def test_different_value_width(run: Run) -> None:
    for dim, value_dim in ((64, 40), (24, 160), (16, 1)):
        q, k, v = random_inputs(2, 33, 45, 2, dim, value_dim)
        check(run, q, k, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_025_strided_inputs_equal_contiguous_ones_bit_for_bit(
    run: Run, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    heads_first = [torch.randn(2, 4, 33, 40, dtype=dtype).transpose(1, 2) for _ in range(3)]
    every_other = [torch.randn(2, 66, 4, 40, dtype=dtype)[:, ::2] for _ in range(3)]
    bias = torch.randn(2, 4, 33, 33, dtype=dtype).transpose(2, 3)
    for views in (heads_first, every_other):
        before = [t.clone() for t in views]
        dense = [t.contiguous() for t in views]
        strided = run(*views, attn_bias=bias)
        same_bits(run, strided, run(*dense, attn_bias=bias.contiguous()))
        assert all(torch.equal(a, b) for a, b in zip(before, views, strict=True))
        check(run, *views, attn_bias=bias)


def test_case_027_last_dim_of_any_stride(run: Run) -> None:
    torch.manual_seed(2)
    q = torch.randn(1, 40, 17, 2).permute(0, 2, 3, 1)
    k, v = torch.randn(1, 20, 2, 80)[..., ::2], torch.randn(1, 20, 2, 80)[..., 1::2]
    assert q.stride(-1) != 1
    check(run, q, k, v)


def test_case_031_frames_folded_pixels_into_the_batch(run: Run) -> None:
    q, k, v = random_inputs(33, 16, 16, 2, 40, dtype=torch.float16)
    check(run, q, k, v)


@pytest.mark.parametrize("device", ["cpu"])
def test_case_035_mixed_dtypes_are_promoted(device: str) -> None:
    q, k, v = random_inputs(1, 9, 12, 2, 16)
    k16, v16 = k.bfloat16(), v.bfloat16()
    out = memory_efficient_attention(q, k16, v16)
    assert out.dtype == torch.float32
    assert_close(out, reference64(q, k16, v16))
    for bias in (None, torch.ones(9, 12, dtype=torch.bool).tril(3), torch.zeros(12)):
        with torch.autocast(device, dtype=torch.bfloat16):
            cast = memory_efficient_attention(q, k16, v16, bias)
            causal = memory_efficient_attention(q, k16, v16, sdx_kernels.LowerTriangularMask())
        assert cast.dtype == causal.dtype == torch.bfloat16
        assert_close(cast, reference64(q.bfloat16(), k16, v16, bias))
        # autocast must not round the fp32 products of an implementation once more
        outside = memory_efficient_attention(
            q.bfloat16(), k16, v16, sdx_kernels.LowerTriangularMask()
        )
        assert torch.equal(causal, outside)
    with pytest.raises(ValueError, match="floating"):
        memory_efficient_attention(q.long(), k, v)


def test_output_dtype(run: Run) -> None:
    q, k, v = random_inputs(1, 9, 12, 2, 16, dtype=torch.float16)
    out = run(q, k, v, output_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert_close(out, reference64(q, k, v), limit=5e-4)


def test_case_037_scores_beyond_fp16_stay_finite(run: Run) -> None:
    torch.manual_seed(3)
    q = torch.full((1, 32, 1, 64), 576.0, dtype=torch.float16)
    signs = torch.where(torch.rand(1, 32, 1, 1) > 0.5, 1.0, -1.0)
    k = (torch.full((1, 32, 1, 64), 382.0) * signs).half()
    v = torch.randn(1, 32, 1, 64).half()
    out = run(q, k, v)
    assert out.isfinite().all()
    assert_close(out, reference64(q, k, v))


def test_bfloat16_on_torchs_path() -> None:
    q, k, v = random_inputs(2, 33, 77, 4, 40, dtype=torch.bfloat16)
    check(lambda *a, **kw: attend(*a, **kw)[0], q, k, v)


def test_case_048_forward_repeats_bit_for_bit(run: Run) -> None:
    # two tiles of queries and of keys, the second ones of two rows
    q, k, v = random_inputs(1, 130, 130, 2, 40, dtype=torch.float16)
    first = run(q, k, v)
    assert all(torch.equal(first, run(q, k, v)) for _ in range(19))


@pytest.mark.parametrize("op", ["triton", "reference", None])
def test_log_sum_exp(interpreter: None, op: str | None) -> None:
    q, k, v = random_inputs(2, 19, 45, 3, 40)
    mask = torch.ones(19, 45, dtype=torch.bool)
    mask[4] = False
    scores = torch.einsum("bmhd,bnhd->bhmn", q.double(), k.double()) * 40**-0.5
    for bias, truth in (
        (None, scores.logsumexp(-1)),
        (mask, scores.masked_fill(~mask, -math.inf).logsumexp(-1)),
    ):
        out, lse = memory_efficient_attention_forward_requires_grad(q, k, v, bias, op=op)
        assert lse.shape == (2, 3, 19)
        assert lse.dtype == torch.float32
        assert_close(out, reference64(q, k, v, bias))
        assert torch.equal(lse == -math.inf, truth == -math.inf)
        assert (lse - truth).nan_to_num().abs().max() < 1e-5


def test_forms_without_autograd_refuse_dropout() -> None:
    q, k, v = random_inputs(1, 3, 3, 1, 8)
    assert not memory_efficient_attention_forward(q.requires_grad_(), k, v).requires_grad
    for form in (
        memory_efficient_attention_forward,
        memory_efficient_attention_forward_requires_grad,
    ):
        with pytest.raises(NotImplementedError, match="dropout"):
            form(q, k, v, p=0.1)


def test_dropout_draws_from_torchs_generator() -> None:
    q, k, v = random_inputs(1, 33, 64, 2, 16)
    causal = sdx_kernels.LowerTriangularMask()
    for bias in (None, causal):
        torch.manual_seed(5)
        first = memory_efficient_attention(q, k, v, bias, p=0.5)
        torch.manual_seed(5)
        assert torch.equal(first, memory_efficient_attention(q, k, v, bias, p=0.5))
        assert not torch.equal(first, memory_efficient_attention(q, k, v, bias))
    state = torch.get_rng_state()
    memory_efficient_attention(q, k, v)
    assert torch.equal(state, torch.get_rng_state())
