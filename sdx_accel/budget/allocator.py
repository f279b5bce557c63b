"""A model of torch's CUDA caching allocator, so that *reserved* memory can be predicted.

What the driver sees is not the live tensors but the segments that torch holds for them; the gap is
10-25 % in a diffusion run. The rules modelled here (rounding, pools, segment sizes, best fit,
splitting, coalescing, release on pressure) are those of torch 2.7-2.13's defaults,
c10/cuda/CUDACachingAllocator.cpp; expandable segments and `max_split_size_mb` are not modelled.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from sdx_accel.budget.units import MIB

__all__ = ["CachingAllocator", "OutOfBudget", "reserved_peak", "smallest_cap"]

ROUND = 512
SMALL_LIMIT = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_LIMIT = 10 * MIB
LARGE_ROUND = 2 * MIB

# ("alloc" is +1, "free" is -1), tensor id, bytes
Event = tuple[int, int, int]


class OutOfBudget(Exception):
    """The allocator could not serve a request within its cap, cached segments released."""


@dataclass(eq=False)
class _Block:
    address: int
    size: int
    small: bool
    segment: int
    free: bool = True
    previous: "_Block | None" = None
    following: "_Block | None" = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


class CachingAllocator:
    """Allocator state; all sizes in bytes.

    Args:
        cap: most bytes it may reserve, None for no limit.
    """

    def __init__(self, cap: int | None = None) -> None:
        self.cap = cap
        self.reserved = 0
        self.peak_reserved = 0
        self.allocated = 0
        self.peak_allocated = 0
        self._live: dict[int, _Block] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._by_address: dict[int, _Block] = {}
        self._next_address = 0

    def alloc(self, tensor: int, n_bytes: int) -> None:
        """Serve a tensor.

        Raises:
            OutOfBudget: it does not fit under the cap.
        """
        size = max(ROUND, -(-n_bytes // ROUND) * ROUND)
        small = size <= SMALL_LIMIT
        block = self._best_fit(size, small) or self._new_segment(size, small)
        self._forget(block)
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL_LIMIT:
            tail = _Block(
                block.address + size, rest, small, block.segment, True, block, block.following
            )
            if block.following:
                block.following.previous = tail
            block.following, block.size = tail, size
            self._remember(tail)
        block.free = False
        self._live[tensor] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, tensor: int) -> None:
        """Give a tensor's block back to the cache, merged with free neighbours."""
        block = self._live.pop(tensor)
        self.allocated -= block.size
        block.free = True
        for other in (block.previous, block.following):
            if other is not None and other.free:
                self._forget(other)
                block.address = min(block.address, other.address)
                block.size += other.size
                if other is block.previous:
                    block.previous = other.previous
                    if other.previous:
                        other.previous.following = block
                else:
                    block.following = other.following
                    if other.following:
                        other.following.previous = block
        self._remember(block)

    def empty_cache(self) -> None:
        """Return every wholly free segment to the driver."""
        for block in list(self._by_address.values()):
            if block.size == block.segment:
                self._forget(block)
                self.reserved -= block.size

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        pool = self._free[small]
        at = bisect_left(pool, (size, -1))
        return self._by_address[pool[at][1]] if at < len(pool) else None

    def _new_segment(self, size: int, small: bool) -> _Block:
        if small:
            segment = SMALL_SEGMENT
        elif size < LARGE_LIMIT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // LARGE_ROUND) * LARGE_ROUND
        if self.cap is not None and self.reserved + segment > self.cap:
            self.empty_cache()
            if self.reserved + segment > self.cap:
                raise OutOfBudget
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = _Block(self._next_address, segment, small, segment)
        self._next_address += segment + LARGE_ROUND  # segments never touch
        self._remember(block)
        return block

    def _remember(self, block: _Block) -> None:
        insort(self._free[block.small], block.key)
        self._by_address[block.address] = block

    def _forget(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, block.key)]
        del self._by_address[block.address]


def _replay(events: Iterable[Event], cap: int | None) -> CachingAllocator:
    allocator = CachingAllocator(cap)
    for kind, tensor, n_bytes in events:
        if kind > 0:
            allocator.alloc(tensor, n_bytes)
        else:
            allocator.free(tensor)
    return allocator


def reserved_peak(events: Iterable[Event], cap: int | None = None) -> int:
    """Most bytes torch reserves while `events` run on an empty cache.

    Raises:
        OutOfBudget: `cap` is too small.
    """
    return _replay(events, cap).peak_reserved


def smallest_cap(events: list[Event]) -> int:
    """Smallest cap (to 2 MiB) under which `events` run, cached segments released on pressure."""
    free_run = _replay(events, None)
    low, high = free_run.peak_allocated // LARGE_ROUND, -(-free_run.peak_reserved // LARGE_ROUND)
    while low < high:
        middle = (low + high) // 2
        try:
            _replay(events, middle * LARGE_ROUND)
        except OutOfBudget:
            low = middle + 1
        else:
            high = middle
    return high * LARGE_ROUND
