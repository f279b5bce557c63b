"""The backward kernels' biases, bands, packed sequences, key masks and dropout; against fp64."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sdx_kernels.bias import Band, BlockDiagonalMask, Packed
from sdx_kernels.checks import Dropout
from sdx_kernels.reference.attention import attention
from sdx_kernels.reference.dropout import keep_mask
from sdx_kernels.testing import assert_close, poisoned_empty, random_inputs
from sdx_kernels.tuning.attention import AttentionConfig
from sdx_kernels.tuning.attention_bwd import BackwardLadder

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
pytestmark = pytest.mark.usefixtures("interpreter")

#: the interpreter computes with numpy, which warns of the NaN and infinities of these tests
numpy_warns = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

#: tiles smaller than any that is shipped: short inputs then have edges on all sides of whole tiles
_TILE = (AttentionConfig(16, 16, 4, 1, "test"),)
SMALL = BackwardLadder(_TILE, _TILE, _TILE, _TILE)
#: the same with unequal sides, so that rows cannot pass for keys
_FLAT = (AttentionConfig(16, 32, 4, 1, "test"),)
UNEQUAL = BackwardLadder(_FLAT, _FLAT, _FLAT, _FLAT)

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """Everything that attention takes, and what of it autograd of the equation needs."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    bias: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None
    band: Band | None = None
    blocks: BlockDiagonalMask | None = None
    p: float = 0.0
    bias_grad: bool = True

    @property
    def scores(self) -> tuple[int, int, int, int]:
        q, k, _ = self.inputs
        return q.shape[0], q.shape[2], q.shape[1], k.shape[1]

    @property
    def seed(self) -> torch.Tensor:
        return torch.tensor([7_000_000_000_003])

    @property
    def wants_bias(self) -> bool:
        return self.bias is not None and self.bias.is_floating_point() and self.bias_grad

    def packed(self) -> Packed | None:
        return None if self.blocks is None else self.blocks.packed("cpu")

    def allowed(self) -> torch.Tensor | None:
        """All structures as one bool tensor."""
        _, _, queries, keys = self.scores
        allowed: torch.Tensor | None = None
        if self.blocks is not None:
            band = self.band or Band()
            lengths = zip(self.blocks.query_lengths, self.blocks.key_lengths, strict=True)
            parts = [band.allowed(*pair, "cpu") for pair in lengths]
            return torch.block_diag(*parts).bool()[None, None]
        if self.band is not None:
            allowed = self.band.allowed(queries, keys, "cpu")[None, None]
        if self.key_mask is not None:
            exists = self.key_mask[:, None, None, :]
            allowed = exists if allowed is None else allowed & exists
        return allowed

    def keep(self) -> torch.Tensor | None:
        if self.p == 0.0:
            return None
        batch, heads, queries, keys = self.scores
        if self.blocks is None:
            return keep_mask(self.seed, batch, heads, range(queries), range(keys), self.p)
        lengths = zip(self.blocks.query_lengths, self.blocks.key_lengths, strict=True)
        parts = [
            keep_mask(self.seed, 1, heads, range(q), range(k), self.p, first=i)[0]
            for i, (q, k) in enumerate(lengths)
        ]
        return torch.stack([torch.block_diag(*(part[h] for part in parts)) for h in range(heads)])[
            None
        ].bool()

    def equation(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """(out, lse, leaves) of the reference in `dtype`."""
        leaves = [t.detach().to(dtype).requires_grad_() for t in self.inputs]
        bias = self.bias
        if bias is not None and self.wants_bias:
            bias = bias.detach().to(torch.promote_types(bias.dtype, dtype)).requires_grad_()
            leaves.append(bias)
        out, lse = attention(
            *leaves[:3],
            scale=0.3,
            bias=bias,
            allowed=self.allowed(),
            keep=self.keep(),
            p=self.p,
        )
        return out, lse, leaves


def launch(case: Case, grad: torch.Tensor, ladder: BackwardLadder = SMALL) -> Tensors:
    """The kernels' gradients, in memory that held NaN, from the equation's output in fp32."""
    from sdx_kernels._triton.attention_bwd_launch import launch_attention_bwd

    out, lse, _ = case.equation(torch.float32)
    with poisoned_empty():
        grads = launch_attention_bwd(
            grad,
            *case.inputs,
            out.detach().to(grad.dtype),
            lse.detach(),
            case.bias,
            scale=0.3,
            key_mask=case.key_mask,
            band=case.band,
            packed=case.packed(),
            dropout=Dropout(case.p, case.seed) if case.p else None,
            bias_grad=case.wants_bias,
            ladder=ladder,
        )
    assert (grads[3] is not None) == case.wants_bias
    found = tuple(grad for grad in grads if grad is not None)
    for gradient, tensor in zip(found, (*case.inputs, case.bias), strict=False):
        assert tensor is not None
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
    return found


def check(case: Case, ladder: BackwardLadder = SMALL) -> Tensors:
    """The kernels' gradients, held to three times the error of the equation in their own dtype."""
    q, _, v = case.inputs
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn((*q.shape[:3], v.shape[3]), generator=generator).to(q.dtype)
    ours = launch(case, grad, ladder)
    truth_out, _, truth = case.equation(torch.float64)
    expected = torch.autograd.grad(truth_out, truth, grad.double())
    peer_out, _, peer_leaves = case.equation(q.dtype)
    peer = torch.autograd.grad(peer_out, peer_leaves, grad)
    figure = {torch.float32: 1e-4, torch.float16: 1e-2}[q.dtype]
    for gradient, right, other in zip(ours, expected, peer, strict=True):
        if right.abs().max() < 1e-12:
            # a bias that keys share: the truth is 0, and so is three times a peer's luck
            assert_close(gradient, right, limit=4 * torch.finfo(q.dtype).eps)
            continue
        limit = figure * max(1.0, right.abs().max().item())
        assert_close(gradient, right, peer=other, factor=3.0, limit=limit)
    return ours


BIASES = [
    (2, 2, 9, 37),
    (1, 2, 9, 37),
    (2, 1, 9, 37),
    (9, 37),
    (2, 1, 1, 37),
    (37,),
    (1, 2, 9, 1),
    (2, 1, 1),
]


@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_a_biass_gradient_has_its_own_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    *_, dbias = check(Case(random_inputs(2, 9, 37, 2, 16), torch.randn(shape)), UNEQUAL)
    if shape[-1] > 1:
        assert dbias.abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16], ids=str)
