"""Contact sheets: pictures with their prompts in a grid, and the sheet for blind reading.

python examples/train_demo_model/sheet.py --model FOLDER --out sheet.png "a red apple" rocket
"""

import argparse
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

__all__ = ["PROMPTS", "contact_sheet"]

#: what a visitor would try first; the last two rows were never drawn that way
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


def main() -> None:
    import torch
    from diffusers import StableDiffusionXLPipeline

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("sheet.png"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    options = parser.parse_args()
    pipe = StableDiffusionXLPipeline.from_pretrained(options.model, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    chance = [torch.Generator().manual_seed(options.seed + n) for n in range(len(options.prompts))]
    pictures = pipe(
        options.prompts,
        num_inference_steps=options.steps,
        guidance_scale=options.guidance,
        generator=chance,
    ).images
    contact_sheet(pictures, options.prompts).save(options.out)
    print(options.out)


if __name__ == "__main__":
    main()
