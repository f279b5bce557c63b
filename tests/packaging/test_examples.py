"""Every example is short and runs offline as it stands."""

import os
import re
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


def test_train_lora_makes_the_loss_fall(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "02_train_lora.py"), "--output", "lora"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^step (\d+): loss ([0-9.]+)$", done.stdout, flags=re.MULTILINE)
    assert [step for step, _ in printed] == ["1", "20"]
    before, after = (float(loss) for _, loss in printed)
    assert after < 0.9 * before
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").stat().st_size > 10_000


RUNS_ALONE = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print("ended", path, end.code or 0)
"""


def test_examples_of_the_command_line_make_pictures(tmp_path: Path) -> None:
    """One process for all of them: most of each one's time would be spent on importing torch."""
    names = ("03_controlnet", "04_several_loras", "05_ip_adapter", "06_textual_inversion",
             "07_refiner", "08_four_steps")  # fmt: skip
    paths = [str(ROOT / "examples" / f"{name}.py") for name in names]
    done = subprocess.run(
        [sys.executable, "-c", RUNS_ALONE, *paths],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert ends == [f"ended {path} 0" for path in paths], done.stderr
    made = [*(tmp_path / "outputs").iterdir(), *(tmp_path.glob("l*.png")), tmp_path / "turbo.png"]
    assert len(made) == 5 + 3
    for path in made:
        with Image.open(path) as image:
            assert min(high - low for low, high in image.getextrema()) > 20
