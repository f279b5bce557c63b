"""The backward kernels against autograd of the equation in fp64: dims, dtypes, strides, groups."""

import math

import pytest
import torch
import torch.nn.functional as F

from sdx_kernels.errors import LaunchRefused
from sdx_kernels.reference.attention import attention
from sdx_kernels.testing import (
    ODD_LENGTHS,
    assert_close,
    at_end_of_nan,
    largest_error,
    poisoned_empty,
    random_inputs,
)
from sdx_kernels.tuning import attention_bwd as tuning
from sdx_kernels.tuning.attention import SHARED_MEMORY, AttentionConfig
from sdx_kernels.tuning.attention_bwd import (
    KERNELS,
    BackwardLadder,
    backward_ladder_for,
    backward_shared_bytes,
)

from .gradients_case import Inputs, autograd, peer, unit_grad

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
pytestmark = pytest.mark.usefixtures("interpreter")

#: the interpreter computes with numpy, which warns of the infinities of some tests
numpy_warns = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

_TILE = (AttentionConfig(16, 32, 4, 1, "test"),)
SMALL = BackwardLadder(_TILE, _TILE, _TILE, _TILE)


def launch(
    inputs: Inputs, grad: torch.Tensor, scale: float, ladder: BackwardLadder | None = None
) -> tuple[torch.Tensor, ...]:
    """The kernels' gradients, in memory that held NaN, from the equation's output in fp32."""
    from sdx_kernels._triton.attention_bwd_launch import launch_attention_bwd

    q, k, v = inputs
    out, lse = attention(q.float(), k.float(), v.float(), scale=scale)
    if ladder is None:
        ladder = backward_ladder_for((8, 6), q.shape[3], v.shape[3], q.dtype)
    assert ladder is not None
    with poisoned_empty():
        *grads, dbias = launch_attention_bwd(
            grad, q, k, v, out.to(q.dtype), lse, None, scale=scale, ladder=ladder
        )
    assert dbias is None
    for gradient, tensor in zip(grads, inputs, strict=True):
        assert gradient.is_contiguous()
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
    return tuple(grads)


def check(inputs: Inputs, scale: float = 0.3, ladder: BackwardLadder | None = None) -> None:
    grad = unit_grad(inputs)
    ours = launch(inputs, grad, scale, ladder)
    figure = {torch.float32: 1e-4, torch.float16: 1e-2}[inputs[0].dtype]
    expected, others = autograd(inputs, grad, scale), peer(inputs, grad, scale)
    for gradient, right, other in zip(ours, expected, others, strict=True):
        largest = right.abs().max().item()
        if largest == 0.0:
            # one key: the truth is 0, and so is three times a peer's luck
            assert_close(gradient, right, limit=4 * torch.finfo(gradient.dtype).eps)
        else:
            limit = figure * max(1.0, largest)
            assert_close(gradient, right, peer=other, factor=3.0, limit=limit)


