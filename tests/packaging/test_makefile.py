"""The commands that README promises: they exist, and they run what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("demo", "test", "test-all", "gpu", "gpu-all", "bench", "docs")


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # a make around this test must not hand its own flags down
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PY", "PYTHON", "VENV")
    }
    return subprocess.run(
        ["make", *arguments], cwd=cwd, capture_output=True, text=True, env=environment, check=False
    )


def plan(*arguments: str) -> str:
    """The commands that make would run, without running them."""
    done = make("--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_every_promised_target_exists_and_is_explained(target: str) -> None:
    assert plan(target)
    assert f"make {target} " in make("help").stdout


def test_ci_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if line and line[0] != "#"]
    assert lines[-1] == "exec make test"
    assert len(lines) == 3


def test_make_demo_sets_up_and_makes_a_picture(tmp_path: Path) -> None:
    commands = plan("demo", f"VENV={tmp_path / 'new'}")
    assert commands.index("-m venv") < commands.index("torch==") < commands.index("-e .")
    assert 'sdx-accel generate "a red apple"' in commands


def test_make_test_runs_every_check(tmp_path: Path) -> None:
    commands = plan("test", f"VENV={tmp_path / 'new'}")
    order = [
        '-e ".[dev]"',
        "ruff format --check",
        "ruff check",
        "-m mypy",
        "lint_imports",
        "-m pytest",
    ]
    assert [commands.index(step) for step in order] == sorted(map(commands.index, order))


def folders(commands: list[str]) -> list[str]:
    """The folders of tests that commands name, in order of their names."""
    return sorted(word for line in commands for word in line.split() if word.startswith("tests/"))


def test_an_environment_of_one_s_own_makes_no_venv() -> None:
    commands = plan("gpu", f"PY={sys.executable}")
    assert "venv" not in commands.replace(sys.executable, "")
    parts = [line for line in commands.splitlines() if "-m pytest" in line]
    assert all(f'{sys.executable} -m pytest -m "gpu and not slow"' in line for line in parts)
    # every folder with short tests once, those that measure memory in one process
    assert folders(parts) == ["tests/accel", "tests/kernels", "tests/patches"]
    assert [" -n auto" in line for line in parts] == [True, False]
    assert "sdx_accel.bench.gpu" in commands


def test_every_gpu_test_is_in_gpu_all() -> None:
    commands = plan("gpu-all", f"PY={sys.executable}").splitlines()
    parts = [line for line in commands if "-m pytest" in line]
    assert folders(parts) == ["tests/accel", "tests/kernels", "tests/notebooks", "tests/patches"]
    tests = Path(__file__).parents[1]
    marked = {
        f"tests/{file.relative_to(tests).parts[0]}"
        for file in tests.rglob("test_*.py")
        if "mark.gpu" in file.read_text(encoding="utf-8") and file != Path(__file__)
    }
    assert marked <= set(folders(parts))


def test_make_gpu_without_a_gpu_says_so_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    done = make("gpu", f"PY={sys.executable}")
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert line.startswith("make gpu needs an NVIDIA GPU")
    assert f"{sys.executable} -m sdx_accel doctor" in line


def finished(venv: Path, stamps: tuple[str, ...]) -> None:
    """What a finished set-up leaves, newer than everything it depends on."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    for stamp in stamps:
        (venv / stamp).touch()


def test_a_second_run_installs_nothing(tmp_path: Path) -> None:
    finished(tmp_path, (".torch", ".installed", ".installed-dev"))
    assert "pip" not in plan("test", f"VENV={tmp_path}")
    assert "pip" not in plan("demo", f"VENV={tmp_path}")


def test_changed_constraints_install_again(tmp_path: Path) -> None:
    finished(tmp_path, (".torch", ".installed", ".installed-dev"))
    for stamp in tmp_path.glob(".*"):
        os.utime(stamp, (1, 1))
    commands = plan("test", f"VENV={tmp_path}")
    assert commands.count("pip --disable-pip-version-check install") == 2


def test_an_interpreter_that_went_away_is_replaced(tmp_path: Path) -> None:
    finished(tmp_path, (".torch", ".installed"))
    (tmp_path / "bin" / "python").unlink()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "uninstalled")
    commands = plan("demo", f"VENV={tmp_path}")
    assert "-m venv" in commands
    assert "torch==" in commands


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("import sys; sys.exit('version_info' in sys.argv[1])", "needs Python 3.11 or newer"),
        ("import sys; sys.exit('ensurepip' in sys.argv[1])", "sudo apt install python3-venv"),
    ],
    ids=["old python", "no venv module"],
)
def test_what_is_missing_is_said(tmp_path: Path, answers: str, message: str) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{answers}" "$2"\n')
    python.chmod(0o755)
    done = make("demo", f"VENV={tmp_path / 'new'}", f"PYTHON={python}")
    assert done.returncode != 0
    assert message in done.stdout
    assert not (tmp_path / "new").exists()


def test_a_python_that_does_not_exist_is_said(tmp_path: Path) -> None:
    done = make("demo", f"VENV={tmp_path / 'new'}", "PYTHON=no-such-python")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer, and 'no-such-python' is not" in done.stdout
