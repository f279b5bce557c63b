"""Proof that the tests look at the kernel: one changed line must turn nearly all of them red."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sdx_kernels

PACKAGE = Path(sdx_kernels.__file__).parent
TESTS = Path(__file__).parent

#: tests that compare values through the kernel, not errors or shapes
VALUES = "triton and not nothing_to_attend and not all_rows and not repeat and not nan_in_a_key"


def outcome(package: Path) -> tuple[int, int]:
    """(passed, failed) of the kernel's value tests with `package` in front of the real one."""
    environment = os.environ | {"PYTHONPATH": str(package.parent), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", VALUES]
        + [str(TESTS / name) for name in ("test_attention.py", "test_attention_masks.py")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        cwd=TESTS.parents[1],
    )
    counts = dict(re.findall(r"(\d+) (passed|failed)", done.stdout)[::-1])
    by_word = {word: int(number) for number, word in counts.items()}
    assert by_word, done.stdout + done.stderr
    return by_word.get("passed", 0), by_word.get("failed", 0)


@pytest.mark.slow
def test_one_added_to_the_output_turns_the_tests_red(tmp_path: Path) -> None:
    copy = tmp_path / "sdx_kernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    passed, failed = outcome(copy)
    assert failed == 0
    assert passed > 50
    kernel = copy / "_triton" / "attention_fwd.py"
    source = kernel.read_text()
    line = "out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]"
    assert source.count(line) == 1
    kernel.write_text(source.replace(line, line + " + 1.0"))
    still, red = outcome(copy)
    assert red >= 0.9 * (still + red), f"{still} of {still + red} tests do not look at the output"