@pytest.mark.parametrize("head_dim", [1, 3, 40, 64, 80, 128, 160, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and head_dim > tuning.MAX_FP32_DIM:
        assert backward_ladder_for((9, 0), head_dim, head_dim, dtype) is None
        return
    check(random_inputs(1, 9, 35, 1, head_dim, dtype=dtype), scale=head_dim**-0.5)


@pytest.mark.parametrize("dims", [(16, 40), (40, 16), (256, 1)], ids=str)
def test_value_dims_of_their_own(dims: tuple[int, int]) -> None:
    check(random_inputs(1, 17, 33, 1, *dims, dtype=torch.float16), scale=dims[0] ** -0.5)


@pytest.mark.parametrize("keys", ODD_LENGTHS)
def test_odd_lengths(keys: int) -> None:
    check(random_inputs(1, 17, keys, 1, 16, dtype=torch.float16), ladder=SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("queries", ODD_LENGTHS)
@pytest.mark.parametrize("keys", ODD_LENGTHS)
def test_all_odd_lengths(queries: int, keys: int, dtype: torch.dtype) -> None:
    check(random_inputs(2, queries, keys, 2, 40, 24, dtype=dtype))


@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_heads_sum_their_gradients(key_heads: int) -> None:
    q, k, v = random_inputs(1, 17, 35, 4, 16, dtype=torch.float16)
    check((q, k[:, :, :key_heads], v[:, :, :key_heads]), ladder=SMALL)


@pytest.mark.parametrize("kind", ["expanded", "channels first", "expanded channels", "cut out"])
def test_strides_of_the_gradient(kind: str) -> None:
    inputs = random_inputs(2, 7, 19, 2, 16)
    plain = unit_grad(inputs)
    grad = {
        "expanded": plain[:1, :1].expand(2, 7, 2, 16),
        "channels first": plain.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        "expanded channels": plain[..., :1].expand(2, 7, 2, 16),
        "cut out": F.pad(plain, (4, 4, 1, 1), value=math.nan)[:, :, 1:-1, 4:-4],
    }[kind]
    ours = launch(inputs, grad, 0.3, SMALL)
    assert all(map(torch.equal, ours, launch(inputs, grad.contiguous(), 0.3, SMALL)))
    for gradient, right in zip(ours, autograd(inputs, grad, 0.3), strict=True):
        assert_close(gradient, right, limit=2e-5)


def test_strides_of_the_inputs_and_nan_around_them() -> None:
    dense = random_inputs(2, 7, 19, 2, 16, dtype=torch.float16)
    grad = unit_grad(dense)
    expected = launch(dense, grad, 0.3, SMALL)
    cut = [F.pad(t, (8, 8, 1, 1, 2, 2), value=math.nan)[:, 2:-2, 1:-1, 8:-8] for t in dense]
    ends = [at_end_of_nan(t) for t in dense]
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in dense]
    for inputs in (cut, ends, heads_first):
        assert math.isfinite(sum(t.sum().item() for t in inputs))
        found = launch(tuple(inputs), at_end_of_nan(grad), 0.3, SMALL)  # type: ignore[arg-type]
        assert all(map(torch.equal, found, expected))
    shared = dense[1][:1].expand(2, 19, 2, 16)
    check((dense[0], shared, shared), ladder=SMALL)


def test_a_gradient_of_another_dtype_is_rounded_first() -> None:
    inputs = random_inputs(1, 9, 19, 2, 16, dtype=torch.float16)
    grad = torch.randn(1, 9, 2, 16)
    found = launch(inputs, grad, 0.3, SMALL)
    assert all(map(torch.equal, found, launch(inputs, grad.half(), 0.3, SMALL)))


def test_two_calls_give_the_same_bits() -> None:
    inputs = random_inputs(2, 9, 65, 2, 40, dtype=torch.float16)
    grad = unit_grad(inputs)
    first = launch(inputs, grad, 0.3)
    assert all(map(torch.equal, first, launch(inputs, grad, 0.3)))


@numpy_warns
def test_case_037_huge_scores_keep_their_gradients() -> None:
    torch.manual_seed(3)
    q = torch.full((1, 32, 1, 64), 576.0).half()
    k = (382.0 * torch.randn(1, 32, 1, 1).sign()).half().expand(1, 32, 1, 64).contiguous()
    v = torch.randn(1, 32, 1, 64).half()
    grad = torch.ones(1, 32, 1, 64).half()
    dq, dk, dv = launch((q, k, v), grad, 0.125)
    truth = autograd((q, k, v), grad, 0.125)
    # an LSE of 1.8e6 is a multiple of 0.125: by itself it would scale weights by up to 6 %
    assert_close(dv, truth[2], limit=2e-3 * truth[2].abs().max().item())
    # dS has a few units, is rounded to fp16, and is multiplied by keys of 382 or queries of 576
    assert_close(dq, truth[0], limit=5e-4 * 382 * 0.125)
    assert_close(dk, truth[1], limit=5e-4 * 576 * 0.125 * 32)


@pytest.mark.parametrize("loss_scale", [2.0**-8, 2.0**9])
def test_loss_scaling_does_not_lose_fp16_gradients(loss_scale: float) -> None:
    inputs = random_inputs(1, 17, 35, 1, 16, dtype=torch.float16)
    grad = unit_grad(inputs)
    scaled = launch(inputs, grad * loss_scale, 0.3, SMALL)
    for gradient, right in zip(scaled, autograd(inputs, grad * loss_scale, 0.3), strict=True):
        # the smallest fp16 steps cost a little more below 1
        assert largest_error(gradient, right) <= 3e-3 * right.abs().max().item()


def test_a_scale_below_fp16s_range_multiplies_sums_only() -> None:
    inputs = random_inputs(1, 9, 19, 1, 16, dtype=torch.float16)
    q, k, v = inputs[0] * 64, inputs[1] * 64, inputs[2]
    scale = 2.0**-14
    grad = unit_grad(inputs)
    for gradient, right in zip(
        launch((q, k, v), grad, scale, SMALL), autograd((q, k, v), grad, scale), strict=True
    ):
        assert largest_error(gradient, right) <= 3e-3 * right.abs().max().item()


@pytest.mark.parametrize("hole", ["batch", "queries", "keys", "heads", "value_dim"])
def test_empty_tensors_have_zero_gradients(hole: str) -> None:
    sizes = {"batch": 2, "queries": 5, "keys": 7, "heads": 2, "head_dim": 16, "value_dim": 16}
    sizes[hole] = 0
    inputs = random_inputs(**sizes)
    for gradient in launch(inputs, unit_grad(inputs), 0.3, SMALL):
        assert not gradient.any()


def test_65537_heads_are_grid_arithmetic() -> None:
    from sdx_kernels._triton.attention_bwd_launch import grid_for

    assert grid_for(65537, 33, 16) == (65537 * 3, 1, 1)
    assert grid_for(65536 * 8, 16, 16) == (65536 * 8, 1, 1)


def test_a_ladder_without_a_step_is_refused() -> None:
    with pytest.raises(LaunchRefused):
        launch(
            random_inputs(1, 5, 7, 1, 16),
            torch.ones(1, 5, 1, 16),
            0.3,
            BackwardLadder((), _TILE, _TILE, _TILE),
        )


@pytest.mark.parametrize("capability", [c for c in sorted(SHARED_MEMORY) if c >= (8, 0)])
def test_every_ladder_fits_its_architecture(capability: tuple[int, int]) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for dim in (1, 40, 64, 80, 128, 160, 256):
            for flag in ("", "biased", "masked", "dropout"):
                flags = {flag: True} if flag else {}
                ladder = backward_ladder_for(capability, dim, dim, dtype, **flags)
                wide = dim > tuning.MAX_FP32_DIM
                # and everything at once above 128 dims: the reference serves these
                least = dim > 128 and flag == "dropout"
                assert (ladder is None) == (least or (dtype == torch.float32 and wide))
                for kernel in KERNELS if ladder else ():
                    for config in getattr(ladder, kernel):
                        assert backward_shared_bytes(kernel, config, dim, dim, dtype.itemsize) > 0
                        assert config.source


def test_wide_heads_and_small_cards_have_no_ladder() -> None:
    assert backward_ladder_for((9, 0), 257, 64, torch.float16) is None
    assert backward_ladder_for((9, 0), 64, 0, torch.float16) is None
    assert backward_ladder_for((9, 0), 64, 64, torch.float16, shared_memory_bytes=1024) is None