def test_a_bias_has_a_dtype_of_its_own(dtype: torch.dtype) -> None:
    bias = torch.randn(2, 9, 37, generator=torch.manual_seed(2)).to(dtype)
    case = Case(random_inputs(1, 9, 37, 2, 16, dtype=torch.float16), bias)
    dq, dk, dv, dbias = launch(case, torch.ones(1, 19, 2, 16).half())
    out, _, leaves = case.equation(torch.float64)
    expected = torch.autograd.grad(out.sum(), leaves)
    limit = {torch.float16: 2e-3, torch.float64: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for gradient, right in zip((dq, dk, dv, dbias), expected, strict=True):
        assert_close(gradient, right, limit=limit * max(1.0, right.abs().max().item()))


@pytest.mark.parametrize("kind", ["bool", "float16"])
def test_a_strided_bias_without_gradient(kind: str) -> None:
    torch.manual_seed(3)
    inputs = random_inputs(2, 9, 37, 2, 16, dtype=torch.float16)
    wide = torch.randn(37, 2, 9, 2)[..., ::2]
    bias = wide.permute(1, 3, 2, 0).expand(2, 2, 9, 37)
    mask = bias > -0.5 if kind == "bool" else bias.half()
    check(Case(inputs, mask, bias_grad=False), UNEQUAL)


BANDS = {
    "causal": (Band(right=0), 40, 40),
    "causal-wide": (Band(right=0), 33, 70),
    "causal-tall": (Band(right=0), 50, 33),
    "causal-end": (Band(right=0, from_end=True), 33, 50),
    "causal-end-tall": (Band(right=0, from_end=True), 70, 33),
    "window": (Band(4, 20, from_end=True), 45, 50),
    "window-wide": (Band(50, 3), 70, 77),
    "lower": (Band(left=9), 70, 50),
    "lower-end": (Band(left=20, from_end=True), 33, 60),
    "one-key": (Band(0, 0), 40, 40),
    "beyond": (Band(10**9, 10**9), 20, 40),
}


@pytest.mark.parametrize("name", ["causal", "causal-tall", "causal-end", "window", "lower-end"])
def test_bands(name: str) -> None:
    band, queries, keys = BANDS[name]
    check(Case(random_inputs(1, queries, keys, 1, 16, dtype=torch.float16), band=band))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("ladder", [SMALL, UNEQUAL], ids=["small", "unequal"])
@pytest.mark.parametrize("name", BANDS)
def test_all_bands(name: str, ladder: BackwardLadder, dtype: torch.dtype) -> None:
    band, queries, keys = BANDS[name]
    check(Case(random_inputs(2, queries, keys, 2, 24, 40, dtype=dtype), band=band), ladder)


@pytest.mark.parametrize("shape", [(2, 1, 19, 45), (19, 45), (45,)], ids=str)
def test_a_band_with_a_bias(shape: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    band = Band(14, 5, from_end=True)
    case = Case(random_inputs(2, 19, 45, 1, 16), torch.randn(shape), band=band)
    *_, dbias = check(case)
    if len(shape) > 1:
        assert not dbias[..., ~band.allowed(19, 45, "cpu")].any()


PADDING = torch.rand(2, 45, generator=torch.manual_seed(0)) > 0.4
PADDING[0, :17] = False


@pytest.mark.parametrize("also", ["alone", "band", "bias", "shared-bias", "row-bias"])
def test_key_masks(also: str) -> None:
    torch.manual_seed(6)
    inputs = random_inputs(2, 9, 45, 1, 16)
    case = Case(inputs, key_mask=PADDING)
    if also == "band":
        case = replace(case, band=Band(right=0, from_end=True))
    elif also != "alone":
        shape = {"bias": (2, 1, 9, 45), "shared-bias": (9, 45), "row-bias": (45,)}[also]
        case = replace(case, bias=torch.randn(shape))
    _, dk, dv, *dbias = check(case)
    assert not dk[~PADDING].any()
    assert not dv[~PADDING].any()
    if also == "shared-bias":
        assert not dbias[0][:, ~PADDING.any(0)].any()


BLOCKS = BlockDiagonalMask.from_seqlens((5, 0, 20, 7), (9, 4, 33, 0))


@pytest.mark.parametrize(
    "band", [None, Band(right=0), Band(5, 3, from_end=True)], ids=["plain", "causal", "window"]
)
def test_packed_sequences(band: Band | None) -> None:
    q, k, v = random_inputs(1, 32, 46, 2, 16, 24, dtype=torch.float16)
    check(Case((q, k[:, :, :1], v[:, :, :1]), blocks=BLOCKS, band=band))


@pytest.mark.parametrize("p", [0.1, 0.75])
def test_dropout_drops_what_forward_dropped(p: float) -> None:
    torch.manual_seed(8)
    inputs = random_inputs(2, 9, 37, 2, 16)
    check(Case(inputs, torch.randn(2, 9, 37), p=p), UNEQUAL)
    q, k, v = inputs
    check(Case((q, k[:, :, :1], v[:, :, :1]), band=Band(right=0, from_end=True), p=p))


def test_dropout_counts_packed_sequences() -> None:
    check(Case(random_inputs(1, 32, 46, 2, 16, dtype=torch.float16), blocks=BLOCKS, p=0.3))


@pytest.mark.parametrize("kind", ["bool", "-inf", "key mask", "band"])
def test_rows_with_nothing_to_attend_give_zero(kind: str) -> None:
    case = Case(random_inputs(2, 9, 20, 1, 16, dtype=torch.float16))
    mask = torch.ones(2, 1, 9, 20, dtype=torch.bool)
    mask[:, :, 3] = False
    if kind == "bool":
        case = replace(case, bias=mask)
    elif kind == "-inf":
        case = replace(case, bias=torch.zeros(mask.shape).half().masked_fill(~mask, -math.inf))
    elif kind == "key mask":
        nobody = torch.ones(2, 20, dtype=torch.bool)
        nobody[1] = False
        case = replace(case, key_mask=nobody)
    else:
        case = replace(case, band=Band(right=-4))
    dq, dk, dv, *_ = check(case)
    if kind == "key mask":
        assert not any(gradient[1].any() for gradient in (dq, dk, dv))
    else:
        assert not dq[:, 3].any()


@numpy_warns
@pytest.mark.parametrize("floor", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_of_finfo_min_are_means(floor: torch.dtype, dtype: torch.dtype) -> None:
    bias = torch.zeros(5, 40, dtype=floor)
    bias[1] = torch.finfo(floor).min
    bias[2, :39] = torch.finfo(floor).min
    case = Case(random_inputs(1, 5, 40, 2, 16, dtype=dtype), bias)
    grad = torch.zeros(1, 5, 2, 16, dtype=dtype)
    grad[:, 1] = 1.0
    dq, _, dv, dbias = launch(case, grad)
    # the truth is fp32's: a score beside −65504 keeps 8 bits after the point
    out, _, leaves = case.equation(torch.float32)
    expected = torch.autograd.grad(out, leaves, grad.float())
    for gradient, right in zip((dq, dv, dbias), (expected[0], *expected[2:]), strict=True):
        limit = 2e-3 if dtype == torch.float16 else 1e-5
        step = torch.finfo(gradient.dtype).eps * right.abs().max().item()
        assert_close(gradient, right.double(), limit=max(limit, 4 * step))
    if floor != torch.float16:
        assert_close(dv, torch.full_like(dv, 1 / 40).double(), limit=2e-5)


@numpy_warns
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("structure", ["window", "key mask", "packed"])
def test_nan_in_an_excluded_key_reaches_nobody_else(structure: str, which: str) -> None:
    spoilt = 20
    clean = Case(random_inputs(1, 32, 46, 1, 16))
    if structure == "window":
        clean = replace(clean, band=Band(4, 4))
        hit_rows, hit_keys = range(16, 25), range(12, 29)
    elif structure == "key mask":
        exists = torch.ones(1, 46, dtype=torch.bool)
        exists[:, spoilt] = False
        clean = replace(clean, key_mask=exists)
        hit_rows, hit_keys = range(0), range(0)
    else:
        clean = replace(clean, blocks=BLOCKS)
        spoilt = 11  # of the second sequence, which has no queries
        hit_rows, hit_keys = range(0), range(0)
    poisoned = [tensor.clone() for tensor in clean.inputs]
    poisoned[1 if which == "key" else 2][:, spoilt] = math.nan
    dirty = replace(clean, inputs=tuple(poisoned))  # type: ignore[arg-type]
    # what a training step would send back: NaN wherever the output is NaN
    grad = torch.randn(1, 32, 1, 16, generator=torch.manual_seed(9))
    expected = launch(clean, grad)
    spoilt_grad = grad.clone()
    spoilt_grad[:, list(hit_rows)] = math.nan
    got = launch(dirty, spoilt_grad)
    rows = torch.tensor([row not in hit_rows for row in range(32)])
    keys = torch.tensor([key not in hit_keys for key in range(46)])
    for gradient, right, good in zip(got, expected, (rows, keys, keys), strict=True):
        assert torch.equal(gradient[:, good], right[:, good])
        assert gradient[:, ~good].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("queries", [1, 7, 17, 33, 49])
@pytest.mark.parametrize(
    "parts", list(itertools.product(["", "band"], ["", "mask"], ["", "bias"], ["", "dropout"]))
)
def test_every_combination(parts: tuple[str, ...], queries: int, dtype: torch.dtype) -> None:
    torch.manual_seed(10)
    keys: Any = 45
    q, k, v = random_inputs(2, queries, keys, 4, 24, 40, dtype=dtype)
    case = Case(
        (q, k[:, :, :2], v[:, :, :2]),
        bias=torch.randn(4, queries, keys) if "bias" in parts else None,
        key_mask=PADDING if "mask" in parts else None,
        band=Band(11, 6) if "band" in parts else None,
        p=0.2 if "dropout" in parts else 0.0,
    )
    check(case, UNEQUAL)
