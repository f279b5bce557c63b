"""Takes out of the notebooks what running them puts in: outputs, counts, metadata.

    python notebooks/strip.py

What is in git stays readable as a difference that way. The ids of cells are kept: `pictures.py` and
the tests know cells by them.
"""

from pathlib import Path

import nbformat

__all__ = ["stripped"]

FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def stripped(text: str) -> str:
    """A notebook's JSON as it has to be in git.

    Raises:
        nbformat.ValidationError: it is no notebook.
    """
    notebook = nbformat.reads(text, as_version=4)
    notebook.metadata = METADATA
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        before = path.read_text(encoding="utf-8")
        after = stripped(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"{path.name}: stripped")
