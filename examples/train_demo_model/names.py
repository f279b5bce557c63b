"""Fix the prompts of the evaluation, once and before any training: eval_names.json.

    python examples/train_demo_model/names.py --data data.npz

200 names, 48 of them for the blind sheet with 10 choices each, and 60 pairs of a colour and an
object that training never sees together; all drawn by one seed.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from data import Picture, load_data
from recolour import plan_colours

__all__ = ["FILE", "draw_names"]

FILE = Path(__file__).with_name("eval_names.json")
SEED, NAMES, BLIND, CHOICES, PAIRS = 20261130, 200, 48, 10, 60


def draw_names(pictures: list[Picture], unseen: list[tuple[str, str]], seed: int) -> dict[str, Any]:
    """The file's content.

    Args:
        pictures: all of them; those with a skin tone are not asked for.
        unseen: (colour, object) pairs that training leaves out.
    """
    chance = random.Random(seed)
    pool = sorted(picture.name for picture in pictures if picture.name == picture.base)
    names = chance.sample(pool, min(NAMES, len(pool)))
    blind = []
    for name in names[:BLIND]:
        others = [other for other in pool if other != name]
        choices = [name, *chance.sample(others, min(CHOICES - 1, len(others)))]
        chance.shuffle(choices)
        blind.append({"name": name, "choices": choices})
    pairs = chance.sample(sorted(unseen), min(PAIRS, len(unseen)))
    return {"seed": seed, "names": names, "blind": blind, "unseen": [list(pair) for pair in pairs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    pixels, pictures, _ = load_data(options.data)
    seen, unseen = plan_colours(torch.from_numpy(pixels), pictures)
    found = draw_names(pictures, [(change.colour, change.name) for change in unseen], SEED)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{options.out}: {len(found['names'])} names, {len(found['unseen'])} of {len(unseen)} pairs"
    )
    print(f"{len(seen)} recoloured pictures to train on")


if __name__ == "__main__":
    main()
