"""Small JSON files that this user's runs leave for the next ones. Knows folders, not contents.

`cache_folder` is the kernels' own, which read the order that was measured on a card from it.
"""

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from sdx_kernels.tuning.cache_folder import cache_folder

__all__ = ["cache_folder", "read_values", "write_values"]

_log = logging.getLogger("sdx_accel")


def read_values(folder: Path | None, name: str) -> dict[str, Any] | None:
    """What a file holds, or None where it is missing, unreadable or no JSON object."""
    if folder is None:
        return None
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.info("%s cannot be read and is made anew (%s)", folder / name, _reason(error))
        return None
    return values if isinstance(values, dict) else None


def write_values(folder: Path | None, name: str, values: dict[str, Any]) -> bool:
    """Replace a file in one go: two processes leave one whole file, never a mixture.

    Returns:
        Whether it was written; where it cannot be, one line says so and nothing else happens.
    """
    if folder is None:
        return False
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}-")
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1, sort_keys=True)
        os.replace(temporary, folder / name)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        _log.info("%s cannot be kept for the next run (%s)", folder / name, _reason(error))
        return False
    return True


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
