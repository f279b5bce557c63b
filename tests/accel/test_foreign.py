"""Other programs on the card: the budget falls at once, and returns without swinging."""

import os
from types import SimpleNamespace

import pytest
import torch

from sdx_accel.budget.units import GIB, MIB
from sdx_accel.runtime import probe
from sdx_accel.runtime.foreign import FreeMemory


def _follow(asked, readings):
    memory = FreeMemory()
    return [memory.usable(asked, free) for free in readings]


def test_foreign_use_shrinks_at_once_and_returns_with_hysteresis():
    held = _follow(
        8 * GIB,
        [
            12 * GIB,
            # another program takes what lies beyond the budget
            8 * GIB,
            # then 1 GiB of it: at once, in steps of 64 MiB
            7 * GIB + 50 * MIB,
            7 * GIB + 300 * MIB,
            # two steps stay free, so half a GiB has to return before anything changes
            7 * GIB + 700 * MIB,
            8 * GIB,
            9 * GIB,
        ],
    )
    assert held == [
        8 * GIB,
        8 * GIB,
        7 * GIB,
        7 * GIB,
        7 * GIB,
        7 * GIB + 512 * MIB,
        8 * GIB,
    ]


@pytest.mark.parametrize("asked", [8 * GIB, 6 * GIB])
@pytest.mark.parametrize("centre", [6 * GIB, 7 * GIB + 100 * MIB, 9 * GIB])
def test_swings_of_200_mib_settle_on_one_plan(asked, centre):
    readings = [centre + swing * MIB for swing in (-200, 200, 0, -200, 150, 200, -120, -200, 200)]
    held = _follow(asked, readings)
    assert len(set(held)) == 1
    assert held[0] <= min(asked, min(readings))


def test_what_is_held_never_exceeds_what_is_free_or_asked():
    readings = [(5000 + (i * 7919) % 3000) * MIB for i in range(200)]
    memory = FreeMemory()
    changes, before = 0, None
    for free in readings:
        held = memory.usable(7 * GIB, free)
        assert held <= min(free, 7 * GIB)
        changes += held != before
        before = held
    assert changes > 1


def test_a_request_that_grows_with_free_memory_follows_it():
    memory = FreeMemory()

    def auto(free):
        return memory.usable(free - 512 * MIB, free)

    assert auto(8 * GIB) == 7 * GIB + 512 * MIB
    # within the margin that auto leaves: nothing changes
    assert auto(8 * GIB - 200 * MIB) == 7 * GIB + 512 * MIB
    assert auto(8 * GIB + 200 * MIB) == 7 * GIB + 512 * MIB
    # beyond it: the margin is kept, although what was held would still fit
    assert auto(7 * GIB + 512 * MIB) == 7 * GIB
    assert auto(6 * GIB) == 5 * GIB + 512 * MIB
    assert auto(9 * GIB) == 8 * GIB + 512 * MIB


def test_swings_do_not_move_a_request_that_follows_free_memory():
    memory = FreeMemory()
    readings = [8 * GIB + swing * MIB for swing in (200, -200, 0, 200, -150, -200, 200)]
    assert len({memory.usable(free - 512 * MIB, free) for free in readings}) == 1


class Driver:
    """NVML of one card; `mine` is what it tells of this process, None in most containers."""

    NVMLError = RuntimeError

    def __init__(self):
        self.used, self.mine = 2 * GIB, None

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=self.used, total=8 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        if self.mine is None:
            return []
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=self.mine)]


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(probe, "_nvml", lambda: found)
    monkeypatch.setattr(probe, "_handles", lambda: {"GPU-1": "handle"})
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: GIB // 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * GIB - found.used, 8 * GIB))
    return found


def test_what_others_take_is_not_counted_as_ours(driver):
    # 1 GiB before this process began, then 0.5 of torch's and 0.5 of context and libraries
    card = probe.Card(torch.device("cuda", 0), "GPU-1", GIB)
    card.settle()
    assert (card.non_torch_bytes(), card.free_bytes()) == (GIB // 2, 7 * GIB)
    driver.used += 40 * MIB
    assert card.non_torch_bytes() == GIB // 2 + 40 * MIB
    assert not card.is_disturbed()
    # another program comes: its 2 GiB are not ours, so less is free for this process
    driver.used += 2 * GIB
    assert card.non_torch_bytes() == GIB // 2 + probe.LAZY_BYTES
    assert card.is_disturbed()
    assert card.free_bytes() <= 5 * GIB + probe.LAZY_BYTES
    # and goes, with what was there before this process began
    driver.used = GIB
    assert card.non_torch_bytes() == GIB // 2
    assert not card.is_disturbed()


def test_where_the_driver_tells_nothing_is_guessed(driver):
    card = probe.Card(torch.device("cuda", 0), "GPU-1", GIB)
    driver.mine = GIB
    card.settle()
    driver.used += 2 * GIB
    assert card.non_torch_bytes() == GIB // 2
    driver.mine += GIB
    assert card.non_torch_bytes() == GIB + GIB // 2
    assert probe.Card(torch.device("cuda", 0), "GPU-2", None).non_torch_bytes() is None
