"""The last rung before a refusal: a decode that the card has no room for is made on the CPU."""

import dataclasses
import logging

import pytest
import torch

import sdx_accel  # noqa: F401  (attaches the methods)
from sdx_accel.errors import BudgetExceeded
from sdx_accel.runtime import budget_session
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.fp32_decode import decode_in_fp32
from sdx_accel.runtime.random_models import build_random
from sdx_patches.vae import bands_of

MESSAGE = "CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 8 GiB"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def moving(monkeypatch):
    """Let units move on the CPU as they would to a card."""

    class Moving(Executor):
        def __init__(self, *args, moves):
            super().__init__(*args, moves=True)

    monkeypatch.setattr(budget_session, "Executor", Moving)


@pytest.fixture(scope="module")
def loaded():
    pipe = load("random:sdxl-tiny", dtype="fp32")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def pipe(loaded):
    yield loaded
    loaded.disable_xattn()


def _hold(pipe):
    """Held, with plans that always say they spare what was asked for."""
    pipe.enable_xattn(vram=8, device="cpu", learn=False)
    executor = pipe.__dict__["_sdx_budget"].executor
    notes = iter(range(100))
    executor.replan = lambda phase, more: dataclasses.replace(
        executor.plan, notes=(str(next(notes)),)
    )
    return executor


def _run(pipe, **arguments):
    generator = torch.Generator().manual_seed(0)
    return pipe(
        "a red apple", height=64, width=64, num_inference_steps=1, generator=generator,
        output_type="np", **arguments,
    ).images  # fmt: skip


