"""Attention through tensor descriptors: both softmax forms, and hard inputs for the optimistic."""

import math
from typing import Any

import pytest
import torch

from sdx_kernels import count, memory_efficient_attention
from sdx_kernels.errors import LaunchRefused
from sdx_kernels.reference.attention import attention
from sdx_kernels.testing import (
    assert_close,
    largest_error,
    math_peer,
    poisoned_empty,
    random_inputs,
    reference64,
)
from sdx_kernels.tuning.attention import SHARED_MEMORY
from sdx_kernels.tuning.attention_tma import (
    TmaConfig,
    candidates,
    ladder_for_tma,
    tma_shared_bytes,
    warm_keys,
)

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    # numpy says so when the optimistic form overflows, which is what it is tested for
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
]

FORMS = {
    "online": {"optimistic": False},
    "optimistic": {},
    "warm": {"warm_share": 4},
}
OPTIMISTIC = ("optimistic", "warm")


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    form: str = "optimistic",
    *,
    scale: float | None = None,
    rows: int = 16,
    keys: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(output, log-sum-exp, whether each query tile was redone)."""
    from sdx_kernels._triton.attention_tma import launch_attention_tma

    config = TmaConfig(rows, keys, 4, 1, "test", **FORMS[form])  # type: ignore[arg-type]
    tiles = q.shape[0] * q.shape[2] * -(-q.shape[1] // rows)
    redone = torch.full((tiles,), -1, dtype=torch.int32)
    with poisoned_empty():
        out, lse = launch_attention_tma(
            q,
            k,
            v,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            output_dtype=q.dtype,
            with_lse=True,
            ladder=(config,),
            redone=redone,
        )
    assert lse is not None
    assert (redone.min() == -1) == (not config.optimistic)
    return out, lse, redone.tolist()


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: str) -> None:
    out, lse, _ = run(q, k, v, form)
    assert_close(out, reference64(q, k, v), peer=math_peer(q, k, v))
    _, truth = attention(q.double(), k.double(), v.double(), scale=q.shape[-1] ** -0.5)
    assert (lse - truth).abs().max() < 2e-5


def test_the_operator_reaches_it_by_name() -> None:
    q, k, v = random_inputs(1, 19, 43, 2, 40, dtype=torch.float16)
    before = count("triton-tma")
    out = memory_efficient_attention(q, k, v, op="triton-tma")
    assert count("triton-tma") == before + 1
    assert_close(out, reference64(q, k, v), peer=math_peer(q, k, v))
    # the second call is a remembered one
    assert torch.equal(memory_efficient_attention(q, k, v, op="triton-tma"), out)
    assert count("triton-tma") == before + 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keys", [1, 16, 43])
def test_odd_lengths(keys: int, form: str) -> None:
    q, k, v = random_inputs(1, 19, keys, 2, 24, dtype=torch.float16, seed=keys)
    check(q, k, v, form)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_key_count(dtype: torch.dtype, form: str) -> None:
    for keys in range(1, 130):
        q, k, v = random_inputs(2, 21, keys, 2, 64, dtype=dtype, seed=keys)
        check(q, k, v, form)


@pytest.mark.parametrize("dims", [(8, 8), (40, 80), (128, 64)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    q, k, v = random_inputs(1, 17, 33, 1, dims[0], dims[1])
    check(q, k, v, "optimistic")


def test_fused_views_and_grouped_heads_beside_nan() -> None:
    buffer = torch.full((1, 45, 3, 4, 48), math.nan, dtype=torch.float16)
    inputs = random_inputs(1, 37, 37, 4, 40, dtype=torch.float16)
    for index, tensor in enumerate(inputs):
        buffer[:, :37, index, :, :40] = tensor
    q, k, v = (buffer[:, :37, index, :, :40] for index in range(3))
    out, lse, redone = run(q, k, v)
    dense = run(*inputs)
    assert torch.equal(out, dense[0])
    assert torch.equal(lse, dense[1])
    assert max(redone) == 0
    grouped, _, _ = run(q, k[:, :, :2], v[:, :, :2])
    assert_close(grouped, reference64(inputs[0], inputs[1][:, :, :2], inputs[2][:, :, :2]))


def test_strides_of_singleton_dims_mean_nothing() -> None:
    q, k, v = random_inputs(1, 20, 20, 1, 8, dtype=torch.float16)
    odd = [tensor.as_strided(tensor.shape, (7919, 8, 4099, 1)) for tensor in (q, k, v)]
    assert torch.equal(run(*odd)[0], run(q, k, v)[0])


def test_what_a_tensor_map_cannot_hold_is_refused() -> None:
    q, k, v = random_inputs(1, 20, 20, 2, 24, dtype=torch.float16)
    run(q, k, v)
    odd = torch.zeros(1, 20, 2, 25, dtype=torch.float16)[..., :24]
    for inputs in ((odd, k, v), (q, odd, v), (q, k, odd), (q, k.expand(1, 20, 2, 24)[:, :1], v)):
        if all(t.stride(1) % 8 == 0 for t in inputs):
            continue
        with pytest.raises(LaunchRefused, match="16 bytes"):
            run(*inputs)
    # shape and strides were seen before, the address is looked at all the same
    shifted = torch.zeros(k.numel() + 1, dtype=torch.float16)[1:].view(k.shape)
    with pytest.raises(LaunchRefused, match="16 bytes"):
        run(q, shifted, v)
    with pytest.raises(LaunchRefused, match="16 bytes"):
        run(q[..., :20], k[..., :20], v[..., :20].contiguous())


def test_a_negative_scale() -> None:
    inputs = random_inputs(1, 19, 40, 1, 16)
    for form in ("online", "optimistic", "warm"):
        out, _, _ = run(*inputs, form, scale=-1.5)
        assert_close(out, reference64(*inputs, scale=-1.5))


def test_two_runs_give_the_same_bits() -> None:
    q, k, v = random_inputs(1, 20, 70, 2, 24, dtype=torch.float16)
    for form in ("optimistic", "warm"):
        first, again = run(q * 8, k, v, form), run(q * 8, k, v, form)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
        assert first[2] == again[2]


def given_scores(scores: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(q, k, v) of one head: every query has these log2 scores `[keys]`, at scale ln 2."""
    length = scores.numel()
    q = torch.zeros(1, 16, 1, 16, dtype=torch.float16)
    k = torch.zeros(1, length, 1, 16, dtype=torch.float16)
    q[..., 0], k[0, :, 0, 0] = 1.0, scores.half()
    return q, k, value.half()[None, :, None].contiguous()


