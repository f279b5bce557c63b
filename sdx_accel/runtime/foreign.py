"""How much of a card to use beside other programs: falls at once, returns slowly."""

from sdx_accel.budget.units import FREE_STEP_BYTES, MIB

__all__ = ["FreeMemory"]


class FreeMemory:
    """The budget in force while free memory changes.

    Args:
        step: bytes; a smaller return of memory is not worth another plan. Two steps stay free
            after a return, so that swings of less than two steps never make plans alternate.
    """

    def __init__(self, step: int = 256 * MIB) -> None:
        self.step = step
        self._held: int | None = None

    def usable(self, asked: int, free_now: int) -> int:
        """What to hold for the next picture.

        Args:
            asked: bytes that the user's request comes to now.
            free_now: bytes that this process could use at most: the driver's free memory plus
                what it has already.

        Returns:
            At most `free_now`, in steps of 64 MiB where that is less than `asked`.
        """
        distance = 0 if self._held is None else self._held - asked
        # a request to leave memory free falls with it, once that is more than a swing
        if self._held is None or self._held > free_now or distance >= 2 * self.step:
            self._held = min(asked, _floor(free_now, FREE_STEP_BYTES))
        else:
            back = min(asked, _floor(free_now - 2 * self.step, FREE_STEP_BYTES))
            if back >= self._held + self.step:
                self._held = back
        return self._held


def _floor(n_bytes: int, step: int) -> int:
    return n_bytes // step * step
