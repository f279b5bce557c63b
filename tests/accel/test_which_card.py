"""Case 101: a budget stays on the card that it was asked for, however often it runs."""

import gc

import pytest
import torch
from torch.overrides import TorchFunctionMode

import sdx_accel  # noqa: F401  (attaches the methods)
from sdx_accel import api
from sdx_accel.budget.machine import Machine
from sdx_accel.runtime import budget_session
from sdx_accel.runtime.checkpoints import load
from sdx_accel.runtime.copies import HostCopies
from sdx_accel.runtime.enforce import NoEnforcer
from sdx_accel.runtime.executor import Executor
from sdx_accel.runtime.pinning import HostPinner
from sdx_accel.runtime.session_plans import Place


class Cards(TorchFunctionMode):
    """Has the CPU stand in for every card, and notes which ones were meant."""

    def __init__(self):
        self.meant = set()

    def _real(self, value):
        if isinstance(value, torch.device) and value.type == "cuda":
            self.meant.add(value)
            return torch.device("cpu")
        return value

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = tuple(self._real(value) for value in args)
        kwargs = {name: self._real(value) for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)

    def take(self):
        """Those that were meant since the last time."""
        meant, self.meant = self.meant, set()
        return meant


@pytest.fixture
def cards(monkeypatch):
    class Moving(Executor):
        def __init__(self, *args, moves):
            assert moves
            super().__init__(*args, moves=True, copies=HostCopies(), pinner=HostPinner())

    def start_card(self, modules):
        return Place(Machine.generic()), NoEnforcer()

    monkeypatch.setattr(budget_session, "Executor", Moving)
    monkeypatch.setattr(budget_session.BudgetSession, "_start_card", start_card)
    monkeypatch.setattr(api, "_check_cuda", lambda chosen: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with Cards() as cards:
        yield cards


@pytest.fixture
def pipe():
    loaded = load("random:sdxl-tiny", dtype="fp32")
    loaded.set_progress_bar_config(disable=True)
    return loaded


def _run(pipe, seed=0, **arguments):
    arguments = {"height": 64, "width": 64, "num_inference_steps": 2, **arguments}
    generator = torch.Generator().manual_seed(seed)
    return pipe("a red apple", generator=generator, output_type="pt", **arguments).images.cpu()


def test_case_101_the_card_is_the_same_in_every_run(pipe, cards):
    one, zero = torch.device("cuda:1"), torch.device("cuda:0")
    pipe.enable_xattn(vram=8, device="cuda:1", learn=False)
    first = _run(pipe)
    assert cards.take() == {one}
    for height in (64, 96):
        _run(pipe, height, height=height)
        assert cards.take() == {one}
        assert pipe.device == pipe._execution_device == one
    # another budget on the same card
    pipe.enable_xattn(vram=6, device="cuda:1", learn=False)
    assert torch.equal(_run(pipe), first)
    assert cards.take() == {one}
    # a zero is a number like any other
    pipe.enable_xattn(vram=8, device="cuda:0", learn=False)
    for _ in range(2):
        assert torch.equal(_run(pipe), first)
        assert cards.take() == {zero}
        assert pipe.device == zero
    pipe.disable_xattn()
    assert pipe.device == torch.device("cpu")
    assert torch.allclose(_run(pipe), first, atol=1e-4)
    assert cards.take() == set()


def test_case_101_a_card_without_a_number_is_that_of_the_moment(pipe, cards, monkeypatch):
    pipe.enable_xattn(vram=8, device="cuda", learn=False)
    session = pipe.__dict__["_sdx_budget"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    _run(pipe)
    assert cards.take() == {torch.device("cuda:3")}
    assert pipe.device == torch.device("cuda:3")
    # the same card by its number is the same session
    pipe.enable_xattn(vram=6, device="cuda:3", learn=False)
    assert pipe.__dict__["_sdx_budget"] is session
    pipe.disable_xattn()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_case_101_on_two_cards():
    gc.collect()
    pipe = load("random:sd15", dtype="fp16")
    pipe.set_progress_bar_config(disable=True)
    base = [torch.cuda.memory_allocated(card) for card in range(2)]
    seen = {}
    for card in (1, 0, 1):
        pipe.enable_xattn(vram=3.0, device=f"cuda:{card}", learn=False)
        for seed in range(3):
            other = 1 - card
            torch.cuda.reset_peak_memory_stats(other)
            picture = _run(pipe, seed, height=512, width=512)
            assert torch.equal(picture, seen.setdefault(seed, picture))
            assert pipe.device == torch.device("cuda", card)
            assert torch.cuda.max_memory_allocated(other) <= base[other]
            assert torch.cuda.memory_allocated(card) > base[card]
    pipe.disable_xattn()