def hold(scores: torch.Tensor, tail: torch.Tensor, form: str, block: int) -> list[int]:
    """Checks one adversarial input; returns the redone tiles. `tail`: keys whose value is 1."""
    value = torch.zeros(scores.numel(), 16)
    value[:, 0], value[:, 1], value[:, 2] = tail.float(), (~tail).float(), 1.0
    q, k, v = given_scores(scores, value)
    scale = math.log(2.0)
    out, lse, redone = run(q, k, v, form, scale=scale, keys=block)
    truth, truth_lse = attention(q.double(), k.double(), v.double(), scale=scale)
    assert_close(out, truth, peer=math_peer(q, k, v, scale=scale))
    assert ((lse - truth_lse).abs() < 2e-5 + 2**-22 * truth_lse.abs()).all()
    # and never further from the truth than the online form is, but for the output's rounding
    plain, _, _ = run(q, k, v, "online", scale=scale, keys=block)
    assert largest_error(out, truth) <= largest_error(plain, truth) + 2**-11
    return redone


def sinks(length: int, block: int, gap: float, every: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tail of equal scores, `gap` octaves below a sink key in every `every`-th block."""
    scores = torch.full((length,), -gap)
    scores[block // 2 :: block * every] = 0.0
    return scores, scores < 0.0


@pytest.mark.parametrize("form", OPTIMISTIC)
@pytest.mark.parametrize("gap", [10, 14, 17, 19, 22, 26])
def test_a_tail_behind_sink_keys_is_not_lost(gap: int, form: str) -> None:
    for every in (1, 1000):
        assert hold(*sinks(512, 32, gap, every), form, 32) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1024, 4096, 16384])
@pytest.mark.parametrize("form", OPTIMISTIC)
def test_a_long_tail_behind_sink_keys_is_not_lost(form: str, length: int) -> None:
    for gap in range(10, 27):
        for every in (1, 1000):
            assert hold(*sinks(length, 64, gap, every), form, 64) == [0]


def test_the_tail_that_a_margin_of_six_octaves_loses() -> None:
    """16,384 keys 19 octaves below one sink are 1/33 of the sum; a higher reference drops them."""
    from sdx_kernels._triton import attention_tma

    scores, tail = sinks(16384, 128, 19, 1000)
    q, k, v = given_scores(scores, tail.float()[:, None].expand(-1, 16))
    out, _, redone = run(q, k, v, scale=math.log(2.0), keys=128)
    assert redone == [0]
    assert abs(out[0, 0, 0, 0].item() - 1 / 33) < 1e-4
    # the same reference, six octaves higher: every weight of the tail rounds to 0
    weights = torch.exp2(scores - 6.0).half()
    assert torch.finfo(torch.float16).max == attention_tma.FP16_MAX
    assert weights[tail].max() == 0.0


@pytest.mark.parametrize("form", OPTIMISTIC)
@pytest.mark.parametrize("fall", [-math.inf, -3e4], ids=["masked", "far-below"])
def test_a_first_block_that_attends_nothing(fall: float, form: str) -> None:
    scores = torch.linspace(-3.0, 3.0, 200)
    # with a quarter of the keys warm the reference must still come from masked ones alone
    scores[:80] = fall
    redone = hold(scores, torch.arange(200) % 2 == 0, form, 16)
    assert redone == [1]


@pytest.mark.parametrize("form", OPTIMISTIC)
@pytest.mark.parametrize("rise", [0.02, 0.2, 2.0, 100.0])
def test_rising_scores(rise: float, form: str) -> None:
    scores = (torch.arange(300) * rise).half().float()
    redone = hold(scores, torch.arange(300) >= 290, form, 32)
    assert redone == [1 if 300 * rise * 0.75 > 16 else 0]


@pytest.mark.slow
@pytest.mark.parametrize("form", OPTIMISTIC)
def test_rising_scores_and_late_sinks_over_many_keys(form: str) -> None:
    length = 4096
    for rise in (0.001, 0.004, 0.01, 0.1, 4.0):
        scores = (torch.arange(length) * rise).half().float()
        hold(scores, torch.arange(length) < length - 64, form, 64)
    for place in (0, 63, 64, 100, 2000, length - 65, length - 1):
        for gap in (8.0, 15.9, 16.0, 17.0, 24.0, 200.0):
            scores = torch.full((length,), -gap)
            scores[place] = 0.0
            hold(scores, scores < 0.0, form, 64)


@pytest.mark.parametrize("height", [15.0, 15.9375, 16.0, 17.0])
def test_the_edge_of_fp16(height: float) -> None:
    """A weight of 2^15.9375 (62,757) is kept, one that fp16 rounds to infinity is redone."""
    scores = torch.full((96,), -40.0)
    scores[0], scores[40] = 0.0, height
    assert hold(scores, torch.arange(96) == 40, "optimistic", 16) == [int(height >= 16)]
    # a sum that reaches it is not trusted either, though no weight does
    scores[40:43] = 15.0
    assert hold(scores, torch.arange(96) == 40, "optimistic", 16) == [1]


def test_the_redo_is_what_makes_it_right(monkeypatch: pytest.MonkeyPatch) -> None:
    from sdx_kernels._triton import attention_tma

    q, k, v = random_inputs(1, 40, 200, 2, 16, dtype=torch.float16)
    q = q * 6
    truth, peer = reference64(q, k, v), math_peer(q, k, v)
    out, _, redone = run(q, k, v)
    assert 0 < sum(redone) < len(redone), redone
    assert_close(out, truth, peer=peer)
    assert sum(run(q, k, v, "warm")[2]) <= sum(redone)

    plain: Any = attention_tma.constants_for_tma
    monkeypatch.setattr(
        attention_tma, "constants_for_tma", lambda *a, **kw: plain(*a, **kw) | {"REDO": False}
    )
    without, _, counted = run(q, k, v)
    assert counted == redone
    worst = 0.0
    for tile, again in enumerate(redone):
        head, first = tile // 3, tile % 3 * 16
        rows = (slice(None), slice(first, first + 16), head)
        if again:
            worst = max(worst, largest_error(without[rows], truth[rows]))
        else:
            assert torch.equal(without[rows], out[rows])
    # weights above 65,504 became infinite; a sum above it of smaller ones is redone in vain
    assert worst == math.inf


def test_values_that_are_not_finite_stay_in_their_rows() -> None:
    q, k, v = random_inputs(1, 40, 50, 1, 16, dtype=torch.float16)
    clean, _, _ = run(q, k, v)
    q[0, 3] = math.nan
    out, _, redone = run(q, k, v)
    assert redone == [1, 0, 0]
    assert out[0, 3].isnan().all()
    others = [row for row in range(40) if row != 3]
    assert_close(out[:, others], clean[:, others].double())
    v[0, 30, 0, 5] = math.inf
    assert (run(*(t[:, 8:] if t is q else t for t in (q, k, v)))[0][..., 5] == math.inf).all()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_ladder(capability: tuple[int, int]) -> None:
    for head_dim in (40, 64, 80, 128):
        for keys in (77, 1024, 4096, 16384):
            ladder = ladder_for_tma(capability, head_dim, head_dim, torch.float16, keys)
            assert bool(ladder) == (capability >= (9, 0))
            named = candidates(capability, head_dim, head_dim, torch.float16, keys)
            assert len(set(named.values())) == len(named)
            for step in (*ladder, *named.values()):
                assert step.source
                assert tma_shared_bytes(step, head_dim, head_dim, 2) <= SHARED_MEMORY[capability]
    for dims, dtype in (((160, 160), torch.float16), ((20, 64), torch.float16)):
        assert ladder_for_tma(capability, *dims, dtype, 4096) == ()
    assert ladder_for_tma(capability, 64, 64, torch.float32, 4096) == ()
    # 65,504 equal fp16 scores would look like an overflow in every tile
    for dtype, optimistic in ((torch.float16, False), (torch.bfloat16, True)):
        for step in ladder_for_tma(capability, 64, 64, dtype, 65536):
            assert step.optimistic is optimistic


def test_warm_keys_are_pure_arithmetic() -> None:
    config = TmaConfig(64, 64, 4, 3, "test", warm_share=2)
    assert [warm_keys(config, keys) for keys in (1, 64, 512, 520, 4096)] == [64, 64, 64, 128, 512]
    assert warm_keys(TmaConfig(64, 64, 4, 3, "test"), 4096) == 0
