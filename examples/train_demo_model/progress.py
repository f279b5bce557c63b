"""What a run is busy with, said before and after, so that one that is stuck says where.

Knows the time only; whoever measures work of a GPU waits for the GPU inside the part.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SLOW_S", "Clock"]

#: a part that takes longer is named again and again, seconds
SLOW_S = 60.0


class Clock:
    """Seconds since it was made, against a limit for everything.

    Attributes:
        parts: (name, seconds) of every part that has ended, in that order.
    """

    def __init__(self, total: float, prefix: str = "") -> None:
        self.start, self.total, self.prefix = time.monotonic(), total, prefix
        self.parts: list[tuple[str, float]] = []

    def passed(self) -> float:
        return time.monotonic() - self.start

    def left(self, reserve: float = 0.0) -> float:
        return max(0.0, self.total - reserve - self.passed())

    def say(self, text: str) -> None:
        """Print a line at once: what is still in a buffer when a run is ended is lost."""
        print(f"{self.passed():6.1f} s  {self.prefix}{text}", flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Say when `name` begins, when it ends, and every `SLOW_S` seconds that it does not."""
        begun, ended = self.passed(), threading.Event()

        def watch() -> None:
            while not ended.wait(SLOW_S):
                self.say(f"{name}: still at it, slow, after {self.passed() - begun:.0f} s")

        self.say(f"{name} ...")
        # a thread, since a compiler or a GPU that is stuck would not come back to ask
        threading.Thread(target=watch, daemon=True).start()
        outcome = "failed after"
        try:
            yield
            outcome = "took"
        finally:
            ended.set()
            seconds = self.passed() - begun
            self.parts.append((name, round(seconds, 2)))
            self.say(f"{name} {outcome} {seconds:.1f} s")
