"""What tiles and bands of the VAE's decode leave to be seen, against the whole decode, on the CPU.

    python -m sdx_accel.bench.seams [--size 1024] [--tiles 768,512,384]

Two autoencoders: the demo model's, given the latents of a drawn scene, and the same shape with
random weights, given noise. fp32. PSNR is over the range of pictures, −1…1. The border figure is
the mean error where a tile overlaps its neighbour, or beside the border of a band, over that of all
other pixels. The tone is the largest mean difference of a tile or band from the whole decode in a
colour, in levels of 255: a step in tone is how a tile shows.
Prints a table and writes seams.json into $OUT, or the current folder.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["compare", "main", "run", "scene"]

Spans = Sequence[tuple[int, int]]


def scene(size: int) -> Any:
    """A drawn picture (1, 3, size, size) in −1…1: shaded balls before a background that darkens."""
    import torch

    across = torch.linspace(0, 1, size)
    y, x = across[:, None], across[None, :]
    picture = torch.stack([0.95 - 0.25 * y + 0 * x, 0.95 - 0.15 * y + 0 * x, 0.98 - 0.4 * x * y])
    balls = (
        (0.32, 0.30, 0.22, (0.80, 0.12, 0.10)),
        (0.70, 0.38, 0.16, (0.95, 0.75, 0.15)),
        (0.48, 0.74, 0.19, (0.20, 0.55, 0.20)),
        (0.85, 0.80, 0.10, (0.25, 0.20, 0.60)),
    )
    for left, top, radius, colour in balls:
        distance = ((x - left) ** 2 + (y - top) ** 2).sqrt() / radius
        light = (1.1 - ((x - left + 0.35 * radius) ** 2 + (y - top) ** 2).sqrt() / radius).clamp(
            0.2
        )
        for channel, value in enumerate(colour):
            picture[channel] = torch.where(distance < 1, value * light, picture[channel])
    return picture.clamp(0, 1)[None] * 2 - 1


def compare(picture: Any, whole: Any, rows: Spans, columns: Spans) -> dict[str, float]:
    """PSNR in dB, error at borders over that elsewhere, and the largest shift in tone.

    Args:
        picture: (1, 3, height, width), computed in pieces.
        whole: the same without.
        rows, columns: (start, end) of the pieces in pixels; where none overlap, a border is the
            two lines beside it.
    """
    import torch

    error = picture.double() - whole.double()
    border = _border_lines(rows)[:, None] | _border_lines(columns)[None, :]
    size = error.abs().mean((0, 1))
    means = [
        error[:, :, top:bottom, left:right].mean((0, 2, 3)).abs().max()
        for top, bottom in rows
        for left, right in columns
    ]
    return {
        "psnr": 10 * math.log10(4 / max(float(error.square().mean()), 1e-30)),
        "border": float(size[border].mean() / size[~border].mean().clamp(min=1e-30)),
        "tone": float(torch.stack(means).max()) * 255 / 2,
        "largest": float(error.abs().max()) / 2,
    }


def _border_lines(spans: Spans) -> Any:
    import torch

    lines = torch.zeros(spans[-1][1], dtype=torch.bool)
    for (_, end), (start, _) in pairwise(spans):
        lines[min(start, end - 1) : max(end, start + 1)] = True
    return lines


def _stock_spans(length: int, tile: int) -> Spans:
    """Where diffusers' own loop begins and ends its tiles, in latents."""
    stride = int(tile * 0.75)
    return [(at, min(at + tile, length)) for at in range(0, length, stride)]


def _rows(vae: Any, latent: Any, tiles: Sequence[int], weights: str) -> list[dict[str, Any]]:
    import torch

    from sdx_accel.runtime.phase_calls import set_bands, set_tiling
    from sdx_patches.vae_bands import bands
    from sdx_patches.vae_tiles import equal_spans

    widths = vae.config.block_out_channels
    factor = 2 ** (len(widths) - 1)
    size, side = latent.shape[-1] * factor, latent.shape[-1]
    found: list[dict[str, Any]] = []

    def decode() -> Any:
        with torch.no_grad():
            return vae.decode(latent, return_dict=False)[0]

    def add(mode: str, pieces: Spans, rows: Spans, columns: Spans) -> None:
        top, bottom = min(pieces, key=lambda span: span[1] - span[0])
        figures = compare(decode(), whole, rows, columns)
        found.append({"weights": weights, "mode": mode, "smallest_px": bottom - top, **figures})

    def pixels(spans: Spans) -> Spans:
        return [(start * factor, end * factor) for start, end in spans]

    whole = decode()
    for mode in ("fast", "low"):
        set_bands(vae, mode)
        cuts = list(bands(size, widths[0] * size, mode == "low"))
        add(f"bands, {mode}", cuts, cuts, [(0, size)])
    set_bands(vae, None)
    for tile in tiles:
        set_tiling(vae, tile)
        spans = pixels(equal_spans(side, tile // factor))
        add(f"equal tiles of at most {tile}", spans, spans, spans)
        set_tiling(vae, None)
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = tile, tile // factor
        spans = pixels(_stock_spans(side, tile // factor))
        add(f"diffusers' tiles of {tile}", spans, spans, spans)
        vae.disable_tiling()
    return found


def run(size: int = 1024, tiles: Sequence[int] = (768, 512, 384)) -> list[dict[str, Any]]:
    """All rows: both autoencoders, bands and tiles.

    Args:
        size: edge of the square picture in pixels.
        tiles: largest edges of tiles in pixels, smaller than the picture.
    """
    import torch

    from sdx_accel.runtime.checkpoints import describe, load
    from sdx_accel.runtime.random_models import build_random_component

    trained = load("demo", dtype="fp32").vae.eval()
    with torch.no_grad():
        latent = trained.encode(scene(size)).latent_dist.mode()
    rows = _rows(trained, latent, tiles, "demo")
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
    drawn = build_random_component(describe("demo").components["vae"], torch.float32)
    return rows + _rows(drawn, noise, tiles, "random")


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", type=int, default=1024, help="edge of the picture in pixels")
    parser.add_argument(
        "--tiles", type=lambda text: tuple(map(int, text.split(","))), default=(768, 512, 384)
    )
    options = parser.parse_args()
    rows = run(options.size, options.tiles)
    target = Path(os.environ.get("OUT", ".")) / "seams.json"
    target.write_text(json.dumps({"size": options.size, "rows": rows}, indent=1), encoding="utf-8")
    print("| weights | decode | smallest piece, px | PSNR, dB | border ÷ rest | tone, of 255 |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['weights']} | {row['mode']} | {row['smallest_px']} | {row['psnr']:.1f} | "
            f"{row['border']:.2f} | {row['tone']:.2f} |"
        )


if __name__ == "__main__":
    main()
