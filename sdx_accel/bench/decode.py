"""SDXL's VAE decode on a GPU: the whole picture, and bands of rows, in time, memory and error.

    python -m sdx_accel.bench.decode [--sizes 1024,2048,4096] [--tiny]

Random weights, one batch of one latent a size, our attention. Activations are what torch allocated
above the weights and the latent. The error is the largest difference from the whole decode in fp32
without TF32, at sizes up to `--truth`; the border figure is the mean error of the rows beside band
borders over that of all others, 1 where no seam shows.
Writes decode.json into $OUT, or the current folder, after every row.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["main", "run"]

GIB = 1 << 30
RUNS = 3


def _decode(vae: Any, latent: Any) -> tuple[Any, float, float | None]:
    """(picture, median seconds, GiB of activations or None without a GPU) of a decode."""
    import torch

    gpu = latent.is_cuda
    seconds, peak = [], None
    for index in range(RUNS + 1):
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.no_grad():
            picture = vae.decode(latent, return_dict=False)[0]
        if gpu:
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / GIB
        # the first one compiles kernels and chooses algorithms
        if index:
            seconds.append(time.perf_counter() - begin)
        if index < RUNS:
            del picture
    return picture, statistics.median(seconds), peak


def _border(error: Any, rows: int) -> float:
    """Mean error of rows beside borders of bands of `rows` rows, over that of all other rows."""
    lines = error.mean((0, 1, 3))
    beside = [line for edge in range(rows, len(lines), rows) for line in (edge - 1, edge)]
    if not beside:
        return 1.0
    inside = [line for line in range(len(lines)) if line not in set(beside)]
    return float(lines[beside].mean() / lines[inside].mean())


def _vae(part: Any, weights: dict[str, Any], dtype: Any, device: str) -> Any:
    """The VAE in a dtype, with our attention."""
    import sdx_accel  # noqa: F401  (attaches enable_xattn)
    from sdx_accel.runtime.random_models import build_random_component

    vae = build_random_component(part, dtype)
    vae.load_state_dict(weights)
    vae = vae.to(device).eval()
    # bands are switched on row by row
    vae.enable_xattn(fused=False)
    return vae


def _true(vae: Any, latent: Any) -> Any:
    """The whole decode in fp32 proper: by default torch's convolutions round to TF32."""
    import torch

    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        return vae.decode(latent, return_dict=False)[0]


def _row(vae: Any, latent: Any, mode: str | None, truth: Any, width: int) -> dict[str, Any]:
    """One decode; `width` is the number of channels at full size."""
    from sdx_accel.runtime.phase_calls import set_bands
    from sdx_patches.vae_bands import bands

    set_bands(vae, mode)
    picture, seconds, peak = _decode(vae, latent)
    size = picture.shape[-1]
    row: dict[str, Any] = {
        "size": size,
        "dtype": str(latent.dtype).removeprefix("torch."),
        "mode": mode or "whole",
        "seconds": seconds,
        "activations_gib": peak,
        "finite": bool(picture.isfinite().all()),
    }
    if truth is not None:
        error = (picture.float() - truth).abs()
        # of the range of pictures, −1…1
        row["error"] = float(error.max()) / 2
        if mode is not None:
            top, bottom = next(iter(bands(size, width * size, mode == "low")))
            row["border"] = _border(error, bottom - top)
    return row


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rows; the document that was written."""
    import torch

    from sdx_accel.runtime.architectures import architecture
    from sdx_accel.runtime.random_models import build_random_component

    device = "cpu" if options.tiny else "cuda"
    spec = "random:sdxl-tiny" if options.tiny else "random:sdxl-fp16vae"
    part = architecture(spec).components["vae"]
    target = Path(os.environ.get("OUT", ".")) / "decode.json"
    rows: list[dict[str, Any]] = []
    document = {
        "command": " ".join(["python -m sdx_accel.bench.decode", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "card": "none" if options.tiny else torch.cuda.get_device_name(),
        "rows": rows,
    }
    weights = build_random_component(part, torch.float32).state_dict()
    widths = part.config["block_out_channels"]
    for size in options.sizes:
        side = size // 2 ** (len(widths) - 1)
        generator = torch.Generator().manual_seed(0)
        shape = (1, part.config["latent_channels"], side, side)
        latent = torch.randn(shape, generator=generator).to(device)
        truth = None
        for dtype in (torch.float32,) if options.tiny else (torch.float32, torch.float16):
            vae = _vae(part, weights, dtype, device)
            whole = size <= options.truth
            if whole and truth is None:
                truth = _true(vae, latent)
            for mode in (None, "fast", "low"):
                # above the limit the whole decode in fp32 does not fit any card
                if dtype == torch.float32 and mode is None and not whole:
                    continue
                rows.append(_row(vae, latent.to(dtype), mode, truth, widths[0]))
                target.write_text(json.dumps(document, indent=1), encoding="utf-8")
                print(json.dumps(rows[-1]), flush=True)
            del vae
    return document


def main() -> None:
    """Run the rows, print each, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--sizes", type=lambda text: tuple(map(int, text.split(","))), default=(1024, 2048, 4096)
    )
    parser.add_argument("--truth", type=int, default=2048, help="largest size with an fp32 truth")
    parser.add_argument("--tiny", action="store_true", help="tiny model on the CPU: a dry run")
    document = run(parser.parse_args())
    sys.exit(not all(row["finite"] for row in document["rows"]))


if __name__ == "__main__":
    main()
