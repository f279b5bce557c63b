"""Runs cells of the picture benchmark in a process of their own and writes their JSON records.

    python -m sdx_accel.bench.cell '[{"model": …, "mode": …, …}, …]' FILE

A process for each way to run, because a budget counts this process's CUDA context; budgets of one
model come after each other in one, which loads the model once.
"""

import gc
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from sdx_accel.bench.sampler import sampled

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


def run(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Load once, then enable and make pictures for each cell; see `sdx_accel.bench.gpu`.

    Args:
        cells: equal but for their budgets.
    """
    import torch

    import sdx_accel  # noqa: F401  (attaches the methods)
    from sdx_accel.runtime import checkpoints
    from sdx_accel.runtime.probe import read_idle_cards

    cuda = cells[0]["device"] == "cuda"
    if cuda:
        read_idle_cards()
    started = time.perf_counter()
    pipe = checkpoints.load(cells[0]["model"], dtype=cells[0]["dtype"])
    loading = time.perf_counter() - started
    pipe.set_progress_bar_config(disable=True)
    records = []
    for cell in cells:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seen: dict[str, Any] = {}
        with sampled(seen) if cuda else nullcontext():
            record = _pictures(pipe, cell)
        records.append({**record, "load_s": loading, **({"driver": seen} if cuda else {})})
        if cell is not cells[-1]:
            # the next one's peak is its own
            pipe.disable_xattn()
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    return records


def _pictures(pipe: Any, cell: dict[str, Any]) -> dict[str, Any]:
    """One cell with a pipeline that is loaded."""
    import torch

    from sdx_accel.runtime.probe import open_card

    device, mode = cell["device"], cell["mode"]
    loaded = time.perf_counter()
    record: dict[str, Any] = {"cell": cell}
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
