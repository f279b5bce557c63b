"""Biases and masks: broadcasting, alignment, rows with nothing to attend, structures."""

import math
from collections.abc import Callable

import pytest
import torch

from sdx_kernels import (
    AttentionBias,
    BlockDiagonalMask,
    InvalidInputs,
    KeyPaddingMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    attend,
    explain,
)
from sdx_kernels.testing import (
    ODD_LENGTHS,
    assert_close,
    math_peer,
    poisoned_empty,
    random_inputs,
    reference64,
)

Run = Callable[..., torch.Tensor]

#: the interpreter computes with numpy, which warns of the infinities and NaN that these tests are
#: about; a GPU does not
numpy_warns = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def check(
    run: Run,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bias: torch.Tensor | AttentionBias,
) -> torch.Tensor:
    with poisoned_empty():
        out = run(*inputs, attn_bias=bias)
    assert_close(out, reference64(*inputs, bias))
    return out


@pytest.mark.parametrize("keys", ODD_LENGTHS)
def test_case_001_bias_of_any_key_length(run: Run, keys: int) -> None:
    inputs = random_inputs(2, 16, keys, 4, 64, dtype=torch.float16)
    bias = torch.randn(2, 4, 16, keys).half()
    out = check(run, inputs, bias)
    assert_close(out, reference64(*inputs, bias), peer=math_peer(*inputs, bias))


@pytest.mark.parametrize("keys", [64, 67, 70, 72])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_case_003_masked_text_of_any_length(keys: int, dtype: torch.dtype) -> None:
    inputs = random_inputs(2, 35, keys, 8, 64, dtype=dtype)
    mask = torch.zeros(2, 1, 1, keys, dtype=dtype)
    mask[..., -11:] = -10000
    out, _ = attend(*inputs, attn_bias=mask)
    assert_close(out, reference64(*inputs, mask))
    cropped, _ = attend(inputs[0], inputs[1][:, :-11], inputs[2][:, :-11])
    assert_close(out, cropped.double())


@pytest.mark.parametrize(
    "shape",
    [
        (23,),
        (17, 1),
        (17, 23),
        (4, 1, 23),
        (1, 1, 1, 23),
        (2, 1, 1, 23),
        (1, 4, 17, 1),
        (2, 4, 17, 23),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["float", "bool"])
def test_any_bias_broadcasts(run: Run, shape: tuple[int, ...], kind: str) -> None:
    torch.manual_seed(0)
    bias = torch.randn(shape) if kind == "float" else torch.rand(shape) > 0.3
    check(run, random_inputs(2, 17, 23, 4, 40), bias)


@pytest.mark.parametrize("kind", ["bool", "-inf", "mixed"])
@pytest.mark.parametrize("keys", [6, 100])
def test_case_007_a_row_with_nothing_to_attend_is_zero(run: Run, kind: str, keys: int) -> None:
    q, k, v = (t.requires_grad_() for t in random_inputs(1, 4, keys, 2, 8))
    mask: torch.Tensor = torch.ones(4, keys, dtype=torch.bool)
    mask[1] = False
    if kind != "bool":
        mask = torch.zeros(4, keys).masked_fill(~mask, -math.inf)
    if kind == "mixed":
        # the first block of keys masked for a row that has something later
        mask[2, : keys - 2] = -math.inf
    out = run(q, k, v, attn_bias=mask)
    assert torch.equal(out[:, 1], torch.zeros_like(out[:, 1]))
    assert_close(out.detach(), reference64(q, k, v, mask).detach())
    out.square().sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))
    assert q.grad is not None
    assert torch.equal(q.grad[:, 1], torch.zeros_like(q.grad[:, 1]))


def test_case_007_all_rows_masked(run: Run) -> None:
    q, k, v = (t.requires_grad_() for t in random_inputs(1, 4, 6, 2, 8))
    out = run(q, k, v, attn_bias=torch.zeros(4, 6, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))


@numpy_warns
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("floor", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_finfo_min(run: Run, dtype: torch.dtype, floor: torch.dtype) -> None:
    inputs = random_inputs(1, 5, 70, 2, 16, dtype=dtype)
    bias = torch.zeros(5, 70, dtype=floor)
    bias[1] = torch.finfo(floor).min
    bias[2, :69] = torch.finfo(floor).min
    out = run(*inputs, attn_bias=bias)
    # −65504 leaves a score 8 bits after the point in fp32: the truth is the fp32 equation itself
    limit = 4e-3 if floor == torch.float16 else None
    assert_close(out, reference64(*inputs, bias), limit=limit)
    if floor != torch.float16:
        mean = inputs[2].double().mean(1)
        assert (out[:, 1].double() - mean).abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["float", "bool"])
def test_case_009_nan_in_a_key_that_a_tensor_masks_shows(run: Run, kind: str) -> None:
    mask = torch.ones(5, 9, dtype=torch.bool)
    mask[2, 4] = False
    bias = mask if kind == "bool" else torch.zeros(5, 9).masked_fill(~mask, -math.inf)
    for index in (1, 2):
        inputs = random_inputs(1, 5, 9, 1, 16)
        inputs[index][:, 4] = math.nan
        assert run(*inputs, attn_bias=bias).isnan().all()
        assert attend(*inputs, attn_bias=bias, op="reference")[0].isnan().all()


