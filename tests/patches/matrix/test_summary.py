"""The number of combinations is printed with the results, in one process and in several.

It plays no order: the two conftest files are run in a small tree of tests that only count.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]
STAND_INS = {
    "operations.py": 'EXCLUDED = {"a budget": "needs a GPU"}\n',
    "orders.py": """
from collections import Counter, namedtuple
COUNTS = Counter()
Order = namedtuple("Order", "first second moment")
def combinations():
    return [Order("a", "b", 0), Order("a", "b", 1), Order("b", "a", 0)]
""",
    "test_counting.py": """
import time

import pytest
from .orders import COUNTS
@pytest.mark.parametrize("number", range(4))
def test_count(number):
    COUNTS["equal" if number else "refused alike"] += 1
    time.sleep(0.1)
""",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    matrix = tmp_path / "tests" / "patches" / "matrix"
    matrix.mkdir(parents=True)
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    shutil.copy(HERE / "conftest.py", matrix)
    for name, text in STAND_INS.items():
        (matrix / name).write_text(text, encoding="utf-8")
    (tmp_path / "tests" / "test_other.py").write_text("def test_other():\n    pass\n")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider -p no:benchmark\n"
        "testpaths = tests\n"
    )
    return tmp_path


def printed(tree: Path, *arguments: str) -> list[str]:
    """The lines on the matrix at the end of a run of pytest."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        cwd=tree, capture_output=True, text=True, check=False, timeout=120,
        # a worker's own variables would make a worker of this one
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^order matrix: .*$", done.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-p", "no:xdist"],
        ["-n", "0"],
        ["-n", "2"],
        ["-n", "2", "--dist", "loadfile"],
        ["-n", "2", "tests/patches/matrix"],
    ],
    ids=" ".join,
)
def test_counts_of_all_processes_are_printed_once(tree: Path, arguments: list[str]) -> None:
    assert printed(tree, *arguments) == [
        "order matrix: 2 ordered pairs, 3 combinations; this run: 3 equal, 1 refused alike",
        "order matrix: left out: a budget: needs a GPU",
    ]


@pytest.mark.parametrize("arguments", [["-n", "0"], ["-n", "2"]], ids=" ".join)
def test_nothing_is_printed_where_no_order_was_played(tree: Path, arguments: list[str]) -> None:
    assert printed(tree, *arguments, "tests/test_other.py") == []
