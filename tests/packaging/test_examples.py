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
MAKE_PICTURE, TRAIN_LORA = EXAMPLES[:2]
#: All that come after those two, whatever they are called: each makes a picture as it stands.
OTHERS = EXAMPLES[2:]
#: Pictures of the few that make more than one.
SEVERAL = {"08_four_steps.py": 3}


def test_examples_are_numbered_and_the_first_two_have_tests_of_their_own() -> None:
    numbers = [re.fullmatch(r"(\d\d)_\w+\.py", path.name) for path in EXAMPLES]
    assert [found and int(found[1]) for found in numbers] == list(range(1, len(EXAMPLES) + 1))
    assert (MAKE_PICTURE.name, TRAIN_LORA.name) == ("01_make_picture.py", "02_train_lora.py")
    assert SEVERAL.keys() <= {path.name for path in OTHERS}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 60


def test_make_picture_makes_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "apple.png"
    done = subprocess.run(
        [sys.executable, str(MAKE_PICTURE), "--output", str(picture)],
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
        [sys.executable, str(TRAIN_LORA), "--output", "lora"],
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


# one process for all of them: most of each one's time would be spent on importing torch
RUN_EACH = """
import os, pathlib, runpy, sys
here = pathlib.Path.cwd()
for path in sys.argv[1:]:
    folder = here / pathlib.Path(path).name
    folder.mkdir()
    os.chdir(folder)
    sys.argv = [path]
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    print("ended", path, code)
"""


def test_every_other_example_makes_its_pictures(tmp_path: Path) -> None:
    """Each in a folder of its own, and each picture that it names is one that it made."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH, *map(str, OTHERS)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    ends = [line for line in lines if line.startswith("ended ")]
    assert ends == [f"ended {path} 0" for path in OTHERS], done.stderr
    for path in OTHERS:
        end = lines.index(f"ended {path} 0")
        made = [tmp_path / path.name / line for line in lines[:end] if line.endswith(".png")]
        lines = lines[end + 1 :]
        assert len(made) == SEVERAL.get(path.name, 1), path.name
        for picture in made:
            with Image.open(picture) as image:
                assert min(high - low for low, high in image.getextrema()) > 20, picture
