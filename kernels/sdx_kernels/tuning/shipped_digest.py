"""What names the tables that come with the package, before anything was measured on this card."""

import functools
import hashlib
from pathlib import Path

__all__ = ["shipped_digest"]


@functools.cache
def shipped_digest() -> str:
    """Twelve hex digits of all tables, which decide who runs and with which tile."""
    everything = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        everything.update(file.name.encode() + file.read_bytes())
    return everything.hexdigest()[:12]
