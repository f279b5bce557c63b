"""The progress of one picture: a bar on a terminal, a few plain lines elsewhere.

Knows steps and time; knows nothing of pipelines but the signature of their step callback.
"""

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

__all__ = ["StepProgress"]

# without a terminal, a line every tenth of the way is enough for a log
LOG_LINES = 10


class StepProgress:
    """Shows steps as they finish. A context manager; its `callback` goes to the pipeline.

    Args:
        steps: expected number of steps; corrected when the pipeline knows better.
        title: what is being made, for instance "picture 2 of 4".
    """

    def __init__(self, steps: int, title: str) -> None:
        self.steps = steps
        self.done = 0
        self._title = title
        self._marks: list[float] = []
        self._task: TaskID | None = None
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.completed}/{task.total}"),
            TextColumn("{task.fields[pace]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )

    def __enter__(self) -> "StepProgress":
        self._marks = [time.perf_counter()]
        if self._console.is_terminal:
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self.steps, pace="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._bar.stop()

    @property
    def seconds_per_step(self) -> float | None:
        """Mean time of a step; the first, which warms up, only counts when it is the only one."""
        first = 1 if self.done > 1 else 0
        steps = self.done - first
        return (self._marks[-1] - self._marks[first]) / steps if steps > 0 else None

    def callback(
        self, pipe: Any, step: int, timestep: Any, values: dict[str, Any]
    ) -> dict[str, Any]:
        """diffusers' `callback_on_step_end`."""
        self.steps = int(getattr(pipe, "num_timesteps", None) or self.steps)
        self.done = step + 1
        self._marks.append(time.perf_counter())
        pace = f"{self.seconds_per_step or 0.0:.3g} s/step"
        if self._task is not None:
            self._bar.update(self._task, completed=self.done, total=self.steps, pace=pace)
        elif self._is_logged():
            print(
                f"{self._title}: step {self.done}/{self.steps}, {pace}",
                file=sys.stderr,
                flush=True,
            )
        return values

    def _is_logged(self) -> bool:
        stride = max(self.steps // LOG_LINES, 1)
        return self.done in (1, self.steps) or self.done % stride == 0
