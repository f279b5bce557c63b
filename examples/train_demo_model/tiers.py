"""The same evaluation for every way that sdx_accel runs the shipped model, beside stock diffusers.

    OMP_NUM_THREADS=1 python examples/train_demo_model/tiers.py --data data.npz --out tiers.json

One judge for all: the nearest training picture by the stock VAE in fp32, by pixels and by
histograms, as in evaluate.py. Runs on the CPU in about a quarter of an hour of one core; fp16 is
left out because a CPU takes 28 times as long for it as for fp32.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data import load_data
from evaluate import GUIDANCE, SEED, STEPS, draw, gallery_of, judge_names, judge_pairs, white_border
from names import FILE
from nearest import features

import sdx_accel
from sdx_accel.demo import load
from sdx_patches.vae import enable_bands

__all__ = ["TIERS", "psnr"]

#: px; the planner's smallest tile is 384, so `near` never tiles a picture of 128 on its own
TILE = 64


def stock(pipe: Any) -> None:
    """Diffusers as it is."""


def exact(pipe: Any) -> None:
    """Quality `exact`: chosen layer by layer; on a CPU torch's own attention in the UNet."""
    pipe.enable_xattn()


def reference(pipe: Any) -> None:
    """`exact` through this project's own attention equation in every layer."""
    pipe.enable_xattn(attention_op="reference")


def bands(pipe: Any) -> None:
    """`exact` where the whole decode does not fit: the VAE works in bands of rows."""
    pipe.enable_xattn()
    enable_bands(pipe.vae)


def near(pipe: Any) -> None:
    """Quality `near` at its worst: the VAE in small stock tiles, though all of it would fit."""
    pipe.enable_xattn(quality="near")
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = TILE, TILE // 8


#: name → dtype and what is done to the stock pipeline; the first is what PSNR is measured against
TIERS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "stock, fp32": ("fp32", stock),
    "exact, fp32": ("fp32", exact),
    "exact, fp32, our reference attention": ("fp32", reference),
    "exact, fp32, VAE in bands": ("fp32", bands),
    f"near, fp32, VAE in stock tiles of {TILE} px": ("fp32", near),
    "stock, bf16": ("bf16", stock),
    "exact, bf16": ("bf16", exact),
}


def psnr(pictures: torch.Tensor, others: torch.Tensor) -> float | None:
    """dB over all pixels of all pictures, uint8; None where they are equal."""
    error = (pictures.float() - others.float()).square().mean().item() / 255.0**2
    return None if error == 0 else -10.0 * math.log10(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("tiers.json"))
    parser.add_argument("--names", type=int, help="only the first so many of the 200 names")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", default="", help="the first, and those with this in their name")
    options = parser.parse_args()

    fixed = json.loads(FILE.read_text())
    names, pairs = fixed["names"][: options.names], fixed["unseen"][: options.names]
    pixels, pictures, _ = load_data(options.data)
    gallery = gallery_of(torch.from_numpy(pixels), pictures)
    trained = set(gallery.names)
    pairs = [pair for pair in pairs if " ".join(pair) not in trained]
    judge = load(dtype="fp32").vae
    known = {m: features(m, gallery.pixels, judge) for m in ("latent", "pixels", "histogram")}

    found: dict[str, Any] = {}
    first: torch.Tensor | None = None
    for tier, (dtype, prepare) in TIERS.items():
        if first is not None and options.only not in tier:
            continue
        started = time.perf_counter()
        pipe = load(dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        prepare(pipe)
        drawn = draw(pipe, names, options.steps, GUIDANCE, SEED)
        asked = [f"a {colour} {name}" for colour, name in pairs]
        unseen = draw(pipe, asked, options.steps, GUIDANCE, SEED)
        seconds = time.perf_counter() - started
        both = torch.cat([drawn, unseen])
        first = both if first is None else first
        judged = judge_names(drawn, names, gallery, judge, known)
        each = [psnr(a, b) for a, b in zip(first, both, strict=True)]
        ran = {} if prepare is stock else {n.path: n.running for n in pipe.xattn_report().layers}
        found[tier] = {
            **{measure: entry["right"] for measure, entry in judged.items()},
            "distinct": judged["latent"]["distinct"],
            "white_border": white_border(drawn),
            "unseen": judge_pairs(unseen, pairs, gallery),
            "psnr_to_stock_db": psnr(first, both),
            "worst_psnr_db": min((d for d in each if d is not None), default=None),
            "attention_ran": sorted(set(ran.values()) - {"not run yet"}) or ["stock"],
            "seconds": round(seconds, 1),
        }
        print(tier, json.dumps(found[tier]), flush=True)
    versions = {"torch": torch.__version__, "sdx_accel": sdx_accel.__version__}
    settings = {"steps": options.steps, "guidance": GUIDANCE, "seed": SEED, "names": len(names)}
    settings |= {"threads": torch.get_num_threads(), **versions}
    options.out.write_text(json.dumps({"settings": settings, "tiers": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
