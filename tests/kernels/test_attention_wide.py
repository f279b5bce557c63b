"""Wide heads against the equation in fp64, forward and backward: dims, lengths, masks, bits."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdx_kernels.bias import Band, Packed
from sdx_kernels.checks import Dropout
from sdx_kernels.errors import InvalidInputs, LaunchRefused
from sdx_kernels.reference.attention import attention
from sdx_kernels.testing import assert_close, at_end_of_nan, poisoned_empty, random_inputs
from sdx_kernels.tuning.attention_wide import (
    WideConfig,
    WideKind,
    WideOnePassConfig,
    candidates,
    scratch_slices,
    wide_grad_ladder_for,
    wide_ladder_for,
)

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
pytestmark = pytest.mark.usefixtures("interpreter")

#: the interpreter computes with numpy, which warns of the infinities of some tests
numpy_warns = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

HALF, FULL = torch.float16, torch.float32

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """One attention call with all that a wide head may take."""

    inputs: Inputs
    bias: torch.Tensor | None = None
    band: Band | None = None
    key_mask: torch.Tensor | None = None
    scale: float = 0.05

    @property
    def kind(self) -> WideKind:
        q, _, v = self.inputs
        band = self.band or Band()
        return WideKind(
            q.shape[3],
            v.shape[3],
            q.dtype,
            None if self.bias is None else self.bias.dtype,
            band.left is not None,
            band.right is not None,
            self.key_mask is not None,
        )

    @property
    def biased(self) -> bool:
        """Whether there is a bias that has a gradient."""
        return self.bias is not None and self.bias.dtype != torch.bool

    @property
    def allowed(self) -> torch.Tensor | None:
        queries, keys = self.inputs[0].shape[1], self.inputs[1].shape[1]
        inside = None
        if self.band is not None:
            inside = self.band.allowed(queries, keys, "cpu")[None, None]
        if self.key_mask is not None:
            exists = self.key_mask[:, None, None, :]
            inside = exists if inside is None else inside & exists
        return inside

    @property
    def grad(self) -> torch.Tensor:
        q, _, v = self.inputs
        shape = (*q.shape[:3], v.shape[3])
        return torch.randn(shape, generator=torch.Generator().manual_seed(11)).to(q.dtype)

    def truth(self, grad: torch.Tensor, dtype: torch.dtype = torch.float64) -> list[Any]:
        """out, lse, dq, dk, dv and the bias's gradient or None, by autograd of the equation."""
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in self.inputs]
        bias = self.bias
        if bias is not None and bias.dtype != torch.bool:
            bias = bias.detach().to(dtype).requires_grad_()
            leaves.append(bias)
        out, lse = attention(*leaves[:3], scale=self.scale, bias=bias, allowed=self.allowed)
        grads = torch.autograd.grad(out, leaves, grad.to(dtype))
        return [out.detach(), lse.detach(), *grads, *[None] * (4 - len(grads))]

    def peer(self, grad: torch.Tensor) -> Results:
        """Torch's MATH attention and its gradients in the inputs' dtype, unmasked only."""
        leaves = [tensor.detach().clone().requires_grad_() for tensor in self.inputs]
        q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True)
        out = out.transpose(1, 2)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def forward(
    case: Case, config: WideConfig | WideOnePassConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    from sdx_kernels._triton.attention_wide_launch import launch_attention_wide_fwd

    with poisoned_empty():
        out, lse = launch_attention_wide_fwd(
            *case.inputs,
            case.bias,
            scale=case.scale,
            key_mask=case.key_mask,
            band=case.band,
            output_dtype=case.inputs[0].dtype,
            with_lse=True,
            ladder=wide_ladder_for((8, 6), case.kind) if config is None else (config,),
        )
    assert lse is not None
    assert out.is_contiguous()
    return out, lse


def backward(
    case: Case, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor | None = None
) -> list[Any]:
    from sdx_kernels._triton.attention_wide_launch import launch_attention_wide_bwd

    with poisoned_empty():
        grads = launch_attention_wide_bwd(
            case.grad if grad is None else grad,
            *case.inputs,
            out,
            lse,
            case.bias,
            scale=case.scale,
            key_mask=case.key_mask,
            band=case.band,
            bias_grad=True,
            ladder=wide_grad_ladder_for((8, 6), replace(case.kind, bias_grad=case.biased)),
        )
    for gradient, tensor in zip(grads, (*case.inputs, case.bias), strict=True):
        if gradient is not None and tensor is not None:
            assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
    return list(grads)


def check(
    case: Case, config: WideConfig | WideOnePassConfig | None = None, grads: bool = True
) -> list[Any]:
    """Output, LSE and gradients within the rule: twice (three times) MATH's error, or 4 eps."""
    right = case.truth(case.grad)
    plain = case.bias is None and case.allowed is None
    others: list[torch.Tensor | None] = [*case.peer(case.grad)] if plain else [None] * 4
    out, lse = forward(case, config)
    assert_close(out, right[0], peer=others[0])
    assert torch.equal(lse == -math.inf, right[1] == -math.inf)
    nothing = right[1] == -math.inf
    assert_close(lse.masked_fill(nothing, 0.0), right[1].masked_fill(nothing, 0.0), limit=1e-5)
    if not grads:
        return [out, lse]
    got = backward(case, out, lse)
    figure = 1e-4 if out.dtype == FULL else 1e-2
    for ours, truth, other in zip(got, right[2:], (*others[1:], None), strict=True):
        assert (ours is None) == (truth is None)
        if truth is not None:
            limit = figure * max(1.0, truth.abs().max().item())
            # one key: the truth is 0, and so is three times a peer's luck
            by_peer = other if truth.any() else None
            assert_close(ours, truth, peer=by_peer, factor=3.0, limit=limit)
    return [out, lse, *got]


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (257, HALF),
        (264, FULL),
        (300, HALF),
        (384, FULL),
        (512, HALF),
        (512, FULL),
        *(
            pytest.param(dim, dtype, marks=pytest.mark.slow)
            for dim, dtype in ((257, FULL), (264, HALF), (300, FULL), (384, HALF))
        ),
    ],
    ids=str,
)
def test_wide_dims(dim: int, dtype: torch.dtype) -> None:
    q, k, v = (at_end_of_nan(t) for t in random_inputs(1, 9, 35, 1, dim, dtype=dtype))
    check(Case((q, k, v), scale=dim**-0.5))


