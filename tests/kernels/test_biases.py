"""Every mask class means what its name says: against loops over single queries and keys."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from sdx_kernels import (
    AttentionBias,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalMask,
    InvalidInputs,
    KeyPaddingMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    attend,
    memory_efficient_attention,
)
from sdx_kernels.checks import attention_inputs
from sdx_kernels.ops.attention_impls import structure_of
from sdx_kernels.testing import assert_close, random_inputs, reference64

#: lengths of packed queries and keys; one sequence has no queries, one no keys
QUERIES, KEYS = (3, 0, 5, 2), (4, 2, 5, 0)

Run = Callable[..., torch.Tensor]
Rule = Callable[[int, int, int, int], bool]

#: (mask, whether query i of M attends key j of N)
RULES: dict[str, tuple[AttentionBias, Rule]] = {
    "causal": (LowerTriangularMask(), lambda i, j, m, n: j <= i),
    "causal-end": (LowerTriangularFromBottomRightMask(), lambda i, j, m, n: j <= i + n - m),
    "causal-end-window": (
        LowerTriangularFromBottomRightMask().make_local_attention(3),
        lambda i, j, m, n: i + n - m - 3 < j <= i + n - m,
    ),
    "window": (
        LocalAttentionFromBottomRightMask(2, 1),
        lambda i, j, m, n: i + n - m - 2 <= j <= i + n - m + 1,
    ),
}

BLOCKS = BlockDiagonalMask.from_seqlens(QUERIES, KEYS)
GROWING = BlockDiagonalMask.from_seqlens((3, 1, 5), (4, 2, 5))
PACKED: dict[str, tuple[BlockDiagonalMask, Rule]] = {
    "blocks": (BLOCKS, lambda i, j, m, n: True),
    "blocks-causal": (BLOCKS.make_causal(), lambda i, j, m, n: j <= i),
    "blocks-causal-end": (
        GROWING.make_causal_from_bottomright(),
        lambda i, j, m, n: j <= i + n - m,
    ),
    "blocks-window": (BLOCKS.make_local_attention(2), lambda i, j, m, n: i - 2 < j <= i),
    "blocks-window-end": (
        BLOCKS.make_local_attention_from_bottomright(2),
        lambda i, j, m, n: i + n - m - 2 < j <= i + n - m,
    ),
}


def by_hand(rule: Rule, queries: int, keys: int) -> torch.Tensor:
    return torch.tensor(
        [[rule(i, j, queries, keys) for j in range(keys)] for i in range(queries)],
        dtype=torch.bool,
    ).reshape(queries, keys)


def packed_by_hand(mask: BlockDiagonalMask, rule: Rule) -> torch.Tensor:
    whole = torch.zeros(sum(mask.query_lengths), sum(mask.key_lengths), dtype=torch.bool)
    row = column = 0
    for queries, keys in zip(mask.query_lengths, mask.key_lengths, strict=True):
        whole[row : row + queries, column : column + keys] = by_hand(rule, queries, keys)
        row, column = row + queries, column + keys
    return whole


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("lengths", [(1, 1), (3, 7), (7, 3), (5, 5)], ids=str)
def test_bands(run: Run, name: str, lengths: tuple[int, int]) -> None:
    mask, rule = RULES[name]
    expected = by_hand(rule, *lengths)
    assert torch.equal(mask.allowed(lengths), expected)
    dense = mask.materialize((2, 3, *lengths))
    assert torch.equal(dense, torch.zeros(2, 3, *lengths).masked_fill(~expected, -torch.inf))
    inputs = random_inputs(2, *lengths, 2, 8)
    assert_close(run(*inputs, attn_bias=mask), reference64(*inputs, expected[None, None]))


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(run: Run, name: str) -> None:
    mask, rule = PACKED[name]
    expected = packed_by_hand(mask, rule)
    assert torch.equal(mask.allowed(expected.shape), expected)
    q, k, v = random_inputs(1, *expected.shape, 2, 8)
    out = run(q, k, v, attn_bias=mask)
    assert_close(out, reference64(q, k, v, expected[None, None]))
    # each sequence by itself gives the same
    parts = zip(mask.split_queries(q), mask.split_kv(k), mask.split_kv(v), strict=True)
    for (one, keys, values), whole in zip(parts, mask.split(out), strict=True):
        alone = by_hand(rule, one.shape[1], keys.shape[1])[None, None]
        assert_close(whole, reference64(one, keys, values, alone))


@pytest.mark.parametrize("name", [*RULES, *PACKED])
def test_slices_of_a_structure_are_its_rows(name: str) -> None:
    mask, rule = (RULES | PACKED)[name]
    packed = isinstance(mask, BlockDiagonalMask)
    whole = packed_by_hand(mask, rule) if packed else by_hand(rule, 6, 9)
    structure = structure_of(attention_inputs(*random_inputs(1, *whole.shape, 1, 4), mask))
    assert structure is not None
    for start in range(0, whole.shape[0], 2):
        rows = slice(start, min(start + 2, whole.shape[0]))
        part = structure.keys_of(slice(0, 1), rows, *whole.shape, torch.device("cpu"))
        assert part is not None
        assert torch.equal(part[0, 0], whole[rows])


def test_tensors_are_packed_and_parted() -> None:
    tensors = [torch.randn(2, 3, 4), torch.randn(1, 5, 4)]
    mask, packed = BlockDiagonalMask.from_tensor_list(tensors)
    assert mask.query_lengths == (3, 3, 5)
    assert torch.equal(torch.cat(mask.split(packed), 1), packed)
    mask, q, k, v = BlockDiagonalMask.from_tensor_lists_qkv(tensors, tensors[::-1], tensors)
    assert mask.key_lengths == (5, 3, 3)
    assert v is not None
    assert (q.shape, k.shape, v.shape) == ((1, 11, 4),) * 3


def test_wrong_lengths_are_named() -> None:
    q, k, v = random_inputs(1, 11, 11, 1, 8)
    with pytest.raises(InvalidInputs, match="the blocks hold 9 queries and 11 keys, the inputs 11"):
        memory_efficient_attention(q, k, v, GROWING)
    with pytest.raises(InvalidInputs, match="a batch of one; got a batch of 2"):
        memory_efficient_attention(*random_inputs(2, 9, 11, 1, 8), GROWING)
    with pytest.raises(
        InvalidInputs, match="3 queries and 2 keys cannot be causal from the bottom"
    ):
        BlockDiagonalCausalFromBottomRightMask((3,), (2,))
    with pytest.raises(InvalidInputs, match="window of 0 keys: pass at least 1"):
        LowerTriangularFromBottomRightLocalAttentionMask(0)
    with pytest.raises(InvalidInputs, match="window of 0 keys"):
        GROWING.make_local_attention(0)
    with pytest.raises(InvalidInputs, match="does not fit"):
        memory_efficient_attention(q, k, v, KeyPaddingMask(torch.ones(1, 7, dtype=torch.bool)))


def test_a_mask_is_copied_and_pickled_without_its_device_copies() -> None:
    mask = BLOCKS.make_local_attention(2)
    starts = mask.packed("cpu")
    assert mask.packed("cpu") is starts
    for twin in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert twin == mask
        assert twin.packed("cpu") is not starts
        assert torch.equal(twin.packed("cpu").key_starts, starts.key_starts)


def test_a_callers_own_structure_runs_through_the_reference() -> None:
    class Even(AttentionBias):
        def allowed(
            self, shape: tuple[int, ...], device: torch.device | str = "cpu"
        ) -> torch.Tensor:
            return (torch.arange(shape[-1], device=device) % 2 == 0).expand(shape[-2:])

    q, k, v = random_inputs(2, 5, 9, 2, 8)
    k[:, 1], v[:, 3] = torch.nan, torch.nan
    out, choice = attend(q.requires_grad_(), k, v, Even())
    assert choice.name == "reference"
    assert any("Even, not one of sdx_kernels'" in reason for reason in choice.reasons["triton"])
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    assert_close(out.detach(), reference64(q.detach(), k[:, ::2], v[:, ::2]))
