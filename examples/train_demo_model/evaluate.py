"""Judge an exported model by the names fixed in eval_names.json.

    python examples/train_demo_model/evaluate.py --model FOLDER --data data.npz --out OUT

Of each prompt's picture: does the nearest of all training pictures carry the prompt's name? By the
VAE's latents, by pixels, and by colour and edge histograms that know nothing of the VAE. Pairs of
colour and object that training never saw are reported on their own.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from captions import COLOURS
from data import Picture, load_data
from names import FILE
from nearest import colour_share, nearest
from recolour import object_name, plan_colours, recolour
from sheet import PROMPTS, contact_sheet
from torch import Tensor

__all__ = ["Gallery", "draw", "evaluate", "gallery_of", "judge_names"]

STEPS, GUIDANCE, SEED = 20, 4.0, 1234
GRID = ((20, 2.5), (20, 4.0), (20, 5.5), (20, 7.5), (8, 4.0), (12, 4.0), (30, 4.0), (50, 4.0))


class Gallery:
    """All training pictures with their names, recoloured ones included."""

    def __init__(self, pixels: Tensor, names: list[str], bases: list[str], originals: int) -> None:
        self.pixels, self.names, self.bases, self.originals = pixels, names, bases, originals


def gallery_of(pixels: Tensor, pictures: list[Picture]) -> Gallery:
    """Gallery on the device of `pixels`, uint8 (N, H, W, 3)."""
    seen, _ = plan_colours(pixels, pictures)
    names = [picture.name for picture in pictures]
    bases = [picture.base for picture in pictures]
    changed = [f"{change.colour} {change.name}" for change in seen]
    everything = torch.cat([pixels, recolour(pixels, seen)])
    return Gallery(everything, names + changed, bases + changed, len(pixels))


def draw(pipe: Any, prompts: list[str], steps: int, guidance: float, seed: int) -> Tensor:
    """Pictures of the prompts, uint8 (N, H, W, 3) on the pipeline's device; a seed for each."""
    found = []
    for start in range(0, len(prompts), 100):
        part = prompts[start : start + 100]
        chance = [torch.Generator().manual_seed(seed + start + n) for n in range(len(part))]
        pictures = pipe(
            part,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=chance,
            output_type="np",
        ).images
        found.append(torch.from_numpy((pictures * 255.0).round().astype(np.uint8)))
    return torch.cat(found).to(pipe.device)


