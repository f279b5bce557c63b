"""What may be in the tree: sizes, forbidden words, places where no `__init__.py` may be."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# written in two halves, so that this file does not name what it forbids
FORBIDDEN = re.compile(
    r"(?<![\w./~-])/(?:work|farm|root|opt)/[\w.]"
    r"|\.lib" + r"rary/|device mac" + r"hine|sdx" + r"venv"
)
MAX_LINES = 500
MAX_TREE_BYTES = 40 << 20


def tracked() -> list[Path]:
    """Files that git tracks or would track, and that exist."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return sorted(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def files() -> list[Path]:
    found = tracked()
    assert ROOT / "pyproject.toml" in found
    return found


def test_no_file_is_longer_than_the_limit(files: list[Path]) -> None:
    long = {
        relative(path): lines
        for path in files
        if path.suffix == ".py"
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert long == {}


def test_no_file_names_a_machine(files: list[Path]) -> None:
    found = {}
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if hit := FORBIDDEN.search(text):
            found[relative(path)] = hit[0]
    assert found == {}


@pytest.mark.parametrize("folder", ["work", "farm", "root", "opt"])
def test_the_search_for_machine_paths_finds_them(folder: str) -> None:
    assert FORBIDDEN.search(f"cd /{folder}/x")
    assert FORBIDDEN.search(f'"/{folder}/.cache"')
    for innocent in (f"docs/{folder}/x", f"~/{folder}/x", f"https://example.org/{folder}/x"):
        assert not FORBIDDEN.search(innocent)


def test_the_tree_is_small(files: list[Path]) -> None:
    assert sum(path.stat().st_size for path in files) < MAX_TREE_BYTES


def test_nothing_shadows_hugging_faces_kernels(files: list[Path]) -> None:
    """An `__init__.py` in kernels/ or tests/kernels/ makes `import kernels` find ours."""
    roots = ("kernels/__init__.py", "patches/__init__.py")
    packages = [
        name
        for name in map(relative, files)
        if name in roots or (name.startswith("tests/") and name.endswith("__init__.py"))
    ]
    assert packages == []


def test_test_files_are_named_for_their_subject(files: list[Path]) -> None:
    allowed = re.compile(
        r"tests/(conftest|(accel|kernels|notebooks|packaging|patches)/(test_\w+|conftest|\w+_case)"
        r"|patches/(rows|matrix)/\w+)\.py"
    )
    stray = [
        name
        for name in map(relative, files)
        if name.startswith("tests/") and name.endswith(".py") and not allowed.fullmatch(name)
    ]
    assert stray == []
