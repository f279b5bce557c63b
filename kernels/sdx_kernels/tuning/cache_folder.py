"""Where this user's runs leave small files for the next ones; it knows no file."""

import os
import sys
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path | None:
    """`$SDX_CACHE`, else `sdx_accel` in the user's cache folder; None without a home folder."""
    if named := os.environ.get("SDX_CACHE"):
        return Path(named)
    if cache := os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"):
        return Path(cache) / "sdx_accel"
    # without a home folder expanduser returns "~" as it came
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "sdx_accel" if os.path.isabs(home) else None
