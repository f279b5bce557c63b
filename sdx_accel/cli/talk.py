"""Where each kind of message goes: results to stdout, notes and progress to stderr.

With --json, stdout is one JSON object and everything else goes to stderr. Knows streams only.
"""

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["Talk", "one_voice"]


class Talk:
    """One command's voice.

    Args:
        as_json: whether stdout is for a program.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.notes: list[str] = []
        self._stdout_lost = False

    def say(self, text: str) -> None:
        """A line of the result for people."""
        if self.as_json:
            print(text, file=sys.stderr, flush=True)
        else:
            self._print(text)

    def note(self, text: str) -> None:
        """Something the user should know; the same sentence is said once."""
        if text not in self.notes:
            self.notes.append(text)
            print(f"note: {text}", file=sys.stderr, flush=True)

    def result(self, paths: list[str], values: dict[str, Any]) -> None:
        """The end: one JSON object, or one path a line."""
        if self.as_json:
            # ASCII, so that no console's encoding can spoil it
            self._print(json.dumps({"paths": paths, **values}))
        else:
            for path in paths:
                self._print(path)
        if self._stdout_lost:
            self.note(f"saved: {', '.join(paths)}")

    def _print(self, text: str) -> None:
        """A line to stdout; where nobody can read it any more, the work goes on all the same."""
        if self._stdout_lost:
            return
        try:
            if sys.stdout is None:
                raise ValueError("it is closed")
            print(text, flush=True)
        except (OSError, ValueError) as error:
            self._stdout_lost = True
            cause = getattr(error, "strerror", None) or error
            self.note(f"standard output cannot be written ({cause})")
            # Python flushes the rest at its end and would fail again
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Notes(logging.Handler):
    """Turns what the plug-in logs into notes."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(logging.INFO)
        self._talk = talk

    def emit(self, record: logging.LogRecord) -> None:
        self._talk.note(record.getMessage())


@contextmanager
def one_voice(talk: Talk) -> Iterator[None]:
    """The plug-in's warnings become notes; its plans, which are printed already, are not repeated.

    Args:
        talk: receives the notes.
    """
    # the kernels speak once, when they are first compiled, and the patches, of what a newer
    # diffusers lacks; the plug-in's INFO is its plans
    levels = {
        "sdx_accel": logging.WARNING,
        "sdx_kernels": logging.INFO,
        "sdx_patches": logging.WARNING,
    }
    logs = [logging.getLogger(name) for name in levels]
    before = [(log.handlers, log.level, log.propagate) for log in logs]
    for log in logs:
        log.handlers, log.propagate = [_Notes(talk)], False
        log.setLevel(levels[log.name])
    try:
        with _quiet_hosts():
            yield
    finally:
        for log, (handlers, level, propagate) in zip(logs, before, strict=True):
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)


@contextmanager
def _quiet_hosts() -> Iterator[None]:
    """Keep diffusers and transformers from talking over us; their settings are put back after.

    What they would warn of (cut prompts, dtype changes, deprecations of each other) is either
    said by us in one sentence or nothing that the user can act on. SDX_DEBUG=1 lets it through.
    """
    if os.environ.get("SDX_DEBUG", "") not in ("", "0"):
        yield
        return
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    hosts = (diffusers_logging, transformers_logging)
    levels = [host.get_verbosity() for host in hosts]
    bars = [host.is_progress_bar_enabled() for host in hosts]
    for host in hosts:
        host.set_verbosity_error()
        host.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            for name in ("diffusers", "transformers", "torch", "huggingface_hub", "peft"):
                warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
            yield
    finally:
        for host, level, bar in zip(hosts, levels, bars, strict=True):
            host.set_verbosity(level)
            if bar:
                host.enable_progress_bar()
