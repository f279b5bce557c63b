"""Importing does nothing, and shadows nothing; each claim in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "diffusers", "transformers", "triton")


def run(code: str, *flags: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def heavy_after(statement: str) -> list[str]:
    ask = f"import json, sys; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    found: list[str] = json.loads(run(f"{statement}\n{ask}"))
    return found


@pytest.mark.parametrize(
    "module",
    [
        "sdx_accel",
        "sdx_accel.demo",
        "sdx_accel.errors",
        "sdx_accel.cli",
        "sdx_accel.cli.doctor",
        "sdx_accel.budget",
    ],
)
def test_importing_brings_none_of_the_large_packages(module: str) -> None:
    assert heavy_after(f"import {module}") == []


def test_every_module_of_the_planner_and_the_command_line_is_light() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("budget", "cli")
        for path in sorted((ROOT / "sdx_accel" / folder).glob("*.py"))
        if path.name != "__init__.py"
    ]
    assert modules
    assert heavy_after("\n".join(f"import {module}" for module in modules)) == []


def test_the_search_for_large_packages_finds_them() -> None:
    assert heavy_after("import torch") == ["torch"]


@pytest.mark.parametrize("package", ["sdx_kernels", "sdx_patches"])
def test_importing_never_brings_triton(package: str) -> None:
    assert "triton" not in heavy_after(f"import {package}")


def test_case_143_importing_works_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import sdx_accel, sdx_kernels, sdx_patches"
    assert run(code) == ""


@pytest.mark.parametrize("package", ["sdx_accel", "sdx_kernels", "sdx_patches"])
def test_importing_prints_and_warns_nothing(package: str, tmp_path: Path) -> None:
    assert run(f"import {package}", "-W", "error::UserWarning", cwd=tmp_path) == ""


@pytest.mark.parametrize("flags", [(), ("-P",)], ids=["root on sys.path", "safe path"])
def test_hugging_faces_kernels_is_found_from_the_repository_root(flags: tuple[str, ...]) -> None:
    """`import kernels` with the root as working directory finds the package, not our folder."""
    code = "from kernels import get_kernel; import kernels; print(kernels.__file__)"
    assert Path(run(code, *flags)).is_relative_to(ROOT / "kernels") is False


def test_our_packages_come_from_this_tree() -> None:
    code = (
        "import sdx_accel, sdx_kernels, sdx_patches as p; print(sdx_kernels.__file__, p.__file__)"
    )
    kernels, patches = run(code, cwd=ROOT / "docs").split()
    assert Path(kernels).is_relative_to(ROOT / "kernels")
    assert Path(patches).is_relative_to(ROOT / "patches")
