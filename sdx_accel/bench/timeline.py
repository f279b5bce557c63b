"""Memory over the time of one picture within a budget, as the driver sees it, and its drawing.

    python -m sdx_accel.bench.timeline [--model random:sdxl] [--vram 8] [--steps 20] [--size 1024]
    python -m sdx_accel.bench.timeline --draw timeline.json --picture timeline.png

The first picture warms up; the second, with a new prompt, is recorded: the driver's count every
20 ms by another process, and when each phase began. Writes timeline.json into $OUT, or the current
folder. Drawing needs matplotlib and no GPU.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from sdx_accel.bench.cell import PROMPTS
from sdx_accel.bench.sampler import sampled

__all__ = ["draw", "main", "run"]

GIB = 1 << 30
#: the module whose first call begins a phase
FIRST = {"text_encoder": "text", "unet": "denoise", "vae": "decode"}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Make the pictures; the document that is written."""
    import torch

    import sdx_accel  # noqa: F401  (attaches the methods)
    from sdx_accel.runtime import checkpoints
    from sdx_accel.runtime.probe import read_idle_cards

    seen: dict[str, Any] = {}
    begins: dict[str, float] = {}
    gpu = not options.tiny
    if gpu:
        read_idle_cards()
        with sampled(seen, series=True):
            pass
    idle = seen.get("idle", 0)
    model = "random:sdxl-tiny" if options.tiny else options.model
    pipe = checkpoints.load(model, dtype="fp32" if options.tiny else "fp16")
    pipe.set_progress_bar_config(disable=True)
    for name, phase in FIRST.items():
        part = getattr(pipe, name)

        def mark(module: Any, args: Any, phase: str = phase) -> None:
            begins.setdefault(phase, time.time())

        # the VAE is entered through decode(), not through its own forward
        (part.decoder if name == "vae" else part).register_forward_pre_hook(mark)
    pipe.enable_xattn(vram=options.vram, device="cuda" if gpu else "cpu")
    size = 64 if options.tiny else options.size

    def picture(index: int) -> None:
        pipe(
            PROMPTS[index],
            height=size,
            width=size,
            num_inference_steps=options.steps,
            generator=torch.Generator().manual_seed(index),
            output_type="np",
        )

    picture(0)
    begins.clear()
    if gpu:
        with sampled(seen, series=True):
            start = time.time()
            picture(1)
            end = time.time()
    else:
        start = time.time()
        picture(1)
        end = time.time()
    report = pipe.xattn_report()
    return {
        "command": " ".join(["python -m sdx_accel.bench.timeline", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name() if gpu else "none",
        "model": model,
        "size": size,
        "steps": options.steps,
        "budget_gib": options.vram,
        "plan": report.plan.digest,
        "seconds": end - start,
        "phases": [
            {
                "name": phase.name,
                "begin_s": begins[phase.name] - start,
                "predicted_peak_gib": phase.predicted_peak_gib,
                "measured_peak_gib": phase.measured_peak_gib,
            }
            for phase in report.phases
        ],
        # relative to the idle card: what this process takes, its CUDA context included
        "driver_gib": [
            (round(at - start, 3), round((used - idle) / GIB, 4))
            for at, used in seen.get("series", [])
            if start <= at <= end
        ],
    }


def draw(document: dict[str, Any], target: Path) -> None:
    """Draw a document of `run`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=110)
    axes = figure.add_subplot()
    times, used = zip(*document["driver_gib"], strict=True)
    axes.fill_between(times, used, color="#8da0cb", linewidth=0, label="the driver's count")
    phases, end = document["phases"], document["seconds"]
    edges = [phase["begin_s"] for phase in phases] + [end]
    peaks = [phase["predicted_peak_gib"] for phase in phases]
    axes.stairs(peaks, edges, color="black", linewidth=1.5, label="predicted peak of each phase")
    budget = document["budget_gib"]
    axes.axhline(
        budget, color="#b2182b", linestyle="--", linewidth=1.5, label=f"budget {budget:g} GiB"
    )
    for phase, begin, until in zip(phases, edges, edges[1:], strict=False):
        axes.text((begin + until) / 2, 0.15, phase["name"], ha="center", va="bottom")
        axes.axvline(begin, color="white", linewidth=1)
    axes.set_xlim(0, end)
    axes.set_ylim(0, budget * 1.15)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB on the card")
    axes.set_title(
        f"{document['model']}, {document['size']}², {document['steps']} steps, "
        f"{document['card']}, a new prompt"
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(target)


def main() -> None:
    """Measure and write the JSON, or draw one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="random:sdxl")
    parser.add_argument("--vram", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true", help="tiny model on the CPU: a dry run")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw this instead of measuring")
    parser.add_argument("--picture", type=Path, default=Path("timeline.png"))
    options = parser.parse_args()
    if options.draw is not None:
        draw(json.loads(options.draw.read_text(encoding="utf-8")), options.picture)
        return
    document = run(options)
    target = Path(os.environ.get("OUT", ".")) / "timeline.json"
    target.write_text(json.dumps(document), encoding="utf-8")
    for phase in document["phases"]:
        print(phase)
    print(f"{document['seconds']:.2f} s, {len(document['driver_gib'])} samples, {target.name}")


if __name__ == "__main__":
    main()
