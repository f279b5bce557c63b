"""Runs one cell of the picture benchmark in a process of its own and writes its JSON record.

    python -m sdx_accel.bench.cell '{"model": …, "mode": …, …}' FILE

A process a cell, because the budget counts this process's CUDA context and a cap is per process.
"""

import hashlib
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["PROMPTS", "StepClock", "run"]

# new words for every picture, so that a prompt cache would not flatter the figure
PROMPTS = (
    "a lighthouse on a cliff in the evening sun",
    "two green bicycles in front of a bakery",
    "a paper boat on a puddle, macro photograph",
    "an old map of an island that never was",
    "a snow leopard asleep on warm stones",
    "a market hall full of yellow umbrellas",
)


def _sha(values: Any) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


class StepClock:
    """Times steps with events on the stream; nothing is synchronised inside the loop."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._cuda = device == "cuda"
        self._marks: list[Any] = []

    def mark(self, pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        """diffusers' `callback_on_step_end`."""
        if self._cuda:
            event = self._torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        return {}

    def seconds(self) -> list[float]:
        """Time of each step but the first since the last call, in seconds."""
        marks, self._marks = self._marks, []
        if self._cuda:
            self._torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
        return [b - a for a, b in pairwise(marks)]


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """One cell: load, enable, make pictures; see `sdx_accel.bench.gpu` for the cells."""
    import torch

    import sdx_accel  # noqa: F401  (attaches the methods)
    from sdx_accel.runtime import checkpoints
    from sdx_accel.runtime.probe import open_card, read_idle_cards

    device = cell["device"]
    if device == "cuda":
        read_idle_cards()
    started = time.perf_counter()
    pipe = checkpoints.load(cell["model"], dtype=cell["dtype"])
    loaded = time.perf_counter()
    pipe.set_progress_bar_config(disable=True)
    record: dict[str, Any] = {"cell": cell, "load_s": loaded - started}
    mode = cell["mode"]
    if mode == "budget":
        pipe.enable_xattn(vram=cell["vram"], device=device)
        plan = pipe.xattn_report().plan
        text = plan.to_json()
        # the prediction stands before the first picture is started
        record["plan"] = plan.to_dict()
        record["plan_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        record["enable_s"] = time.perf_counter() - loaded
    elif mode == "offload":
        pipe.enable_model_cpu_offload()
    else:
        pipe.to(device)
        if mode == "ours":
            pipe.enable_xattn()
    clock = StepClock(torch, device)
    pictures: list[dict[str, Any]] = []
    for index in range(cell["pictures"]):
        begin = time.perf_counter()
        image = pipe(
            PROMPTS[index % len(PROMPTS)],
            height=cell["size"],
            width=cell["size"],
            num_inference_steps=cell["steps"],
            generator=torch.Generator().manual_seed(index),
            output_type="np",
            callback_on_step_end=clock.mark,
        ).images[0]
        whole = time.perf_counter() - begin
        steps = clock.seconds()
        pictures.append(
            {
                "seconds": whole,
                "s_per_step": statistics.median(steps),
                "p10": sorted(steps)[len(steps) // 10],
                "p90": sorted(steps)[len(steps) * 9 // 10],
                "sha256": _sha(image),
                "spread": float(image.std()),
            }
        )
    record["pictures"] = pictures
    # the first picture compiles and loads kernels
    warm = pictures[1:] or pictures
    record["s_per_step"] = statistics.median(p["s_per_step"] for p in warm)
    record["s_per_picture"] = statistics.median(p["seconds"] for p in warm)
    if mode in ("budget", "ours"):
        report = pipe.xattn_report()
        record["phases"] = report.to_dict()["phases"]
        counts: dict[str, int] = {}
        for layer in report.layers:
            counts[layer.running] = counts.get(layer.running, 0) + 1
        record["running"] = counts
    if mode == "budget":
        session = pipe.__dict__["_sdx_budget"]
        record["moved_bytes"] = session.executor.moved_bytes
        record["readings"] = session.readings
    if device == "cuda":
        card = open_card(torch.device("cuda"))
        record["torch_peak_allocated"] = torch.cuda.max_memory_allocated()
        record["torch_peak_reserved"] = torch.cuda.max_memory_reserved()
        record["non_torch_bytes"] = card.non_torch_bytes()
        record["card"] = torch.cuda.get_device_name()
    return record


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(sys.argv[1]))), encoding="utf-8")
