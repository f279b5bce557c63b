"""With --json, a failure is a JSON object on stdout too, beside the message on stderr."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from sdx_accel.errors import SdxError

__all__ = ["json_on_error"]


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
            failure = {
                "type": type(error).__name__,
                "message": str(error),
                "exit_code": exit_code,
            }
            print(json.dumps({"error": failure}), flush=True)
        raise
