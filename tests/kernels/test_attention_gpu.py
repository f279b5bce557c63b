"""The same promises natively on a GPU: dtypes, real shapes, limits, graphs, compile count."""

import math
from collections.abc import Iterator

import pytest
import torch

from sdx_kernels import (
    KeyPaddingMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    attend,
    count,
    memory_efficient_attention,
    memory_efficient_attention_forward_requires_grad,
)
from sdx_kernels.testing import (
    HEAD_DIMS,
    ODD_LENGTHS,
    REAL_SHAPES,
    assert_close,
    math_peer,
    poisoned_empty,
    random_inputs,
    reference64,
)

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def plain_products() -> Iterator[None]:
    """The peer is measured with TF32 off, and nothing of one test stays allocated in the next."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    torch.cuda.empty_cache()


def ours(*args: object, **kwargs: object) -> torch.Tensor:
    before = count("triton")
    with poisoned_empty():
        out, choice = attend(*args, op="triton", **kwargs)  # type: ignore[arg-type]
    assert choice.name == "triton"
    assert count("triton") == before + 1
    return out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_case_015_every_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    inputs = random_inputs(2, 65, 77, 3, head_dim, dtype=dtype, device=GPU)
    out = ours(*inputs)
    assert_close(out, reference64(*inputs), peer=math_peer(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", ODD_LENGTHS)
def test_case_001_bias_of_any_length(keys: int, dtype: torch.dtype) -> None:
    inputs = random_inputs(2, 70, keys, 4, 64, dtype=dtype, device=GPU)
    mask = torch.rand(2, 1, 70, keys, device=GPU) > 0.3
    mask[:, :, 3] = False
    biases = (
        torch.randn(2, 4, 70, keys, device=GPU).to(dtype),
        torch.randn(4, 1, keys, device=GPU),
        mask,
        torch.zeros(mask.shape, device=GPU).masked_fill(~mask, torch.finfo(torch.float32).min),
    )
    for bias in biases:
        assert_close(ours(*inputs, attn_bias=bias), reference64(*inputs, bias))
    assert torch.equal(
        ours(*inputs, attn_bias=mask)[:, 3], torch.zeros(2, 4, 64, device=GPU, dtype=dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(77, 77), (33, 130), (130, 33), (500, 500)], ids=str)
def test_structures(lengths: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = random_inputs(2, *lengths, 2, 64, dtype=dtype, device=GPU)
    padding = torch.ones(2, lengths[1], dtype=torch.bool, device=GPU)
    padding[1, lengths[1] // 2 :] = False
    for bias in (
        LowerTriangularMask(),
        LowerTriangularFromBottomRightMask(),
        LowerTriangularMask().add_bias(padding[:, None, None]),
        KeyPaddingMask(padding),
    ):
        assert_close(ours(*inputs, attn_bias=bias), reference64(*inputs, bias))


def test_keys_beyond_the_diagonal_never_leak() -> None:
    q, k, v = random_inputs(1, 150, 150, 2, 64, dtype=torch.float16, device=GPU)
    clean = ours(q, k, v, attn_bias=LowerTriangularMask())
    v[:, 100] = math.nan
    out = ours(q, k, v, attn_bias=LowerTriangularMask())
    assert torch.equal(out[:, :100], clean[:, :100])
    assert out[:, 100:].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("shape", REAL_SHAPES, ids=lambda shape: shape[0])
@pytest.mark.parametrize("op", ["triton", "automatic"])
def test_real_shapes_on_sampled_rows(
    shape: tuple[str, int, int, int, int, int, bool], op: str
) -> None:
    _, batch, queries, keys, heads, head_dim, causal = shape
    inputs = random_inputs(batch, queries, keys, heads, head_dim, dtype=torch.float16, device=GPU)
    if op == "triton" and head_dim > 256:
        pytest.skip("our kernel ends at head dim 256; the automatic row covers the shape")
    bias = LowerTriangularMask() if causal else None
    out = ours(*inputs, attn_bias=bias) if op == "triton" else attend(*inputs, attn_bias=bias)[0]
    rows = slice(0, None, max(1, queries // 64))
    q, k, v = inputs[0][:4, rows], inputs[1][:4], inputs[2][:4]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=GPU).tril()[rows] if causal else None
    assert_close(out[:4, rows], reference64(q, k, v, mask))


@pytest.mark.parametrize(
    "shape", [(65536, 16, 1, 80), (70000, 4, 1, 8), (8193, 16, 8, 40)], ids=str
)
def test_case_029_and_031_more_than_65535_heads(shape: tuple[int, int, int, int]) -> None:
    batch, length, heads, dim = shape
    q, k, v = random_inputs(batch, length, length, heads, dim, dtype=torch.float16, device=GPU)
    for out in (ours(q, k, v), memory_efficient_attention(q, k, v)):
        torch.cuda.synchronize()
        rows = torch.randint(batch, (100,), generator=torch.Generator().manual_seed(0)).to(GPU)
        rows[-1] = batch - 1
        assert_close(out[rows], reference64(q[rows], k[rows], v[rows]))


def test_case_033_offsets_beyond_two_to_the_31() -> None:
    # the last batch item starts 2.7e9 elements in; one row's step still fits the kernel's tiles
    wide = torch.empty(6, 64, 1, 2**23 + 8, dtype=torch.float16, device=GPU)[..., :64]
    wide.normal_()
    assert wide.stride(0) * 5 > 2**31
    dense = wide.contiguous()
    assert torch.equal(ours(wide, wide, wide), ours(dense, dense, dense))
    # further apart than that, rows are copied first
    far = torch.empty(130, 1, 2**24 + 8, dtype=torch.float16, device=GPU)[..., :64].unsqueeze(0)
    far.normal_()
    dense = far.contiguous()
    assert torch.equal(ours(far, far, far), ours(dense, dense, dense))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_048_twenty_runs_give_the_same_bits(dtype: torch.dtype) -> None:
    inputs = random_inputs(2, 1024, 1024, 8, 40, dtype=dtype, device=GPU)
    first = ours(*inputs)
    assert all(torch.equal(first, ours(*inputs)) for _ in range(19))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "bias"])
@pytest.mark.parametrize("op", ["triton", None])
def test_case_048_twenty_backwards_give_the_same_bits(
    op: str | None, kind: str, dtype: torch.dtype
) -> None:
    q, k, v = random_inputs(2, 1024, 1024, 8, 40, dtype=dtype, device=GPU)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    bias: torch.Tensor | LowerTriangularMask | None = None
    if kind == "causal":
        bias = LowerTriangularMask()
    elif kind == "bias":
        bias = torch.randn(1, 8, 1024, 1024, device=GPU, dtype=dtype).requires_grad_()
        leaves.append(bias)
    grad = torch.randn_like(q)
    made = ("triton-backward", "triton-tma-backward", "triton-wide-backward")
    before = sum(count(name) for name in made)

    def gradients() -> tuple[torch.Tensor, ...]:
        out = memory_efficient_attention(q, k, v, bias, op=op)
        return torch.autograd.grad(out, leaves, grad)

    first = gradients()
    assert all(
        torch.equal(one, again)
        for _ in range(19)
        for one, again in zip(first, gradients(), strict=True)
    )
    # by itself, torch's own backward may run where it repeats too
    assert op is None or sum(count(name) for name in made) == before + 20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 160])
def test_case_052_gradients(head_dim: int, dtype: torch.dtype) -> None:
    inputs = random_inputs(2, 57, 77, 2, head_dim, dtype=dtype, device=GPU)
    leaves = [t.clone().requires_grad_() for t in inputs]
    truth = [t.double().requires_grad_() for t in inputs]
    out, choice = attend(*leaves)
    assert choice.name in {"triton", "reference"}
    out.float().square().sum().backward()
    reference64(*truth).square().sum().backward()
    limit = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    for leaf, expected in zip(leaves, truth, strict=True):
        assert leaf.grad is not None
        assert expected.grad is not None
        assert_close(leaf.grad, expected.grad, limit=limit * max(1, expected.grad.abs().max()))


def test_case_062_new_lengths_compile_at_most_three_variants() -> None:
    from sdx_kernels._triton.attention_fwd import attention_fwd_kernel

    def variants() -> int:
        caches = getattr(attention_fwd_kernel, "device_caches", None)
        cache = attention_fwd_kernel.cache if caches is None else caches[0]
        return len(cache[0] if isinstance(cache, tuple) else cache)

    before = variants()
    for keys in range(97, 137):
        inputs = random_inputs(2, 50, keys, 2, 56, dtype=torch.float16, device=GPU)
        assert_close(ours(*inputs), reference64(*inputs))
    assert 1 <= variants() - before <= 3


def test_case_148_side_stream_and_current_device_stay() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    inputs = random_inputs(1, 300, 300, 10, 128, dtype=torch.float16, device=device)
    torch.cuda.synchronize(device)
    current = torch.cuda.current_device()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        out = ours(*inputs)
    stream.synchronize()
    assert torch.cuda.current_device() == current
    assert_close(out, reference64(*inputs))
    cpu = random_inputs(1, 300, 300, 10, 128, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"query is on cuda:\d and key on cpu"):
        attend(inputs[0], cpu[1], cpu[2])


def test_a_cuda_graph_replays_the_kernel() -> None:
    q, k, v = random_inputs(2, 333, 333, 4, 64, dtype=torch.float16, device=GPU)
    ours(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend(q, k, v, op="triton")
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, ours(q, k, v))


@pytest.mark.parametrize("op", ["triton", None])
def test_case_060_graphs_of_many_sizes_stay_valid(op: str | None) -> None:
    """Five sizes, the first again at the end; nothing is allocated by the second pass."""
    sides = (32, 40, 48, 56, 64)
    inputs = {
        side: random_inputs(2, side * side, side * side, 4, 64, dtype=torch.float16, device=GPU)
        for side in sides
    }
    expected = {side: memory_efficient_attention(*inputs[side], op=op).clone() for side in sides}
    graphs = {}
    for side in sides:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = memory_efficient_attention(*inputs[side], op=op)
        graphs[side] = graph, out
    allocated = []
    for _ in range(2):
        for side in (*sides, sides[0]):
            graph, out = graphs[side]
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, expected[side])
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[0] == allocated[1]


def test_log_sum_exp() -> None:
    inputs = random_inputs(2, 130, 77, 3, 64, device=GPU)
    mask = torch.rand(130, 77, device=GPU) > 0.3
    mask[5] = False
    scores = torch.einsum("bmhd,bnhd->bhmn", inputs[0].double(), inputs[1].double()) / 8
    for bias, truth in (
        (None, scores.logsumexp(-1)),
        (mask, scores.masked_fill(~mask, -math.inf).logsumexp(-1)),
    ):
        _, lse = memory_efficient_attention_forward_requires_grad(*inputs, bias, op="triton")
        assert torch.equal(lse == -math.inf, truth == -math.inf)
        assert (lse - truth).nan_to_num().abs().max() < 1e-5


@pytest.mark.parametrize("op", ["sdpa", "sdpa-math", "sdpa-efficient", "sdpa-flash", "sdpa-cudnn"])
def test_torchs_kernels_as_candidates(op: str) -> None:
    inputs = random_inputs(2, 256, 256, 8, 64, dtype=torch.float16, device=GPU)
    out, choice = attend(*inputs, op=op)
    assert choice.name == op
    assert_close(out, reference64(*inputs))


def test_the_first_compilation_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    from sdx_kernels._triton import attention_launch

    attention_launch.say_first_use.cache_clear()
    attention_launch._steps.clear()
    with caplog.at_level("INFO", logger="sdx_kernels"):
        for head_dim in (24, 56):
            ours(*random_inputs(1, 16, 16, 1, head_dim, dtype=torch.float16, device=GPU))
    assert [record.message.startswith("compiling") for record in caplog.records] == [True]
