"""Shared by the plug-in's tests: the command line in this process, and a folder to work in."""

import shutil
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


@pytest.fixture(scope="session")
def saved_tiny_sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`random:sdxl-tiny` as a diffusers folder; not to be written to."""
    from sdx_accel.runtime.checkpoints import load

    place = tmp_path_factory.mktemp("model") / "m"
    load("random:sdxl-tiny").save_pretrained(place)
    return place


@pytest.fixture
def model(saved_tiny_sdxl: Path, tmp_path: Path) -> Path:
    """A copy of that folder for one test to break."""
    return Path(shutil.copytree(saved_tiny_sdxl, tmp_path / "m"))
