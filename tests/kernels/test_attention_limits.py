"""What gradients, spoilt rows, dynamic sizes and memory must not do, whatever runs."""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from sdx_kernels import (
    AttentionBias,
    BlockDiagonalMask,
    KeyPaddingMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward_requires_grad,
)
from sdx_kernels.checks import Dropout
from sdx_kernels.reference import structures
from sdx_kernels.reference.attention_chunks import attention_backward, attention_forward
from sdx_kernels.reference.structures import Structure
from sdx_kernels.testing import assert_close, largest_error, random_inputs, reference64

Run = Callable[..., torch.Tensor]

#: the interpreter computes with numpy, which warns of the NaN that some tests are about
numpy_warns = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [40, 80, 160])
def test_case_013_gradients_at_head_dims_of_sd15(
    run: Run, head_dim: int, dtype: torch.dtype
) -> None:
    # the interpreter takes a second for every 100 programs
    heads = 1 if run.__name__ == "triton_call" else 8
    inputs = random_inputs(1, 65, 77, heads, head_dim, dtype=dtype)
    leaves = [t.clone().requires_grad_() for t in inputs]
    truth = [t.double().requires_grad_() for t in inputs]
    grad = torch.randn(inputs[0].shape, generator=torch.manual_seed(4)).to(dtype)
    found = torch.autograd.grad(run(*leaves), leaves, grad)
    expected = torch.autograd.grad(reference64(*truth), truth, grad.double())
    for ours, right in zip(found, expected, strict=True):
        limit = 1e-4 if dtype == torch.float32 else 5e-3
        assert_close(ours, right, limit=limit * max(1.0, right.abs().max().item()))


def test_case_027_a_strided_gradient(run: Run) -> None:
    inputs = random_inputs(1, 17, 20, 2, 40)
    grad = torch.randn(1, 2, 40, 34, generator=torch.manual_seed(4))[..., ::2].permute(0, 3, 1, 2)
    leaves = [t.clone().requires_grad_() for t in inputs]
    truth = [t.double().requires_grad_() for t in inputs]
    found = torch.autograd.grad(run(*leaves), leaves, grad)
    expected = torch.autograd.grad(reference64(*truth), truth, grad.double())
    for ours, right in zip(found, expected, strict=True):
        assert_close(ours, right, limit=1e-4)


def test_case_054_free_memory_does_not_part_the_work(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter([8 << 30, 1 << 30] * 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (next(asked), 16 << 30))
    q, k, v = random_inputs(1, 40, 40, 1, 16)
    grads = []
    for wrapped in (False, True):
        leaf = q.clone().requires_grad_()
        call = (leaf, k, v, LowerTriangularMask())
        out = checkpoint(run, *call, use_reentrant=False) if wrapped else run(*call)
        grads.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    assert torch.equal(*grads)
    assert next(asked) == 8 << 30


@pytest.mark.parametrize("op", [None, "reference", "triton"])
def test_each_copy_of_an_expanded_key_head_has_its_own_gradient(
    interpreter: None, op: str | None
) -> None:
    q, narrow_k, narrow_v = (
        torch.randn(1, n, 2, heads, 8) for n, heads in ((5, 3), (7, 1), (7, 1))
    )
    wide = (1, 7, 2, 3, 8)
    leaves = [
        t.detach().requires_grad_() for t in (q, narrow_k.expand(wide), narrow_v.expand(wide))
    ]
    truth = [t.detach().double().requires_grad_() for t in leaves]
    out = memory_efficient_attention(*leaves, op=op)
    expected = reference64(*(t.flatten(2, 3) for t in truth)).unflatten(2, (2, 3))
    assert_close(out, expected)
    grad = torch.randn_like(out)
    pairs = zip(
        torch.autograd.grad(out, leaves, grad),
        torch.autograd.grad(expected, truth, grad.double()),
        strict=True,
    )
    for ours, right in pairs:
        assert_close(ours, right, limit=1e-5)


SPOILABLE: list[AttentionBias] = [
    LowerTriangularMask(),
    LocalAttentionFromBottomRightMask(1, 1),
    BlockDiagonalMask.from_seqlens((5, 3), (6, 2)),
]


@numpy_warns
@pytest.mark.parametrize("which", ["query", "key", "value", "grad"])
@pytest.mark.parametrize("mask", SPOILABLE, ids=lambda mask: type(mask).__name__)
@pytest.mark.parametrize("op", ["reference", "triton"])
def test_a_spoilt_row_reaches_only_keys_that_it_attends(
    interpreter: None, op: str, mask: AttentionBias, which: str
) -> None:
    attended = mask.allowed((8, 8))
    names = ("query", "key", "value", "grad")
    tensors = [*random_inputs(1, 8, 8, 2, 16), torch.randn(1, 8, 2, 16)]

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in tensors[:3]]
        out = memory_efficient_attention(*leaves, mask, op=op)
        return torch.autograd.grad(out, leaves, tensors[3])

    clean = gradients()
    of_keys = which in ("key", "value")
    place = 6 if of_keys else 4
    tensors[names.index(which)][:, place] = math.nan
    rows = attended[:, place] if of_keys else torch.arange(8) == place
    keys = attended[rows].any(0)
    dq, dk, dv = gradients()
    assert largest_error(dq[:, ~rows], clean[0][:, ~rows]) < 1e-6
    for ours, right in ((dk, clean[1]), (dv, clean[2])):
        assert largest_error(ours[:, ~keys], right[:, ~keys]) < 1e-6
    assert dq[:, rows].isnan().any()