class _Refuse:
    """Refuses memory in a half's attention, which bands of rows call as well, at chosen calls."""

    def __init__(self, half, *calls, look=lambda: None):
        self.calls, self.refused, self.look = 0, set(calls), look
        self.handle = half.mid_block.attentions[0].register_forward_pre_hook(self)

    def __call__(self, module, args):
        self.look()
        self.calls += 1
        if self.calls - 1 in self.refused:
            raise torch.OutOfMemoryError(MESSAGE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handle.remove()


def test_refused_at_every_rung_before_it_ends_in_a_decode_on_the_cpu(pipe, caplog):
    executor = _hold(pipe)
    expected = _run(pipe)
    weights = {name: value.clone() for name, value in pipe.vae.state_dict().items()}
    loaded = []

    def look():
        loaded.append(any(unit.loaded for units in executor._units.values() for unit in units))

    with (
        caplog.at_level(logging.WARNING, logger="sdx_accel"),
        _Refuse(pipe.vae.decoder, *range(5), look=look) as decodes,
    ):
        picture = _run(pipe)
    assert decodes.calls == 6
    assert [retry.rung for retry in executor.retries] == [1, 2, 3, 4, 5]
    assert {(retry.phase, retry.component) for retry in executor.retries} == {("decode", "vae")}
    assert abs(picture - expected).max() < 1e-3
    # nothing was on the card meanwhile
    assert loaded == [True] * 5 + [False]
    said = "repeated with the decode on the CPU in float32, which is slow and may change last bits"
    assert said in caplog.text
    assert said in str(pipe.xattn_report())
    assert pipe.xattn_report().to_dict()["retries"][-1]["rung"] == 5
    assert all(torch.equal(weights[n], value) for n, value in pipe.vae.state_dict().items())
    # the next picture is as it was planned
    executor.replan = None
    assert bands_of(pipe.vae) == "low"
    assert (_run(pipe) == expected).all()
    assert executor.retries == []
    assert bands_of(pipe.vae) == "fast"


def test_a_decode_refused_in_sixteen_bits_is_made_in_float32():
    # not through `load`, which makes it float32 on a machine without a GPU
    pipe = build_random("random:sdxl-tiny", torch.bfloat16)
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    executor = _hold(pipe)
    with torch.no_grad(), _Refuse(pipe.vae.decoder, *range(5)):
        picture = pipe.vae.decode(latents.bfloat16(), return_dict=False)[0]
    assert executor.retries[-1].rung == 5
    assert {p.dtype for p in pipe.vae.parameters()} == {torch.bfloat16}
    pipe.disable_xattn()
    with torch.no_grad():
        expected = pipe.vae.float().decode(latents.bfloat16().float()).sample
    assert picture.dtype == torch.float32
    assert (picture - expected).abs().max() < 1e-3


def test_a_cast_vae_is_its_own_again(pipe):
    executor = _hold(pipe)
    latents = torch.full((1, 4, 8, 8), 0.5, dtype=torch.float64)
    with torch.no_grad():
        pipe.vae.to(dtype=torch.float64)
        wanted = pipe.vae.decode(latents).sample
        with _Refuse(pipe.vae.decoder, *range(5)):
            picture = pipe.vae.decode(latents).sample
        pipe.vae.to(dtype=torch.float32)
    assert executor.retries[-1].rung == 5
    assert (picture - wanted).abs().max() < 1e-3
    assert {p.dtype for p in pipe.vae.parameters()} == {torch.float32}


def test_every_decode_of_a_picture_may_end_there(pipe):
    executor = _hold(pipe)
    latents = torch.full((1, 4, 8, 8), 0.5)
    with torch.no_grad():
        expected = pipe.vae.decode(latents).sample
        with _Refuse(pipe.vae.decoder, 0, 1, 2, 3, 4, 6, 8):
            pictures = [pipe.vae.decode(latents).sample for _ in range(3)]
    assert [retry.rung for retry in executor.retries] == [1, 2, 3, 4, 5, 5, 5]
    assert all((picture - expected).abs().max() < 1e-3 for picture in pictures)


def test_where_that_is_refused_too_the_error_has_the_plans(pipe):
    executor = _hold(pipe)
    _run(pipe)
    held = executor.plan
    with _Refuse(pipe.vae.decoder, *range(9)) as decodes, pytest.raises(BudgetExceeded) as refusal:
        _run(pipe)
    assert decodes.calls == 6
    assert refusal.value.plans[0] == held
    assert "decode: vae was refused 96 MiB" in str(refusal.value)
    assert "--quality near" in str(refusal.value)


def test_an_encode_is_refused_and_names_near(pipe):
    executor = _hold(pipe)
    picture = torch.zeros(1, 3, 64, 64)
    with (
        torch.no_grad(),
        _Refuse(pipe.vae.encoder, *range(9)) as encodes,
        pytest.raises(BudgetExceeded, match="--quality near"),
    ):
        pipe.vae.encode(picture)
    assert encodes.calls == 5
    assert [retry.rung for retry in executor.retries] == [1, 2, 3, 4]


def test_steps_are_never_made_on_the_cpu(pipe):
    executor = _hold(pipe)

    def refuse(*_):
        raise torch.OutOfMemoryError(MESSAGE)

    handle = pipe.unet.register_forward_pre_hook(refuse)
    with pytest.raises(BudgetExceeded) as refusal:
        _run(pipe)
    handle.remove()
    assert [retry.rung for retry in executor.retries] == [1, 2, 3]
    assert "near" not in str(refusal.value)


def test_a_picture_that_the_card_has_no_room_for_stays_on_the_cpu(pipe, monkeypatch):
    latents = torch.full((1, 4, 8, 8), 0.5)
    home, to = torch.device("meta"), torch.Tensor.to

    def refused(self, *args, **kwargs):
        if args[:1] == (home,):
            raise torch.OutOfMemoryError(MESSAGE)
        return to(self, *args, **kwargs)

    with torch.no_grad():
        expected = pipe.vae.decode(latents).sample
        for as_dict in (True, False):

            def decode(given, as_dict=as_dict):
                return pipe.vae.decode(given, return_dict=as_dict)

            assert decode_in_fp32(pipe.vae, decode, latents, CPU, home)[0].device == home
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "to", refused)
                picture = decode_in_fp32(pipe.vae, decode, latents, CPU, home)[0]
            assert torch.equal(picture, expected)