def judge_names(
    pictures: Tensor,
    names: list[str],
    gallery: Gallery,
    vae: Any,
    known: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Share of the pictures whose nearest training picture has the prompt's name.

    Skin tones of the same name count as that name; another colour of the same object does not.
    `known` are features of the gallery by measure, where they were made before.
    """
    found: dict[str, Any] = {}
    for measure in ("latent", "pixels", "histogram"):
        made = (known or {}).get(measure)
        index = nearest(measure, pictures, gallery.pixels, vae, made).tolist()
        right = [gallery.bases[i] == name for i, name in zip(index, names, strict=True)]
        wrong = [
            f"{name} -> {gallery.names[i]}"
            for i, name, fine in zip(index, names, right, strict=True)
            if not fine
        ]
        found[measure] = {
            "right": sum(right) / len(right),
            "distinct": len(set(index)),
            "wrong": wrong,
        }
    return found


def judge_pairs(pictures: Tensor, pairs: list[list[str]], gallery: Gallery) -> dict[str, Any]:
    """Unseen pairs: is it the object (by colour-blind edges), and has it the colour?"""
    index = nearest("edges", pictures, gallery.pixels[: gallery.originals], None).tolist()
    shapes = [
        object_name(gallery.bases[i]) == name for i, (_, name) in zip(index, pairs, strict=True)
    ]
    colours = [
        colour_share(picture, COLOURS[colour][0]) >= 0.5
        for picture, (colour, _) in zip(pictures, pairs, strict=True)
    ]
    both = [shape and colour for shape, colour in zip(shapes, colours, strict=True)]
    return {
        "object": sum(shapes) / len(pairs),
        "colour": sum(colours) / len(pairs),
        "both": sum(both) / len(pairs),
        "count": len(pairs),
    }


def white_border(pictures: Tensor) -> float:
    """Share of the pixels of the outermost 2 rows and columns that are within 8 of white."""
    inner = torch.zeros(pictures.shape[1:3], dtype=torch.bool, device=pictures.device)
    inner[2:-2, 2:-2] = True
    return (pictures[:, ~inner].amin(-1) >= 247).float().mean().item()


def _pil(pictures: Tensor) -> list[Any]:
    from PIL import Image

    return [Image.fromarray(picture) for picture in pictures.cpu().numpy()]


def evaluate(
    pipe: Any,
    gallery: Gallery,
    fixed: dict[str, Any],
    out: Path,
    seconds: float,
    *,
    steps: int = STEPS,
    prompts: list[str] = PROMPTS,
) -> dict[str, Any]:
    """Everything, most important first; parts that time does not allow are left out.

    Args:
        pipe: the exported pipeline on its device.
        fixed: content of eval_names.json.
        out: folder for sheet.png and blind.png.
        seconds: no new part of the grid of settings is begun after so long.
        steps: denoising steps of everything but that grid.
        prompts: shown at the top of sheet.png.
    """
    started = time.monotonic()
    vae = pipe.vae
    pipe.set_progress_bar_config(disable=True)
    trained = set(gallery.names)
    names = fixed["names"]
    pairs = [pair for pair in fixed["unseen"] if " ".join(pair) not in trained]
    result: dict[str, Any] = {"steps": steps, "guidance": GUIDANCE, "seed": SEED}
    pictures = draw(pipe, names, steps, GUIDANCE, SEED)
    result["names"] = judge_names(pictures, names, gallery, vae)
    result["white_border"] = white_border(pictures)

    count = len(fixed["blind"])
    titles = [f"{n}\n" + "\n".join(e["choices"]) for n, e in enumerate(fixed["blind"])]
    contact_sheet(_pil(pictures[:count]), titles).save(out / "blind.png")
    shown_first = draw(pipe, prompts, steps, GUIDANCE, SEED)
    unseen = draw(pipe, [f"a {colour} {name}" for colour, name in pairs], steps, GUIDANCE, SEED)
    result["unseen"] = judge_pairs(unseen, pairs, gallery)
    shown = [*_pil(shown_first), *_pil(unseen), *_pil(pictures)]
    titles = [*prompts, *(f"NEW {colour} {name}" for colour, name in pairs), *names]
    contact_sheet(shown, titles, columns=16).save(out / "sheet.png")

    result["grid"] = {}
    for some, guidance in GRID:
        if time.monotonic() - started > seconds:
            result["grid"]["left out"] = "no time"
            break
        pictures = draw(pipe, names, some, guidance, SEED)
        judged = judge_names(pictures, names, gallery, vae)
        unseen = draw(pipe, [f"a {colour} {name}" for colour, name in pairs], some, guidance, SEED)
        result["grid"][f"{some} steps, guidance {guidance:g}"] = {
            **{measure: entry["right"] for measure, entry in judged.items()},
            "white_border": white_border(pictures),
            "unseen": judge_pairs(unseen, pairs, gallery),
        }
    return result


def main() -> None:
    from diffusers import StableDiffusionXLPipeline

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--seconds", type=float, default=60.0, help="no new part after this")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    pipe = StableDiffusionXLPipeline.from_pretrained(options.model, torch_dtype=dtype).to(device)
    pixels, pictures, _ = load_data(options.data)
    gallery = gallery_of(torch.from_numpy(pixels).to(device), pictures)
    options.out.mkdir(parents=True, exist_ok=True)
    result = evaluate(pipe, gallery, json.loads(FILE.read_text()), options.out, options.seconds)
    (options.out / "evaluation.json").write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "names"}, indent=1))


if __name__ == "__main__":
    main()
