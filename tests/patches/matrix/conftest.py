"""Hands over how many combinations of the matrix were run here, and what it leaves out."""

import pytest

from ...conftest import ORDER_MATRIX
from .operations import EXCLUDED
from .orders import COUNTS, combinations


def pytest_sessionfinish(session: pytest.Session) -> None:
    """To tests/conftest.py, which prints it; under `-n` that is in another process than this."""
    if not COUNTS:
        return
    every = combinations()
    found = {
        "pairs": len({(order.first, order.second) for order in every}),
        "combinations": len(every),
        "excluded": EXCLUDED,
        "counts": dict(COUNTS),
    }
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["order matrix"] = found
    else:
        session.config.stash.setdefault(ORDER_MATRIX, []).append(found)
