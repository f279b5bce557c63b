"""What the benchmarks' options take, refused in words where it makes no sense."""

import argparse

__all__ = ["at_least_one", "gibibytes"]


def at_least_one(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def gibibytes(text: str) -> tuple[float, ...]:
    """Budgets in GiB, separated by commas."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} are no budgets in GiB, such as 8,6.8")
    return found
