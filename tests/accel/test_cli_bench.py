"""`sdx-accel bench` hands over to the benchmarks; what it adds is a refusal and exit codes."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sdx_kernels

Cli = Callable[..., Any]
MODULES = {"pictures": "gpu", "steps": "steps", "decode": "decode", "streaming": "streaming"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def stand_in(monkeypatch: pytest.MonkeyPatch, what: str, end: Any = None) -> list[list[str]]:
    """Put a benchmark that only notes its command line in the place of one."""
    seen: list[list[str]] = []

    def main() -> None:
        seen.append(sys.argv)
        if isinstance(end, Exception):
            raise end
        if end is not None:
            sys.exit(end)

    module = importlib.import_module(f"sdx_accel.bench.{MODULES[what]}")
    monkeypatch.setattr(module, "main", main)
    return seen


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("what", list(MODULES))
def test_what_follows_goes_to_the_benchmark(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    seen, before = stand_in(monkeypatch, what), sys.argv
    assert cli("bench", what, "--rounds", "2", "-x").code == 0
    assert seen == [[f"python -m sdx_accel.bench.{MODULES[what]}", "--rounds", "2", "-x"]]
    assert sys.argv is before


@pytest.mark.usefixtures("gpu")
def test_pictures_are_the_default(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch, "pictures")
    assert cli("bench").code == 0
    assert seen == [["python -m sdx_accel.bench.gpu"]]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("end", "code"), [(0, 0), (False, 0), (True, 1), (1, 1), (2, 2), (OSError("lost"), 1)]
)
def test_exit_codes(cli: Cli, monkeypatch: pytest.MonkeyPatch, end: Any, code: int) -> None:
    stand_in(monkeypatch, "steps", end)
    done = cli("bench", "steps")
    assert type(done.code) is int
    assert done.code == code
    assert ("the work failed: OSError: lost" in done.err) == isinstance(end, OSError)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("what", [*MODULES, "attention"])
def test_without_a_gpu_it_is_refused_in_words(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    seen = stand_in(monkeypatch, what) if what in MODULES else []
    done = cli("bench", what)
    assert done.code == 2
    assert seen == []
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert "none here: `sdx-accel doctor` says why; `sdx-accel bench steps --tiny`" in line


@pytest.mark.usefixtures("no_gpu")
def test_what_there_is_none_of_is_refused(cli: Cli) -> None:
    done = cli("bench", "tea")
    assert done.code == 2
    assert "tea" in done.err
    assert "streaming" in done.err


@pytest.mark.usefixtures("no_gpu")
def test_the_options_of_a_benchmark_can_be_asked_for(cli: Cli) -> None:
    done = cli("bench", "streaming", "--", "--help")
    assert done.code == 0
    assert "--throttle" in done.out
    assert cli("bench", "streaming", "--tiny", "--no-such-option").code == 2


@pytest.mark.usefixtures("no_gpu")
def test_a_dry_run_measures_steps(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    done = cli("bench", "steps", "--tiny", "--rounds", "1", "--steps", "2")
    assert done.code == 0, done.err
    assert "ours ÷ stock" in done.out
    record = json.loads((tmp_path / "steps.json").read_text(encoding="utf-8"))
    assert record["command"] == "python -m sdx_accel.bench.steps --tiny --rounds 1 --steps 2"


@pytest.mark.usefixtures("no_gpu")
def test_a_dry_run_measures_attention(cli: Cli, tmp_path: Path) -> None:
    flags = ["--tiny", "--only", "tiny-self", "--dtype", "float32", "--direction", "forward"]
    done = cli("bench", "attention", *flags, "--json", "rows.json")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.usefixtures("gpu")
def test_an_installed_package_has_no_benchmark_of_attention(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdx_kernels, "__file__", str(tmp_path / "sdx_kernels" / "__init__.py"))
    done = cli("bench", "attention")
    assert done.code == 2
    assert "fetch the source tree" in done.err
