"""Runs the notebooks and keeps their pictures for readers on the web.

    python notebooks/pictures.py

The picture of a cell with the id `picture-NAME` in `NN_title.ipynb` goes to
docs/pictures/notebooks/NN-NAME.png. The notebooks themselves are not changed.
"""

import base64
import io
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

__all__ = ["execute", "pictures", "save"]

FOLDER = Path(__file__).parent
OUT = FOLDER.parent / "docs" / "pictures" / "notebooks"
PREFIX = "picture-"
# enough for flat areas and the edges of letters; the tests hold each file to 100 KiB
COLOURS = 128


def execute(path: Path, folder: Path, **variables: str) -> nbformat.NotebookNode:
    """A notebook with its outputs; the file is left alone.

    Args:
        path: the notebook.
        folder: working directory, and where Jupyter's own files go.
        variables: environment variables for the kernel, beside this process's.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    work, own = folder / "work", folder / "jupyter"
    work.mkdir()
    # "python3" is this interpreter's kernel, whatever a person has registered under that name
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    kept = {name: os.environ.get(name) for name in places}
    os.environ.update(dict.fromkeys(places, str(own)))
    try:
        client = NotebookClient(
            notebook,
            timeout=300,
            kernel_name="python3",
            resources={"metadata": {"path": str(work)}},
        )
        # Jupyter starts a kernel beside its notebook, where it finds the scripts that lie there
        beside = os.pathsep.join(
            entry for entry in (str(FOLDER), os.environ.get("PYTHONPATH")) if entry
        )
        client.execute(env={**os.environ, "PYTHONPATH": beside, **variables})
    finally:
        for name, value in kept.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    return notebook


def pictures(notebook: nbformat.NotebookNode) -> dict[str, Image.Image]:
    """The last picture of each `picture-NAME` cell, by NAME; a cell without one is left out."""
    found: dict[str, Image.Image] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.id.startswith(PREFIX):
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    png = base64.b64decode(output.data["image/png"])
                    found[cell.id.removeprefix(PREFIX)] = Image.open(io.BytesIO(png))
    return found


def save(picture: Image.Image, path: Path) -> None:
    """Write a PNG with a palette, a third of the size of one without."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)


def main() -> int:
    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            made = pictures(execute(path, Path(folder), HF_HUB_OFFLINE="1"))
        for name, picture in made.items():
            out = OUT / f"{path.name[:2]}-{name}.png"
            save(picture, out)
            print(out.relative_to(FOLDER.parent), f"{out.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
