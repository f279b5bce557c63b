"""Prints how many combinations of the matrix were run, and what it leaves out."""

from typing import Any

from .operations import EXCLUDED
from .orders import COUNTS, combinations


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Only where tests of the matrix were run."""
    if not COUNTS:
        return
    every = combinations()
    done = ", ".join(f"{count} {what}" for what, count in sorted(COUNTS.items()))
    pairs = len({(order.first, order.second) for order in every})
    terminalreporter.write_line(
        f"order matrix: {pairs} ordered pairs, {len(every)} combinations; this run: {done}"
    )
    for name, reason in EXCLUDED.items():
        terminalreporter.write_line(f"order matrix: left out: {name}: {reason}")
