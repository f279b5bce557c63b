"""The notebooks: stripped in git, run offline from start to end, and their pictures are shown."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
SHOWN = ROOT / "docs" / "pictures" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]
# these two take 6 s each, the others 12 and 50
IN_CI = ("01_first_picture", "03_attention")


def script(name: str) -> ModuleType:
    """One of the scripts beside the notebooks; no package, so found by its path."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures, strip = script("pictures"), script("strip")


def cells(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))["cells"])


def text(notebook: Any, cell_id: str) -> str:
    """What one cell printed."""
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    return "".join(o.text for o in cell.outputs if o.get("name") == "stdout")


def test_the_four_are_there() -> None:
    assert NAMES == ["01_first_picture", "02_does_it_fit", "03_attention", "04_bring_your_own"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_is_stripped(path: Path) -> None:
    stored = path.read_text(encoding="utf-8")
    # spelled out, so that the script cannot excuse itself
    notebook = json.loads(stored)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    assert strip.stripped(stored) == stored, "run `python notebooks/strip.py`"


def test_stripping_takes_everything_out() -> None:
    path = NOTEBOOKS[0]
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    code["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["secret"]}]
    code["execution_count"] = 7
    code["metadata"] = {"collapsed": True}
    notebook["metadata"]["kernelspec"]["display_name"] = "mine"
    notebook["metadata"]["language_info"]["version"] = "3.0"
    assert strip.stripped(json.dumps(notebook)) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_cells_are_short_and_named_for_what_they_show(path: Path) -> None:
    for cell in cells(path):
        # nbformat's own ids are eight hexadecimal digits
        assert not re.fullmatch(r"[0-9a-f]{8}", cell["id"])
        assert len(cell["source"]) <= 32, cell["id"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    prose = "".join("".join(c["source"]) for c in cells(path) if c["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)\s:]+)\)", prose)
    assert links
    assert [link for link in links if not (FOLDER / link).exists()] == []


def test_the_page_shows_each_picture_and_nothing_is_left_over() -> None:
    """`python notebooks/pictures.py` makes them."""
    wanted = {
        f"{path.name[:2]}-{cell['id'].removeprefix(pictures.PREFIX)}.png"
        for path in NOTEBOOKS
        for cell in cells(path)
        if cell["id"].startswith(pictures.PREFIX)
    }
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in SHOWN.iterdir()} == wanted
    assert set(re.findall(r"docs/pictures/notebooks/([\w-]+\.png)", page)) == wanted


@pytest.mark.parametrize("path", sorted(SHOWN.glob("*.png")), ids=lambda path: path.name)
def test_a_picture_is_small(path: Path) -> None:
    assert path.stat().st_size <= 100 << 10
    with Image.open(path) as image:
        assert image.mode == "P"
        assert image.width <= 1200


def check(name: str, notebook: Any) -> None:
    """What the prose promises is what the cells printed, on any machine."""
    if name.startswith("01"):
        assert float(text(notebook, "psnr").split()[1]) > 60
        assert int(text(notebook, "proof").split()[0]) > 100
        assert text(notebook, "back").startswith("the same objects: True\nthe same bits: True\n")
    elif name.startswith("02"):
        eight, smallest = text(notebook, "eight"), text(notebook, "smallest").splitlines()
        assert "DOES NOT FIT" not in eight
        assert smallest[1] == "True"
        assert f"smallest budget that works is {smallest[0].split(' ')[0]}" in smallest[2]
        assert text(notebook, "json").startswith("True ")
        assert "decode: predicted" in text(notebook, "run")
        assert "; try vram=" in text(notebook, "refuse")
    elif name.startswith("03"):
        assert "NaN behind the end gets out: False" in text(notebook, "edges")
        assert "tensor([0.]" in text(notebook, "edges")
        assert text(notebook, "backward").count("repeats: True") == 4
        assert len(text(notebook, "parity").splitlines()) == 1 + 9
        assert "`triton` is not supported because:" in text(notebook, "refusal")
    else:
        assert "\nmodel.diffusion_model." in text(notebook, "single-file")
        difference, weights = text(notebook, "single-draw").splitlines()
        # tensors of a mapped file lie otherwise in memory: a sum may be rounded the other way
        assert int(difference.removeprefix("largest difference of a tone: ")) <= 1
        assert weights == text(notebook, "folder").splitlines()[1]
        assert "is a VAE alone" in text(notebook, "single")
        assert text(notebook, "lora-gone").startswith("as before: True\n")
        assert "not run yet" not in text(notebook, "image-report")
        assert text(notebook, "control-report").startswith("zero steers nothing: True\n")
        assert "controlnet: 6 layers" in text(notebook, "control-report")
        assert text(notebook, "back").splitlines()[1] == "AttnProcessor2_0"


def run(path: Path, folder: Path, **variables: str) -> None:
    stored = path.read_bytes()
    done = pictures.execute(path, folder, HF_HUB_OFFLINE="1", TRITON_INTERPRET="0", **variables)
    check(path.stem, done)
    made = pictures.pictures(done)
    ids = {cell.id for cell in done.cells if cell.id.startswith(pictures.PREFIX)}
    assert {pictures.PREFIX + name for name in made} == ids
    for name, image in made.items():
        lowest, highest = image.convert("L").getextrema()
        assert highest - lowest > 100, name
    # nothing beside the notebooks, nothing where the reader is
    assert list((folder / "work").iterdir()) == []
    assert path.read_bytes() == stored


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in IN_CI else pytest.mark.slow)
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs_offline(path: Path, tmp_path: Path) -> None:
    run(path, tmp_path, CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_runs_on_a_gpu(path: Path, tmp_path: Path) -> None:
    run(path, tmp_path)
