"""Contact sheets: pictures with their prompts in a grid, and the sheet for blind reading.

    python examples/train_demo_model/sheet.py --out sheet.png "a red apple" rocket
    python examples/train_demo_model/sheet.py --out demo-sheet.png --evaluated --colours 256

Without `--model` the pictures are those of the model that comes with sdx_accel.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

__all__ = ["PROMPTS", "contact_sheet"]

#: what a visitor would try first; the last two lines: other colours than the originals'
PROMPTS = [
    *("a red apple", "dog face", "rocket", "snowman", "pizza", "cat face", "robot", "ghost"),
    *("guitar", "a strawberry", "bicycle", "octopus", "red heart", "blue heart", "house", "sun"),
    *("grinning face", "sunflower", "ice cream", "airplane", "crown", "gem stone", "tiger", "cake"),
    *("a blue dog face", "a pink elephant", "a green rose", "a purple pizza"),
    *("a yellow helicopter", "an orange cactus", "a purple mushroom", "a red bug"),
]
_MARGIN, _TEXT = 6, 14


def contact_sheet(pictures: list[Any], titles: list[str], columns: int = 8) -> Any:
    """A `PIL.Image` of the pictures, each above its title.

    Args:
        pictures: PIL pictures of one size.
        titles: one for each; lines after the first need room too.
    """
    width, height = pictures[0].size
    lines = max(title.count("\n") for title in titles) + 1
    cell = width + _MARGIN, height + _TEXT * lines + _MARGIN
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (cell[0] * columns, cell[1] * rows), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
        left, top = index % columns * cell[0] + 2, index // columns * cell[1] + 2
        sheet.paste(picture, (left, top))
        for row, line in enumerate(title.split("\n")):
            pen.text((left, top + height + _TEXT * row), line[: width // 6], fill="black")
    return sheet


def _asked(evaluated: bool, prompts: list[str]) -> list[tuple[list[str], list[str]]]:
    """(prompts, titles) of each draw; every draw begins at the same seed, as in evaluate.py."""
    if not evaluated:
        return [(prompts, prompts)]
    from names import FILE

    fixed = json.loads(FILE.read_text())
    pairs = [" ".join(pair) for pair in fixed["unseen"]]
    new = [f"a {pair}" for pair in pairs], [f"NEW {pair}" for pair in pairs]
    return [(prompts, prompts), new, (fixed["names"], fixed["names"])]


def main() -> None:
    from evaluate import GUIDANCE, SEED, STEPS, draw

    from sdx_accel.runtime.checkpoints import load

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="a folder; default: the shipped model")
    parser.add_argument("--out", type=Path, default=Path("sheet.png"))
    parser.add_argument("--seed", type=int, default=SEED, help="of the first picture")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument("--columns", type=int, help="default: 8, and 16 for --evaluated")
    parser.add_argument("--colours", type=int, help="a palette of so many, for a small file")
    parser.add_argument(
        "--evaluated", action="store_true", help="the names and new pairs of eval_names.json too"
    )
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    options = parser.parse_args()
    pipe = load(options.model, dtype="fp32")
    pipe.set_progress_bar_config(disable=True)
    pictures, titles = [], []
    for prompts, shown in _asked(options.evaluated, options.prompts):
        drawn = draw(pipe, prompts, options.steps, options.guidance, options.seed)
        pictures += [Image.fromarray(picture) for picture in drawn.numpy()]
        titles += shown
    columns = options.columns or (16 if options.evaluated else 8)
    sheet = contact_sheet(pictures, titles, columns)
    if options.colours:
        sheet = sheet.quantize(options.colours, dither=Image.Dither.NONE)
    sheet.save(options.out, optimize=True)
    print(options.out)


if __name__ == "__main__":
    main()
