"""Threads that switch one pipeline on and off at once: one after the other, nothing half done."""

import threading

import pytest
import torch

import sdx_accel  # noqa: F401  (attaches the methods)
import sdx_patches
from sdx_accel.runtime import budget_session
from sdx_accel.runtime.checkpoints import load

#: longer than any of these takes on a busy machine: a lock that nobody gives back shows as this
PATIENCE = 120


@pytest.fixture
def pipe():
    loaded = load("random:sdxl-tiny", dtype="fp32")
    loaded.set_progress_bar_config(disable=True)
    return loaded


def _at_once(*works):
    """Run each in a thread of its own; what they raised."""
    raised, barrier = [], threading.Barrier(len(works))

    def run(work):
        try:
            barrier.wait(PATIENCE)
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    return raised


def _state(pipe):
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return (
        type(pipe),
        sorted(vars(pipe)),
        [type(module) for module in modules],
        {name: type(processor) for name, processor in pipe.unet.attn_processors.items()},
        [len(m._forward_pre_hooks) + len(m._forward_hooks) for r in modules for m in r.modules()],
    )


@pytest.fixture
def slow_sessions(monkeypatch):
    """Sessions that are made one while another is being made; the most at once are returned."""
    inside, most = [], []

    class Slow(budget_session.BudgetSession):
        def __init__(self, *args):
            inside.append(None)
            most.append(len(inside))
            # where there is no lock, the other thread comes by meanwhile
            threading.Event().wait(0.2)
            super().__init__(*args)
            inside.pop()

    monkeypatch.setattr("sdx_accel.api.BudgetSession", Slow)
    return most


def test_two_budgets_at_once_are_one_session(pipe, slow_sessions):
    stock = type(pipe)
    before = _state(pipe)

    def enable(vram):
        return lambda: pipe.enable_xattn(vram=vram, device="cpu", learn=False)

    assert _at_once(enable(4), enable(8)) == []
    # the second one changed the first one's session
    assert slow_sessions == [1]
    assert type(pipe).__bases__ == (stock,)
    assert all(type(part).__bases__[0] in before[2] for part in (pipe.unet, pipe.vae))
    assert pipe.xattn_report().plan.budget_gib in (4, 8)
    pipe.disable_xattn()
    assert _state(pipe) == before


def test_on_and_off_at_once_leave_one_or_the_other(pipe, slow_sessions):
    before = _state(pipe)

    def on():
        pipe.enable_xattn(vram=8, device="cpu", learn=False)

    def off():
        # in the middle of the other's work, where nobody waits
        threading.Event().wait(0.1)
        pipe.disable_xattn()

    def report():
        for _ in range(4):
            plan = pipe.xattn_report().plan
            assert plan is None or plan.budget_gib == 8

    assert _at_once(on, off, report) == []
    held = "_sdx_budget" in vars(pipe)
    assert any(layer.patched for layer in sdx_patches.layers(pipe)) is held
    pipe.disable_xattn()
    assert _state(pipe) == before


def test_a_refused_call_gives_the_turn_back(pipe):
    before = _state(pipe)
    with pytest.raises(ValueError):
        pipe.enable_xattn(vram="nonsense")
    with pytest.raises(ValueError):
        pipe.enable_xattn(vram="auto", device="cpu")
    assert _at_once(lambda: pipe.enable_xattn(), lambda: pipe.unet.enable_xattn()) == []
    pipe.disable_xattn()
    pipe.unet.disable_xattn()
    assert _state(pipe) == before


def test_the_thread_that_has_the_turn_may_call_again(pipe):
    """A callback that runs inside (a log handler, say) switches something else."""
    from sdx_accel import api

    def nested():
        with api._turn:
            pipe.enable_xattn()
            pipe.disable_xattn()

    assert _at_once(nested) == []
