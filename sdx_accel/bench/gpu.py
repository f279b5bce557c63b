"""The short benchmark behind `make gpu`: SDXL within a budget beside stock diffusers.

    python -m sdx_accel.bench.gpu [--full] [--tiny] [--steps 20] [--pictures 3]

Short: the checkpoint's VAE (fp32 decode) at 8, 7 and 6.8 GiB, our unconstrained run and stock,
about three minutes. `--full` adds diffusers' model offload, all of it with a VAE that decodes in
fp16, and two hundred pictures in a row.

Random weights in the public architecture: same bytes, shapes and arithmetic as the checkpoint, no
network. Every way to run has its own process, in which budgets come after each other, while another
process samples the driver's memory every 20 ms. Prints a table and writes picture.json into $OUT,
or the current folder.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sdx_accel.bench.numbers import at_least_one
from sdx_accel.bench.sampler import sampled

__all__ = ["main"]

GIB = 1 << 30


def _versions() -> dict[str, str]:
    names = ("torch", "diffusers", "transformers", "accelerate", "sdx-accel")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            found[name] = "not installed"
    return found


def _cells(tiny: bool, full: bool, steps: int, pictures: int, only: str) -> list[dict[str, Any]]:
    device = "cpu" if tiny else "cuda"
    common = {
        "device": device,
        "dtype": "fp32" if tiny else "fp16",
        "size": 128 if tiny else 1024,
        "steps": steps,
        "pictures": pictures,
    }
    models = ["random:sdxl-tiny"] if tiny else ["random:sdxl"]
    modes: list[dict[str, Any]] = [
        {"mode": "stock"},
        {"mode": "ours"},
        *({"mode": "budget", "vram": vram} for vram in (8.0, 7.0, 6.8)),
    ]
    if full and not tiny:
        models.append("random:sdxl-fp16vae")
        modes.append({"mode": "offload"})
    cells = [{**common, "model": model, **mode} for model in models for mode in modes]
    if full and not tiny:
        # two hundred new prompts in a row: what a single picture does not show
        many = {"pictures": 200, "steps": 4, "mode": "budget", "vram": 8.0}
        cells.append({**common, "model": models[0], **many})
    return [cell for cell in cells if only in _name(cell)]


def _name(cell: dict[str, Any]) -> str:
    return f"{cell['model'].split(':')[-1]} {cell['mode']}" + (
        f" {cell['vram']:g} GiB, {cell['pictures']} pictures" if "vram" in cell else ""
    )


def _save_models(cells: list[dict[str, Any]], folder: Path) -> None:
    """Build each model once; cells then load it as they would load a checkpoint."""
    from sdx_accel.runtime import checkpoints

    for name in dict.fromkeys(cell["model"] for cell in cells):
        target = folder / name.split(":")[-1]
        checkpoints.load(name, dtype=cells[0]["dtype"]).save_pretrained(target)
        for cell in cells:
            if cell["model"] == name:
                cell["source"], cell["model"] = name, str(target)


def _processes(cells: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Cells that run in one process: budgets of one model and one number of pictures."""

    def shared(cell: dict[str, Any]) -> tuple[Any, ...]:
        return cell["model"], cell["mode"], cell["pictures"], cell["steps"]

    return [list(group) for _, group in itertools.groupby(cells, shared)]


def _run(cells: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    result = folder / "cells.json"
    result.unlink(missing_ok=True)
    idle: dict[str, Any] = {}
    gpu = cells[0]["device"] == "cuda"
    if gpu:
        # before the process that is measured has a context
        with sampled(idle):
            pass
    command = [sys.executable, "-m", "sdx_accel.bench.cell", json.dumps(cells), str(result)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode or not result.exists():
        return [{"cell": cell, "error": child.stderr[-2000:]} for cell in cells]
    records: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
    for record in records:
        cell = record["cell"]
        # the folder that the cell loaded from says nothing to a reader
        record["cell"] = {**cell, "model": cell["source"]}
        if gpu:
            record["driver"]["idle"] = idle["idle"]
            record["driver_peak_gib"] = round((record["driver"]["peak"] - idle["idle"]) / GIB, 4)
        if cell["mode"] == "budget":
            record["predicted_peak_gib"] = record["plan"]["predicted_peak_gib"]
    return records


def _row(record: dict[str, Any]) -> str:
    name = _name({**record["cell"], "model": record["cell"].get("source", "")})
    if "error" in record:
        return f"{name:42} FAILED: {record['error'].strip().splitlines()[-1][:120]}"
    predicted = record.get("predicted_peak_gib")
    return (
        f"{name:42} {record['s_per_step'] * 1e3:8.1f} ms/step "
        f"{record['s_per_picture']:7.2f} s/picture "
        f"peak {record.get('driver_peak_gib', float('nan')):6.2f} GiB"
        + (f" (predicted {predicted:.2f})" if predicted else "")
        + f" {record['pictures'][0]['sha256'][:8]}"
    )


def main() -> None:
    """Run the cells, print a row each, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tiny", action="store_true", help="tiny model on the CPU: a dry run")
    parser.add_argument("--steps", type=at_least_one, default=20)
    parser.add_argument("--pictures", type=at_least_one, default=3)
    parser.add_argument("--full", action="store_true", help="all cells, about eight minutes")
    parser.add_argument("--only", default="", help="run cells whose name contains this")
    options = parser.parse_args()
    started = time.time()
    cells = _cells(options.tiny, options.full, options.steps, options.pictures, options.only)
    if not cells:
        parser.error(f"--only {options.only}: no cell's name contains this")
    target = Path(os.environ.get("OUT", ".")) / "picture.json"
    document: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m sdx_accel.bench.gpu", *sys.argv[1:]]),
        "versions": _versions(),
        "records": [],
    }
    records = document["records"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save_models(cells, folder)
        print(f"models ready after {time.time() - started:.0f} s", flush=True)
        for together in _processes(cells):
            found = _run(together, folder)
            records += found
            for record in found:
                print(_row(record), flush=True)
            # after every process: a run that is cut short keeps what it has measured
            target.write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(f"{len(records)} cells in {time.time() - started:.0f} s, written to {target.name}")
    sys.exit(any("error" in record for record in records))


if __name__ == "__main__":
    main()
