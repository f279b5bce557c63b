"""Seconds a step of stock, patched and budget-held SDXL, taken in turns in one process.

    python -m sdx_accel.bench.steps [--model random:sdxl] [--vram 8,7,6.8] [--rounds 4] [--tiny]

Eager SDXL is bound by the host, whose speed drifts by tens of per cent within minutes on shared
machines. So all run in turns, round after round, and each round is compared with itself; the ratio
that counts is the median over rounds. Writes steps.json into $OUT, or the current folder.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from sdx_accel.bench.cell import PROMPTS, StepClock
from sdx_accel.bench.numbers import at_least_one, gibibytes

__all__ = ["main", "run"]

RESIDENT = ("stock", "ours")


def _enter(pipe: Any, mode: str, vram: float | None, device: str) -> None:
    pipe.disable_xattn()
    if vram is not None:
        pipe.enable_xattn(vram=vram, device=device)
        return
    pipe.to(device)
    if mode == "ours":
        pipe.enable_xattn()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; the record has seconds a step by mode and round, and the ratios."""
    import torch

    import sdx_accel  # noqa: F401  (attaches the methods)
    from sdx_accel.runtime import checkpoints
    from sdx_accel.runtime.probe import read_idle_cards

    device = "cpu" if options.tiny else "cuda"
    if not options.tiny:
        read_idle_cards()
    model = "random:sdxl-tiny" if options.tiny else options.model
    pipe = checkpoints.load(model, dtype="fp32" if options.tiny else "fp16")
    pipe.set_progress_bar_config(disable=True)
    size = 128 if options.tiny else 1024
    clock = StepClock(torch, device)
    budgets: dict[str, float] = {f"{vram:g} GiB": vram for vram in options.vram}
    modes = (*RESIDENT, *budgets)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    digests: dict[str, set[str]] = {mode: set() for mode in modes}
    # the first round compiles, loads libraries and fills caches: run, not counted
    for number in range(options.rounds + 1):
        for mode in modes:
            _enter(pipe, mode, budgets.get(mode), device)
            latents = pipe(
                PROMPTS[0],
                height=size,
                width=size,
                num_inference_steps=options.steps,
                generator=torch.Generator().manual_seed(0),
                output_type="latent",
                callback_on_step_end=clock.mark,
            ).images
            steps = clock.seconds()
            digests[mode].add(hashlib.sha256(latents.cpu().numpy().tobytes()).hexdigest()[:16])
            if number:
                seconds[mode].append(statistics.median(steps))
    pipe.disable_xattn()
    best = [min(pair) for pair in zip(*(seconds[mode] for mode in RESIDENT), strict=True)]

    def over(mode: str, others: list[float]) -> float:
        return statistics.median(s / o for s, o in zip(seconds[mode], others, strict=True))

    return {
        "command": " ".join(["python -m sdx_accel.bench.steps", *sys.argv[1:]]),
        "model": model,
        "s_per_step": seconds,
        "budget_over_best_resident": {mode: over(mode, best) for mode in budgets},
        "ours_over_stock": over("ours", seconds["stock"]),
        "latents": {mode: sorted(found) for mode, found in digests.items()},
    }


def main() -> None:
    """Print the rounds and the ratios, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="random:sdxl")
    parser.add_argument(
        "--vram",
        type=gibibytes,
        default=(8.0,),
        help="budgets in GiB",
    )
    parser.add_argument("--rounds", type=at_least_one, default=4)
    parser.add_argument("--steps", type=at_least_one, default=12)
    parser.add_argument("--tiny", action="store_true", help="tiny model on the CPU: a dry run")
    record = run(parser.parse_args())
    for mode, values in record["s_per_step"].items():
        print(f"{mode:8}", "  ".join(f"{value * 1e3:7.1f}" for value in values), "ms/step")
    for mode, ratio in record["budget_over_best_resident"].items():
        print(f"{mode} ÷ best resident {ratio:.3f} (median of rounds)")
    print(f"ours ÷ stock {record['ours_over_stock']:.3f} (median of rounds)")
    target = Path(os.environ.get("OUT", ".")) / "steps.json"
    target.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