@numpy_warns
def test_scores_of_1e10_that_two_passes_round_apart_keep_gradients_finite(
    interpreter: None,
) -> None:
    q, k, v = random_inputs(1, 32, 40, 1, 40)
    q, k = q * 1e5, k * 1e5
    out, lse = memory_efficient_attention_forward_requires_grad(q, k, v, op="reference")
    # a few units in the last place, by which another order of sums may differ
    for off in (-3000.0, 0.0, 3000.0):
        grads = memory_efficient_attention_backward(v[:, :32], out, lse + off, q, k, v, op="triton")
        assert all(gradient.isfinite().all() for gradient in grads)


def masks_of(queries: int, keys: int) -> dict[str, Any]:
    packed = BlockDiagonalMask.from_seqlens((3, queries - 3), (3, keys - 3))
    return {
        "none": None,
        "tensor": torch.linspace(-1, 1, queries * keys).reshape(queries, keys),
        "causal": LowerTriangularMask(),
        "causal-end": LowerTriangularFromBottomRightMask(),
        "window": LocalAttentionFromBottomRightMask(2, 1),
        "keys": KeyPaddingMask(torch.arange(keys)[None] < keys - 4),
        "triangle-tensor": LowerTriangularMask().add_bias(torch.ones(queries, keys).triu()),
        "packed": packed,
        "packed-window": packed.make_local_attention(2),
    }


