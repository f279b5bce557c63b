"""Every example is short and runs offline as it stands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert next(path.name for path in EXAMPLES) == "01_make_picture.py"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 60


def test_make_picture_makes_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "apple.png"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "01_make_picture.py"), "--output", str(picture)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(picture)
    with Image.open(picture) as image:
        # a constant picture would mean that nothing was denoised
        assert min(high - low for low, high in image.getextrema()) > 20