@pytest.mark.parametrize("lengths", [(2, 4), (33, 77), (77, 33), (70, 70), (130, 130)], ids=str)
@pytest.mark.parametrize("mask", [LowerTriangularMask(), LowerTriangularFromBottomRightMask()])
def test_triangles(run: Run, mask: LowerTriangularMask, lengths: tuple[int, int]) -> None:
    queries, keys = lengths
    inputs = random_inputs(2, queries, keys, 2, 40)
    out = check(run, inputs, mask)
    dense = mask.materialize((2, 2, queries, keys))
    assert_close(out, reference64(*inputs, dense))
    assert torch.equal(dense[0, 0], mask.allowed((queries, keys)).float().log())


def test_triangles_are_aligned_as_named() -> None:
    top = LowerTriangularMask().allowed((2, 4)).int().tolist()
    bottom = LowerTriangularFromBottomRightMask().allowed((2, 4)).int().tolist()
    assert top == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert bottom == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_triangle_plus_tensor(run: Run) -> None:
    inputs = random_inputs(2, 77, 77, 3, 64)
    padding = torch.ones(2, 1, 1, 77, dtype=torch.bool)
    padding[1, ..., 40:] = False
    for bias in (torch.randn(3, 77, 77), padding):
        both = LowerTriangularMask().add_bias(bias)
        assert isinstance(both, LowerTriangularMaskWithTensorBias)
        out = check(run, inputs, both)
        dense = both.materialize((2, 3, 77, 77))
        assert_close(out, reference64(*inputs, dense))


@numpy_warns
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("length", [40, 150])
def test_keys_beyond_the_diagonal_never_leak(run: Run, length: int, poison: float) -> None:
    for index in (1, 2):
        inputs = random_inputs(1, length, length, 2, 16)
        clean = run(*inputs, attn_bias=LowerTriangularMask())
        inputs[index][:, 30] = poison
        out = run(*inputs, attn_bias=LowerTriangularMask())
        assert torch.equal(out[:, :30], clean[:, :30])
        if poison != poison:
            assert out[:, 30:].isnan().all()


def test_key_padding_equals_cropping_and_never_leaks(run: Run) -> None:
    inputs = random_inputs(2, 19, 77, 2, 40)
    mask = torch.ones(2, 77, dtype=torch.bool)
    mask[0, 12:], mask[1, 50:] = False, False
    for index in (1, 2):
        inputs[index].masked_fill_(~mask[:, :, None, None], math.nan)
    out = run(*inputs, attn_bias=KeyPaddingMask(mask))
    for item, keys in ((0, 12), (1, 50)):
        q, k, v = (t[item : item + 1] for t in inputs)
        assert_close(out[item : item + 1], reference64(q, k[:, :keys], v[:, :keys]))
    dense = KeyPaddingMask(mask).materialize((2, 2, 19, 77))
    assert torch.equal(dense == 0, mask[:, None, None].expand(2, 2, 19, 77))
    with pytest.raises(InvalidInputs, match="bool tensor"):
        KeyPaddingMask(mask.float())


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_attend_only_themselves(run: Run, causal: bool) -> None:
    q_lengths, k_lengths = (5, 1, 20), (7, 3, 11)
    mask: BlockDiagonalMask = BlockDiagonalMask.from_seqlens(q_lengths, k_lengths)
    mask = mask.make_causal() if causal else mask
    q, k, v = random_inputs(1, 26, 21, 2, 16)
    v[:, 7] = math.nan
    out = run(q, k, v, attn_bias=mask)
    assert f"attn_bias type is {type(mask).__name__}" in explain(q, k, v, mask)["triton-wide"]
    parts = zip(mask.split(out), mask.split(q), mask.split_kv(k), mask.split_kv(v), strict=True)
    for part, q_part, k_part, v_part in parts:
        alone = reference64(q_part, k_part, v_part, LowerTriangularMask() if causal else None)
        assert_close(part, alone)
    with pytest.raises(InvalidInputs, match="26 queries"):
        attend(q[:, :20], k, v, mask)


def test_tensors_are_packed_for_a_block_diagonal_mask() -> None:
    first, second = torch.randn(2, 3, 1, 4), torch.randn(1, 5, 1, 4)
    mask, packed = BlockDiagonalMask.from_tensor_list([first, second])
    assert packed.shape == (1, 11, 1, 4)
    assert mask.query_lengths == (3, 3, 5)
    assert torch.equal(mask.split(packed)[1], first[1:])


def test_parameters_and_subclasses_are_biases_too(run: Run) -> None:
    class Mine(LowerTriangularMask):
        pass

    inputs = random_inputs(1, 9, 9, 2, 16)
    check(run, inputs, torch.nn.Parameter(torch.randn(9, 9), requires_grad=False))
    check(run, inputs, Mine())


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (torch.zeros(2, 1, 1, 4), "7 keys, not 4"),
        (torch.zeros(3, 1, 1, 7), "(2, 4, 5)"),
        (torch.zeros(2, 4, 5, 7, dtype=torch.long), ".bool()"),
        ("causal", "bias classes"),
    ],
)
def test_case_012_a_bias_that_does_not_fit_names_both_sizes(bias: object, words: str) -> None:
    inputs = random_inputs(2, 5, 7, 4, 8)
    with pytest.raises(InvalidInputs) as error:
        attend(*inputs, attn_bias=bias)  # type: ignore[arg-type]
    assert words in str(error.value)