@pytest.mark.parametrize(
    ("op", "name", "dynamic"),
    [
        *((None, name, True) for name in masks_of(9, 11)),
        *(("triton", name, True) for name in ("none", "tensor", "packed-window")),
        (None, "none", None),
        ("triton", "none", None),
    ],
    ids=str,
)
def test_case_058_sizes_may_stay_dynamic_in_one_graph(
    interpreter: None, op: str | None, name: str, dynamic: bool | None
) -> None:
    def call(*args: Any) -> torch.Tensor:
        return memory_efficient_attention(*args, op=op)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for queries in (9, 10):
        mask = masks_of(queries, queries + 2)[name]
        inputs = random_inputs(1, queries, queries + 2, 1, 16)
        results = []
        for function in (compiled, call):
            leaves = [t.clone().requires_grad_() for t in inputs]
            out = function(*leaves, mask)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for ours, right in zip(*results, strict=True):
            torch.testing.assert_close(ours, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("op", [None, "triton", "reference"])
def test_case_057_the_operator_breaks_no_graph(interpreter: None, op: str | None) -> None:
    q, k, v = random_inputs(1, 9, 11, 1, 16)

    def call(query: torch.Tensor, mask: Any) -> torch.Tensor:
        return memory_efficient_attention(query * 2, k, v, mask, op=op) + 1

    for mask in masks_of(9, 11).values():
        torch._dynamo.reset()
        found = torch._dynamo.explain(call)(q, mask)
        assert found.graph_break_count == 0, found.break_reasons
        assert found.graph_count == 1


def test_case_056_the_first_call_of_a_process_may_be_a_compiled_one() -> None:
    code = """
import torch
from sdx_kernels import LowerTriangularMask, memory_efficient_attention
q = torch.randn(1, 9, 2, 16)
call = torch.compile(memory_efficient_attention, fullgraph=True, backend="eager")
for mask in (None, LowerTriangularMask()):
    out = call(q, q, q, mask)
    assert (out - memory_efficient_attention(q, q, q, mask)).abs().max() < 1e-6
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


class Peak(TorchDispatchMode):
    """Most bytes that tensors made under it hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                del storage
        self._held = {key: pair for key, pair in self._held.items() if not pair[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._held.values()))
        return result


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("packed", [False, True])
def test_a_slice_holds_few_matrices_of_its_scores(
    packed: bool, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, rows = 512, 32
    limit = 2 * length * rows
    # as in production: a draw's share of a slice
    monkeypatch.setattr(structures, "MAX_DRAWS", limit // 16)
    q, k, v = random_inputs(1, length, length, 2, 1)
    blocks = BlockDiagonalMask.from_seqlens((128,) * 4).make_causal()
    structure = Structure(
        band=blocks.band if packed else None,
        packed=blocks.packed("cpu") if packed else None,
        dropout=Dropout(p, torch.tensor([5])) if p else None,
    )
    rest: dict[str, Any] = {"scale": 1.0, "structure": structure, "limit": limit}
    with Peak() as forward:
        attention_forward(q, k, v, **rest)
    with Peak() as backward:
        attention_backward(q, q, k, v, **rest)
    matrix = 4 * limit
    assert 2 * matrix < forward.bytes < 5 * matrix
    assert 2 * matrix < backward.bytes < 6 * matrix


def test_draws_do_not_depend_on_how_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockDiagonalMask.from_seqlens((4, 0, 5), (3, 2, 8))
    for structure in (
        Structure(dropout=Dropout(0.4, torch.tensor([5]))),
        Structure(dropout=Dropout(0.4, torch.tensor([5])), packed=blocks.packed("cpu")),
    ):
        call = (slice(0, 1), slice(2, 9), 2, 13, torch.device("cpu"))
        whole = structure.keep(*call)
        monkeypatch.setattr(structures, "MAX_DRAWS", 60)
        parts = structure.keep(*call)
        monkeypatch.undo()
        assert whole is not None
        assert parts is not None
        assert torch.equal(whole, parts)


@pytest.mark.parametrize("kind", ["band", "keys", "packed"])
def test_slices_of_a_structure_are_those_of_the_whole(kind: str) -> None:
    batch = 1 if kind == "packed" else 3
    q, k, v = random_inputs(batch, 9, 11, 2, 8, dtype=torch.float64)
    blocks = BlockDiagonalMask.from_seqlens((4, 5), (3, 8)).make_local_attention(2)
    structure = {
        "band": Structure(band=LocalAttentionFromBottomRightMask(2, 1).band),
        "keys": Structure(key_mask=torch.rand(3, 11, generator=torch.manual_seed(2)) > 0.4),
        "packed": Structure(band=blocks.band, packed=blocks.packed("cpu")),
    }[kind]
    rest: dict[str, Any] = {"scale": 0.3, "structure": structure}
    # one row of one item at a time, and whole items
    for limit in (1, 2 * 9 * 11):
        for function, own in ((attention_forward, (q, k, v)), (attention_backward, (q, q, k, v))):
            whole, parts = function(*own, **rest), function(*own, **rest, limit=limit)
            for one, other in zip(whole, parts, strict=True):
                if one is not None:
                    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
