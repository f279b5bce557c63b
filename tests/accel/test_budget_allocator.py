"""The model of torch's caching allocator, rule by rule, and against a measured run."""

import random

import pytest

from sdx_accel.budget.allocator import CachingAllocator, OutOfBudget, reserved_peak, smallest_cap
from sdx_accel.budget.units import MIB


def test_small_tensors_share_a_two_mebibyte_segment():
    allocator = CachingAllocator()
    for i in range(4):
        allocator.alloc(i, 300 * 1024)
    assert allocator.reserved == 2 * MIB


def test_middle_tensors_come_from_twenty_mebibyte_segments():
    allocator = CachingAllocator()
    allocator.alloc(0, 3 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.alloc(1, 9 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.alloc(2, 9 * MIB)
    assert allocator.reserved == 40 * MIB


def test_large_tensors_round_to_two_mebibytes():
    allocator = CachingAllocator()
    allocator.alloc(0, 10 * MIB + 1)
    assert allocator.reserved == 12 * MIB


def test_neighbours_coalesce_on_release():
    allocator = CachingAllocator()
    for i in range(3):
        allocator.alloc(i, 6 * MIB)
    for i in (1, 0, 2):
        allocator.free(i)
    allocator.alloc(3, 18 * MIB)
    assert allocator.reserved == 20 * MIB


def test_best_fit_takes_the_tightest_block():
    allocator = CachingAllocator()
    for i, size in enumerate((30, 14)):
        allocator.alloc(i, size * MIB)
    for i in (0, 1):
        allocator.free(i)
    allocator.alloc(2, 12 * MIB)
    allocator.alloc(3, 28 * MIB)
    assert allocator.reserved == 44 * MIB


def test_pressure_releases_whole_free_segments_first():
    allocator = CachingAllocator(cap=40 * MIB)
    allocator.alloc(0, 30 * MIB)
    allocator.free(0)
    allocator.alloc(1, 36 * MIB)
    assert allocator.reserved == 36 * MIB
    with pytest.raises(OutOfBudget):
        allocator.alloc(2, 6 * MIB)


def test_a_segment_in_use_cannot_be_released():
    allocator = CachingAllocator(cap=40 * MIB)
    allocator.alloc(0, 6 * MIB)
    allocator.alloc(1, 6 * MIB)
    allocator.free(0)
    with pytest.raises(OutOfBudget):
        allocator.alloc(2, 30 * MIB)


def _random_events(seed: int) -> list[tuple[int, int, int]]:
    source = random.Random(seed)
    live: list[int] = []
    events = []
    for i in range(400):
        if live and source.random() < 0.5:
            events.append((-1, live.pop(source.randrange(len(live))), 0))
        else:
            events.append((1, i, int(source.choice((0.3, 3, 12, 70)) * source.random() * MIB) + 1))
            live.append(i)
    return events


@pytest.mark.parametrize("seed", range(5))
def test_accounts_stay_consistent(seed):
    events = _random_events(seed)
    allocator = CachingAllocator()
    live: dict[int, int] = {}
    for kind, tensor, size in events:
        if kind > 0:
            allocator.alloc(tensor, size)
            live[tensor] = -(-size // 512) * 512
        else:
            allocator.free(tensor)
            del live[tensor]
        # a block may keep up to 1 MiB that was too little to split off
        assert sum(live.values()) <= allocator.allocated <= sum(live.values()) + len(live) * MIB
        assert allocator.allocated <= allocator.reserved
    for tensor in live:
        allocator.free(tensor)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_smallest_cap_is_the_edge(seed):
    events = _random_events(seed)
    cap = smallest_cap(events)
    assert reserved_peak(events, cap) <= cap
    with pytest.raises(OutOfBudget):
        reserved_peak(events, cap - 2 * MIB)
