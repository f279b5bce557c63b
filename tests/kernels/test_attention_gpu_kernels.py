"""Every kernel of ours on a real card: forward and backward, three dtypes, all structures."""

from typing import Any

import pytest
import torch

from sdx_kernels import (
    BlockDiagonalMask,
    KeyPaddingMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    attend,
    count,
    memory_efficient_attention,
)
from sdx_kernels.checks import attention_inputs
from sdx_kernels.ops.attention_impls import structure_of
from sdx_kernels.reference.attention_chunks import attention_backward, attention_forward
from sdx_kernels.reference.dropout import keep_mask
from sdx_kernels.testing import REAL_SHAPES, largest_error, random_inputs
from sdx_kernels.tuning.attention_tma_bwd import candidates, ladder_for_tma_bwd

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


def slow(value: Any) -> Any:
    """A value left to `make gpu-all`: that of another one compiles and computes as it does."""
    return pytest.param(value, marks=pytest.mark.slow)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: what fits beside its float64 truth; longer ones are shortened to this many queries and keys
LONGEST = 4096

SHAPES = [
    (name, min(batch, 512), min(queries, LONGEST), min(keys, LONGEST), heads, dim, causal)
    for name, batch, queries, keys, heads, dim, causal in REAL_SHAPES
]


def truth(
    tensors: tuple[torch.Tensor, ...], bias: Any, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Output and gradients of query, key and value in float64, slice by slice."""
    q, k, v = (t.detach().double() for t in tensors)
    inputs = attention_inputs(q, k, v, bias)
    shared: dict[str, Any] = {
        "scale": inputs.scale,
        "bias": inputs.bias,
        "structure": structure_of(inputs),
    }
    out, _ = attention_forward(q, k, v, **shared)
    dq, dk, dv, _ = attention_backward(grad.double(), q, k, v, **shared)
    return out, dq, dk, dv


def peer(
    tensors: tuple[torch.Tensor, ...], bias: Any, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The same in the inputs' own dtype by torch's plain operations: what rounding costs."""
    q, k, v = (t.detach().clone().requires_grad_() for t in tensors)
    scores = torch.einsum("bmhk,bnhk->bhmn", q, k).float() * q.shape[-1] ** -0.5
    if isinstance(bias, torch.Tensor):
        scores = scores + bias
    elif bias is not None:
        scores = scores.masked_fill(~bias.allowed(scores.shape, q.device), -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num().to(q.dtype)
    out = torch.einsum("bhmn,bnhk->bmhk", weights, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def check(tensors: tuple[torch.Tensor, ...], bias: Any = None, op: Any = "triton") -> None:
    """Holds output and gradients to max(2 or 3 × what rounding costs, 4 eps of the largest)."""
    before = {name: count(name) for name in ("reference", "reference-backward")}
    q, k, v = (t.clone().requires_grad_() for t in tensors)
    grad = torch.randn(*q.shape[:-1], v.shape[-1], device=q.device).to(q.dtype)
    out = memory_efficient_attention(q, k, v, bias, op=op)
    found = out.detach(), *torch.autograd.grad(out, (q, k, v), grad)
    again = torch.autograd.grad(memory_efficient_attention(q, k, v, bias, op=op), (q, k, v), grad)
    assert all(torch.equal(a, b) for a, b in zip(found[1:], again, strict=True))
    assert {name: count(name) for name in before} == before, "the reference ran"
    names = ("out", "dq", "dk", "dv")
    rows = zip(names, found, truth(tensors, bias, grad), peer(tensors, bias, grad), strict=True)
    for name, ours, exact, theirs in rows:
        factor = 2.0 if name == "out" else 3.0
        eps = torch.finfo(ours.dtype).eps
        bound = max(factor * largest_error(theirs, exact), 4 * eps * float(exact.abs().max()))
        error = largest_error(ours, exact)
        assert error <= bound, f"{name}: {error:.3g} is above {bound:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
def test_real_shapes_forward_and_backward(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    _, batch, queries, keys, heads, dim, causal = shape
    check(
        random_inputs(batch, queries, keys, heads, dim, dtype=dtype, device=GPU),
        LowerTriangularMask() if causal else None,
    )


def masks(queries: int, keys: int) -> dict[str, Any]:
    third, part = queries // 3, keys // 3
    exists = torch.ones(1, keys, dtype=torch.bool, device=GPU)
    exists[:, -part:] = False
    lengths = (third, queries - third), (part, keys - part)
    return {
        "causal": LowerTriangularMask(),
        "causal from the end": LowerTriangularFromBottomRightMask(),
        "window": LocalAttentionFromBottomRightMask(40, 17),
        "keys": KeyPaddingMask(exists),
        "packed": BlockDiagonalMask.from_seqlens(*lengths),
        "packed causal": BlockDiagonalMask.from_seqlens(*lengths).make_causal(),
        "bias": torch.randn(1, 1, queries, keys, device=GPU),
        "bias of keys": torch.randn(1, 3, 1, keys, device=GPU),
    }


@pytest.mark.parametrize("dtype", [torch.float16, slow(torch.bfloat16), torch.float32], ids=str)
@pytest.mark.parametrize("dim", [40, 64, slow(80), slow(160), 256, 512])
@pytest.mark.parametrize("name", list(masks(9, 9)) if torch.cuda.is_available() else ["causal"])
def test_structures_forward_and_backward(name: str, dim: int, dtype: torch.dtype) -> None:
    if name.startswith("packed") and dim > (64 if dtype == torch.float32 else 256):
        pytest.skip("packed sequences of such dims have no backward kernel: the reference's turn")
    inputs = random_inputs(1, 301, 333, 3, dim, dtype=dtype, device=GPU)
    check(inputs, masks(301, 333)[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("keys", [1, 4, 16, 77, 96, 154, 257])
@pytest.mark.parametrize("dim", [40, 64, 80, 128])
def test_short_keys(dim: int, keys: int, dtype: torch.dtype) -> None:
    if dim > 64 and keys > 160:
        pytest.skip("more than 160 keys of 128 dims do not fit a program: refused by name")
    inputs = random_inputs(2, 1024, keys, 5, dim, dtype=dtype, device=GPU)
    out, choice = attend(*inputs, op="triton-short")
    assert choice.name == "triton-short"
    exact = truth(inputs, None, torch.zeros_like(out))[0]
    theirs = peer(inputs, None, torch.zeros_like(out))[0]
    eps = torch.finfo(dtype).eps
    bound = max(2 * largest_error(theirs, exact), 4 * eps * float(exact.abs().max()))
    assert largest_error(out, exact) <= bound


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("times", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("dim", [40, 64, 80, 128])
def test_tensor_descriptors(dim: int, times: float, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor descriptors are plain loads before sm_90")
    q, k, v = random_inputs(2, 1024, 1024, 5, dim, dtype=dtype, device=GPU)
    q = q * times
    k[:, 3] = k[:, 3] * 4  # a key that many rows lean on
    out, choice = attend(q, k, v, op="triton-tma")
    assert choice.name == "triton-tma"
    exact = truth((q, k, v), None, torch.zeros_like(out))[0]
    theirs = peer((q, k, v), None, torch.zeros_like(out))[0]
    eps = torch.finfo(dtype).eps
    bound = max(2 * largest_error(theirs, exact), 4 * eps * float(exact.abs().max()))
    assert largest_error(out, exact) <= bound


def descriptors() -> int:
    """How many backwards went through descriptors so far; skips where a card has none."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor descriptors are plain loads before sm_90")
    return count("triton-tma-backward")


def has_gradient_tiles(dim: int) -> bool:
    return ladder_for_tma_bwd(torch.cuda.get_device_capability(), dim, dim, torch.half) is not None


@pytest.mark.parametrize("dtype", [torch.float16, slow(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("times", [1.0, slow(6.0)])
@pytest.mark.parametrize("lengths", [(1024, 1024), (1001, 1003), (130, 3), (4096, 77)], ids=str)
@pytest.mark.parametrize("dim", [40, 64, 80, 128])
def test_gradients_through_descriptors(
    dim: int, lengths: tuple[int, int], times: float, dtype: torch.dtype
) -> None:
    before = descriptors()
    if not has_gradient_tiles(dim):
        pytest.skip("no tile of this head dim is clean on this card")
    q, k, v = random_inputs(2, *lengths, 3, dim, dtype=dtype, device=GPU)
    check((q * times, k, v), op=("triton", "triton-tma"))
    assert count("triton-tma-backward") == before + 2


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "shape",
    [shape for shape in SHAPES if shape[5] in (40, 64) and not shape[6]],
    ids=lambda s: s[0],
)
def test_real_shapes_take_descriptors_by_themselves(
    shape: tuple[Any, ...], dtype: torch.dtype
) -> None:
    before = descriptors()
    _, batch, queries, keys, heads, dim, _ = shape
    check(random_inputs(batch, queries, keys, heads, dim, dtype=dtype, device=GPU))
    assert count("triton-tma-backward") == before + 2


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_candidate_of_the_gradients_through_descriptors(dtype: torch.dtype) -> None:
    from sdx_kernels._triton.attention_tma_bwd_launch import launch_attention_tma_bwd

    descriptors()
    card = torch.cuda.get_device_capability()
    for dim in (40, 64, 80, 128):
        q, k, v = random_inputs(1, 301, 333, 2, dim, dtype=dtype, device=GPU)
        grad = torch.randn(q.shape, device=GPU).to(dtype)
        out, lse = attention_forward(q, k, v, scale=dim**-0.5)
        exact, theirs = (kind((q, k, v), None, grad)[1:] for kind in (truth, peer))
        for name, ladder in candidates(card, dim, dim, dtype).items():
            found = launch_attention_tma_bwd(
                grad, q, k, v, out, lse, scale=dim**-0.5, ladder=ladder
            )[:3]
            for one, right, other in zip(found, exact, theirs, strict=True):
                eps = 4 * torch.finfo(dtype).eps * float(right.abs().max())
                bound = max(3 * largest_error(other, right), eps)
                assert largest_error(one, right) <= bound, (name, dim)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_views_and_grouped_heads_through_descriptors(dtype: torch.dtype) -> None:
    before = descriptors()
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn(2, 333, 3, 4, 64, generator=generator).to(GPU, dtype)
    q, k, v = fused.unbind(2)
    leaves = [t.detach().requires_grad_() for t in (q, k[:, :, :2], v[:, :, :2])]

    def gradients(kind: torch.dtype, op: Any) -> tuple[torch.Tensor, ...]:
        a, b, c = (t.detach().to(kind).requires_grad_() for t in leaves)
        # [B, M, G, H, K]: two query heads share a key head
        d, e = (t.unsqueeze(3).expand(-1, -1, -1, 2, -1) for t in (b, c))
        out = memory_efficient_attention(a.view(2, 333, 2, 2, 64), d, e, op=op)
        return torch.autograd.grad(out.float().square().sum(), (a, b, c))

    found = gradients(dtype, "triton")
    assert count("triton-tma-backward") == before + 1
    for ours, right in zip(found, gradients(torch.float64, "reference"), strict=True):
        assert largest_error(ours, right) <= 16 * torch.finfo(dtype).eps * float(right.abs().max())


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_wide_rows_through_descriptors(dtype: torch.dtype) -> None:
    before = descriptors()
    # scores have a deviation of 900: most rows' largest is one whose weights need their tail
    q, k, v = random_inputs(1, 301, 333, 2, 64, dtype=dtype, device=GPU)
    check((q * 30, k * 30, v), op=("triton", "triton-tma"))
    assert count("triton-tma-backward") == before + 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_drops_the_same_weights_as_the_reference(dtype: torch.dtype) -> None:
    tensors = random_inputs(2, 129, 257, 3, 64, dtype=dtype, device=GPU)
    mask, p = LowerTriangularFromBottomRightMask(), 0.3
    torch.manual_seed(5)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=GPU)
    kept = keep_mask(seed, 2, 3, range(129), range(257), p).double() / (1 - p)
    allowed = mask.allowed((2, 3, 129, 257), GPU)

    def by_hand(kind: torch.dtype) -> tuple[torch.Tensor, ...]:
        wide = torch.promote_types(kind, torch.float32)
        q, k, v = (t.detach().to(kind).requires_grad_() for t in tensors)
        scores = torch.einsum("bmhk,bnhk->bhmn", q, k).to(wide) * q.shape[-1] ** -0.5
        weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1) * kept.to(wide)
        out = torch.einsum("bhmn,bnhk->bmhk", weights.to(kind), v)
        return out.detach(), *torch.autograd.grad(out.to(wide).square().sum(), (q, k, v))

    torch.manual_seed(5)
    q, k, v = (t.clone().requires_grad_() for t in tensors)
    out = memory_efficient_attention(q, k, v, mask, p, op="triton")
    found = out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))
    rows = zip(found, by_hand(torch.float64), by_hand(dtype), strict=True)
    for index, (ours, exact, theirs) in enumerate(rows):
        factor = 3.0 if index else 2.0
        eps = torch.finfo(dtype).eps
        bound = max(factor * largest_error(theirs, exact), 4 * eps * float(exact.abs().max()))
        assert largest_error(ours, exact) <= bound, index


@pytest.mark.parametrize("op", ["triton-short", "triton-tma"])
def test_a_launch_that_is_known_takes_new_tensors(op: str) -> None:
    if op == "triton-tma" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor descriptors are plain loads before sm_90")
    keys = 77 if op == "triton-short" else 1024
    for seed in range(3):
        q, k, v = random_inputs(2, 1024, keys, 5, 64, dtype=torch.bfloat16, device=GPU, seed=seed)
        for scale in (None, 0.5):
            with torch.no_grad():
                found = [attend(q, k, v, scale=scale, op=op)[0] for _ in range(2)]
            exact = attend(q.double(), k.double(), v.double(), scale=scale, op="reference")[0]
            theirs = attend(q, k, v, scale=scale, op="sdpa")[0]
            eps = torch.finfo(q.dtype).eps
            bound = max(2 * largest_error(theirs, exact), 4 * eps * float(exact.abs().max()))
            assert torch.equal(*found)
            assert largest_error(found[0], exact) <= bound


def test_a_graph_replays_forward_and_backward_with_new_dropout() -> None:
    q, k, v = (
        t.requires_grad_()
        for t in random_inputs(1, 256, 256, 2, 64, dtype=torch.float16, device=GPU)
    )

    def step() -> torch.Tensor:
        return memory_efficient_attention(q, k, v, LowerTriangularMask(), 0.5, op="triton")

    step().sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = step()
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
    assert first.isfinite().all()
