"""The command line: flags in, pictures and messages out. Never imports torch at import time."""

from sdx_accel.cli.app import main

__all__ = ["main"]
