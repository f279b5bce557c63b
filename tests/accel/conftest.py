"""Shared by the plug-in's tests: the command line in this process, and a folder to work in."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest


class CliResult(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def paths(self) -> list[Path]:
        """The saved pictures: the last lines of stdout that name files."""
        return [Path(line) for line in self.out.splitlines() if Path(line).is_file()]


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CliResult]:
    """Runs `sdx-accel ARGS…` in `tmp_path` and gives back what it returned and printed."""
    from sdx_accel.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SDX_DEBUG", raising=False)
    monkeypatch.delenv("SDX_DISABLE", raising=False)

    def run(*args: object) -> CliResult:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return CliResult(code, captured.out, captured.err)

    return run
