"""With --json, a failure is a JSON object on stdout too, beside the message on stderr."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from sdx_accel.errors import SdxError

__all__ = ["json_on_error", "print_failure"]


@contextmanager
def json_on_error(wanted: bool) -> Iterator[None]:
    """Print `{"error": {"type", "message", "exit_code"}}` and let the error go on.

    Args:
        wanted: whether --json was given.
    """
    try:
        yield
    except Exception as error:
        if wanted:
            exit_code = error.exit_code if isinstance(error, SdxError) else 1
            print_failure(type(error).__name__, str(error), exit_code)
        raise


def print_failure(kind: str, message: str, exit_code: int) -> None:
    """Print the object that stands for a failure."""
    failure = {"type": kind, "message": message, "exit_code": exit_code}
    print(json.dumps({"error": failure}), flush=True)