@pytest.mark.parametrize("dim", [130, pytest.param(160, marks=pytest.mark.slow)])
def test_fp32_from_129_dims(dim: int) -> None:
    check(Case(random_inputs(1, 9, 35, 1, dim), scale=dim**-0.5))


@pytest.mark.parametrize("dims", [(257, 40), (40, 300), (512, 1)], ids=str)
def test_value_dims_of_their_own(dims: tuple[int, int]) -> None:
    check(Case(random_inputs(1, 9, 35, 1, *dims, dtype=HALF)))


@pytest.mark.parametrize(("queries", "keys"), [(1, 77), (7, 33), (33, 7), (77, 1)])
def test_odd_lengths(queries: int, keys: int) -> None:
    check(Case(random_inputs(1, queries, keys, 1, 130, dtype=HALF)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
@pytest.mark.parametrize("queries", [1, 7, 33, 77, 129])
@pytest.mark.parametrize("keys", [1, 7, 33, 77, 129])
def test_all_odd_lengths(queries: int, keys: int, dtype: torch.dtype) -> None:
    check(Case(random_inputs(2, queries, keys, 2, 257, 300, dtype=dtype)))


@pytest.mark.parametrize("key_heads", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_grouped_heads(key_heads: int) -> None:
    q, k, v = random_inputs(1, 5, 9, 4, 130, 40, dtype=HALF)
    check(Case((q, k[:, :, :key_heads], v[:, :, :key_heads])))


def test_views_at_the_end_of_nan_and_with_strides_give_the_same_bits() -> None:
    plain = Case(random_inputs(1, 9, 21, 2, 130, dtype=HALF))
    out, lse = forward(plain)
    expected = [out, lse, *backward(plain, out, lse)[:3]]
    heads_first: Any = tuple(
        at_end_of_nan(tensor.transpose(1, 2).contiguous()).transpose(1, 2)
        for tensor in plain.inputs
    )
    case = replace(plain, inputs=heads_first)
    out, lse = forward(case)
    got = [out, lse, *backward(case, out, lse, at_end_of_nan(plain.grad))[:3]]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_strides_of_the_gradient() -> None:
    case = Case(random_inputs(1, 5, 9, 1, 130))
    out, lse = forward(case)
    for grad in (torch.ones(1, 1, 1, 1).expand(out.shape), case.grad.mT.contiguous().mT):
        expected = case.truth(grad)[2:5]
        for ours, right in zip(backward(case, out, lse, grad)[:3], expected, strict=True):
            assert_close(ours, right, limit=1e-5)


#: heads, and a bias that broadcasts in some way over 2 items, 9 queries and 21 keys
BIASES = {
    "float": (1, torch.randn(2, 1, 9, 21, generator=torch.manual_seed(5))),
    "of keys": (1, torch.randn(1, 1, 1, 21, generator=torch.manual_seed(6))),
    "of heads": (2, torch.randn(2, 1, 1, generator=torch.manual_seed(7))),
    "of rows": (1, torch.randn(2, 1, 9, 1, generator=torch.manual_seed(8))),
    "bool": (1, torch.rand(9, 21, generator=torch.manual_seed(9)) > 0.4),
}


@pytest.mark.parametrize("name", BIASES)
def test_biases(name: str) -> None:
    heads, bias = BIASES[name]
    inputs = random_inputs(2, 9, 21, heads, 130, dtype=HALF)
    check(Case(inputs, bias if bias.dtype == torch.bool else bias.half()))


BANDS = {
    "causal": (Band(right=0), 21, 21),
    "causal-end": (Band(right=0, from_end=True), 9, 21),
    "causal-tall": (Band(right=0, from_end=True), 21, 9),
    "window": (Band(5, 2, from_end=True), 21, 30),
    "left": (Band(left=3), 21, 21),
    "beyond": (Band(10**10, 10**10), 9, 21),
}


@pytest.mark.parametrize("name", BANDS)
def test_bands(name: str) -> None:
    band, queries, keys = BANDS[name]
    check(Case(random_inputs(1, queries, keys, 1, 130, dtype=HALF), band=band))


def test_key_masks() -> None:
    exists = torch.ones(2, 21, dtype=torch.bool)
    exists[0, 15:] = False
    exists[1, ::2] = False
    case = Case(random_inputs(2, 9, 21, 1, 130, dtype=HALF), key_mask=exists)
    out, _, _, dk, dv, _ = check(case)
    assert not dk[~exists].any()
    assert not dv[~exists].any()
    inputs = tuple(tensor[:1, :15] if i else tensor[:1] for i, tensor in enumerate(case.inputs))
    short, _ = forward(Case(inputs))  # type: ignore[arg-type]
    assert_close(out[:1], short.double(), limit=1e-3)


@pytest.mark.parametrize("dtype", [HALF, pytest.param(FULL, marks=pytest.mark.slow)], ids=str)
def test_all_masks_together(dtype: torch.dtype) -> None:
    exists = torch.rand(2, 45, generator=torch.manual_seed(3)) > 0.3
    bias = torch.randn(1, 2, 33, 45, generator=torch.manual_seed(4))
    q, k, v = random_inputs(2, 33, 45, 2, 130, dtype=dtype)
    band = Band(20, 9, from_end=True)
    check(Case((q, k[:, :, :1], v[:, :, :1]), bias.to(dtype), band, exists))


@pytest.mark.parametrize(
    "kind", ["bool", pytest.param("-inf", marks=pytest.mark.slow), "key mask", "band"]
)
def test_rows_with_nothing_to_attend_give_zero(kind: str) -> None:
    case = Case(random_inputs(2, 9, 9, 1, 130, dtype=HALF))
    mask = torch.ones(9, 9, dtype=torch.bool)
    mask[3] = False
    if kind == "bool":
        case = replace(case, bias=mask)
    elif kind == "-inf":
        case = replace(case, bias=torch.zeros(9, 9).masked_fill(~mask, -math.inf))
    elif kind == "key mask":
        nobody = torch.ones(2, 9, dtype=torch.bool)
        nobody[1] = False
        case = replace(case, key_mask=nobody)
    else:
        case = replace(case, band=Band(right=-4))
    out, lse, *grads = check(case)
    empty = (slice(1, 2),) if kind == "key mask" else (slice(None), slice(3, 4))
    assert not out[empty].any()
    assert not grads[0][empty].any()
    assert (lse[(empty[0], 0, *empty[1:])] == -math.inf).all()


@numpy_warns
@pytest.mark.parametrize("dtype", [HALF, pytest.param(FULL, marks=pytest.mark.slow)], ids=str)
def test_rows_of_finfo_min_are_means(dtype: torch.dtype) -> None:
    floor = torch.finfo(torch.float32).min
    bias = torch.zeros(5, 40)
    bias[1] = floor
    bias[2, :39] = floor
    case = Case(random_inputs(1, 5, 40, 2, 130, dtype=dtype), bias)
    out, lse = forward(case)
    mean = case.inputs[2].double().mean(1)
    assert_close(out[:, 1], mean, limit=2e-3 if dtype == HALF else 1e-6)
    grad = torch.zeros_like(out)
    grad[:, 1] = 1.0
    dq, dk, dv, dbias = backward(case, out, lse, grad)
    assert_close(dv, torch.full_like(dv, 1 / 40).double(), limit=2e-5)
    # the truth is fp32's: a score disappears beside finfo.min
    expected = case.truth(grad, torch.float32)
    for gradient, right in ((dq, expected[2]), (dbias, expected[5])):
        assert_close(gradient, right.double(), limit=2e-3 if dtype == HALF else 1e-5)
    assert_close(dk, expected[3].double(), limit=2e-3 if dtype == HALF else 1e-5)


@numpy_warns
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("structure", ["window", pytest.param("key mask", marks=pytest.mark.slow)])
def test_nan_in_an_excluded_key_reaches_nobody_else(structure: str, which: str) -> None:
    clean = Case(random_inputs(1, 21, 30, 1, 130, 40, dtype=HALF))
    if structure == "window":
        clean = replace(clean, band=Band(2, 2))
        hit_rows, hit_keys = range(8, 13), range(6, 15)
    else:
        exists = torch.ones(1, 30, dtype=torch.bool)
        exists[:, 10] = False
        clean = replace(clean, key_mask=exists)
        hit_rows, hit_keys = range(0), range(0)
    spoilt = [tensor.clone() for tensor in clean.inputs]
    spoilt[1 if which == "key" else 2][:, 10] = math.nan
    dirty = replace(clean, inputs=(spoilt[0], spoilt[1], spoilt[2]))
    # what a training step would send back: NaN wherever the output is NaN
    grad = clean.grad
    grad[:, list(hit_rows)] = math.nan
    expected = [*forward(clean)]
    expected += backward(clean, expected[0], expected[1])[:3]
    got = [*forward(dirty)]
    got += backward(dirty, got[0], got[1], grad)[:3]
    rows = torch.tensor([row not in hit_rows for row in range(21)])
    keys = torch.tensor([key not in hit_keys for key in range(30)])
    for i, good in ((0, rows), (2, rows), (3, keys), (4, keys)):
        assert torch.equal(got[i][:, good], expected[i][:, good])
        assert got[i][:, ~good].isnan().all()


@numpy_warns
def test_nan_in_a_key_that_a_bias_masks_reaches_the_row() -> None:
    case = Case(random_inputs(1, 3, 9, 1, 130), torch.ones(3, 9, dtype=torch.bool))
    assert case.bias is not None
    case.bias[1, 4] = False
    case.inputs[2][:, 4] = math.nan
    out, _ = forward(case)
    assert out.isnan().all()


def test_two_calls_give_the_same_bits() -> None:
    case = Case(random_inputs(1, 17, 40, 1, 130, dtype=HALF), torch.randn(17, 1))
    first, again = ((*out, *backward(case, *out)) for out in (forward(case), forward(case)))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_slices_of_a_scratch_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import sdx_kernels._triton.attention_wide_launch as module

    calls = []
    sliced: Any = scratch_slices

    def small(*arguments: Any, copies: int) -> Any:
        slices = sliced(*arguments, copies=copies, limit=copies * 2 * 33 * 10)
        calls.append(len(slices))
        return slices

    monkeypatch.setattr(module, "scratch_slices", small)
    exists = torch.rand(2, 33, generator=torch.manual_seed(3)) > 0.3
    bias = torch.randn(2, 1, 140, 1, generator=torch.manual_seed(4)).half()
    inputs = random_inputs(2, 140, 33, 1, 40, dtype=HALF)
    check(Case(inputs, bias, Band(20, 100), exists))
    check(Case(random_inputs(3, 5, 33, 1, 40, dtype=HALF)))
    assert calls == [4, 4, 2, 2]


@pytest.mark.parametrize("limit", [1, 10**5, 10**9])
@pytest.mark.parametrize("shape", [(3, 2, 300, 77), (2, 1, 128, 16384), (1, 8, 1, 1)], ids=str)
def test_slices_cover_every_row_once(shape: tuple[int, int, int, int], limit: int) -> None:
    seen = torch.zeros(shape[0], shape[2], dtype=torch.int)
    for items, rows in scratch_slices(*shape, HALF, 2, limit):
        seen[items, rows] += 1
        size = (items.stop - items.start) * (rows.stop - rows.start) * shape[1] * shape[3] * 4
        assert size <= limit or (items.stop - items.start == 1 and rows.stop - rows.start <= 128)
    assert (seen == 1).all()
    assert len(scratch_slices(1, 1, 16384, 16384, HALF, 2)) == 4


@pytest.mark.parametrize("hole", ["batch", "queries", "keys", "heads"])
def test_empty_tensors_give_zeros(hole: str) -> None:
    sizes: Any = {"batch": 2, "queries": 5, "keys": 7, "heads": 2, "head_dim": 130}
    sizes[hole] = 0
    case = Case(random_inputs(**sizes))
    out, lse = forward(case)
    assert not out.any()
    assert (lse == -math.inf).all()
    assert not any(gradient.any() for gradient in backward(case, out, lse)[:3])


def test_scores_beyond_fp16_keep_their_gradients() -> None:
    torch.manual_seed(3)
    q = torch.full((1, 8, 1, 130), 576.0).half()
    k = (382.0 * torch.randn(1, 8, 1, 1).sign()).half().expand(1, 8, 1, 130).contiguous()
    case = Case((q, k, torch.randn(1, 8, 1, 130).half()), scale=0.125)
    grad = torch.ones_like(q)
    out, lse = forward(case)
    expected = case.truth(grad)
    assert_close(out, expected[0], limit=2e-3)
    _, _, dv, _ = backward(case, out, lse, grad)
    # an LSE of 3.6e6 is a multiple of 0.25: by itself it would scale weights by up to 13 %
    assert_close(dv, expected[4], limit=2e-3 * expected[4].abs().max().item())


def test_one_pass_on_hopper_agrees() -> None:
    plain = Case(random_inputs(1, 9, 35, 1, 300, dtype=HALF))
    first = wide_ladder_for((9, 0), plain.kind)[0]
    assert isinstance(first, WideOnePassConfig)
    check(plain, first, grads=False)


@pytest.mark.parametrize("name", ["two-passes", "one-pass-64-rows", "two-passes-wide-mix"])
def test_other_candidates_agree(name: str) -> None:
    plain = Case(random_inputs(1, 9, 35, 1, 300, dtype=HALF))
    check(plain, candidates((9, 0), plain.kind)[name], grads=False)
    masked = Case(random_inputs(2, 9, 21, 1, 130, 300, dtype=HALF), BIASES["of keys"][1],
                  Band(7, 3), torch.arange(21).expand(2, 21) < 17)  # fmt: skip
    check(masked, candidates((9, 0), masked.kind)[name], grads=False)


def test_packed_sequences_and_dropout_are_refused() -> None:
    from sdx_kernels._triton import attention_wide_launch as module

    q, k, v = random_inputs(1, 3, 5, 1, 264)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    fwd: Any = {"output_dtype": FULL, "with_lse": False, "ladder": ()}
    for refused in (
        {"packed": Packed(starts, starts, 3, 3)},
        {"dropout": Dropout(0.5, torch.zeros(1, dtype=torch.int64))},
    ):
        extra: Any = refused
        with pytest.raises(InvalidInputs, match="wide heads take no"):
            module.launch_attention_wide_fwd(q, k, v, None, scale=1.0, **fwd, **extra)
        with pytest.raises(InvalidInputs, match="wide heads take no"):
            module.launch_attention_wide_bwd(
                q, q, k, v, q, torch.zeros(1, 1, 3), None, scale=1.0, ladder=(), **extra
            )
    with pytest.raises(LaunchRefused):
        module.launch_attention_wide_fwd(q, k, v, None, scale=1.0, **fwd)
