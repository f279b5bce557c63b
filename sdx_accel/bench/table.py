"""Turns picture.json and streaming.json into the Markdown tables of docs/benchmarks, and its CSV.

python -m sdx_accel.bench.table picture.json [--csv docs/benchmarks/nvidia-h200.csv]
python -m sdx_accel.bench.table streaming.json
"""

import argparse
import csv
import json
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["markdown", "rows", "streamed"]

COLUMNS = (
    "date",
    "commit",
    "gpu",
    "torch",
    "diffusers",
    "model",
    "mode",
    "budget_gib",
    "pictures",
    "steps",
    "predicted_gib",
    "driver_peak_gib",
    "s_per_step",
    "s_per_step_p10",
    "s_per_picture",
    "pixels",
)


def rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """One flat record a cell, in the order they ran."""
    found = []
    for record in document["records"]:
        if "error" in record:
            continue
        cell = record["cell"]
        found.append(
            {
                "gpu": record.get("card", "CPU"),
                "torch": document["versions"]["torch"],
                "diffusers": document["versions"]["diffusers"],
                "model": cell["source"],
                "mode": cell["mode"],
                "budget_gib": cell.get("vram", ""),
                "predicted_gib": record.get("predicted_peak_gib", ""),
                "driver_peak_gib": record.get("driver_peak_gib", ""),
                "s_per_step": round(record["s_per_step"], 4),
                "s_per_step_p10": round(min(p["p10"] for p in record["pictures"]), 4),
                "s_per_picture": round(record["s_per_picture"], 3),
                "pictures": cell["pictures"],
                "steps": cell["steps"],
                "many": cell["pictures"] >= 100,
                # equal digests are equal pixels; one a picture, the first two shown
                "pixels": "/".join(p["sha256"][:6] for p in record["pictures"][:2]),
            }
        )
    return found


def _names(row: dict[str, Any]) -> str:
    if row["mode"] == "budget":
        count = f", {row['pictures']} pictures of {row['steps']} steps" if row["many"] else ""
        return f"`enable_xattn(vram={row['budget_gib']:g})`{count}"
    names = {
        "stock": "stock diffusers, all resident",
        "ours": "`enable_xattn()`, all resident",
        "offload": "stock, `enable_model_cpu_offload()`",
    }
    return names[row["mode"]]


def markdown(document: dict[str, Any]) -> str:
    """A table a model, relative to the faster of the two resident runs.

    Medians of all warm steps, and the fastest tenth of the best picture beside them: eager SDXL is
    bound by the host, whose speed drifts more between cells than the cells differ.
    """
    lines: list[str] = []
    cells = rows(document)
    for model in dict.fromkeys(row["model"] for row in cells):
        mine = [row for row in cells if row["model"] == model]
        resident = [row for row in mine if row["mode"] in ("stock", "ours")]
        best, quick = (min(r[key] for r in resident) for key in ("s_per_step", "s_per_step_p10"))
        lines += [
            f"### `{model}`",
            "",
            "| run | predicted peak, GiB | driver's peak, GiB | ms/step | ÷ best resident "
            "| ms/step, fastest tenth | ÷ best resident | s/picture | pixels |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in mine:
            predicted = f"{row['predicted_gib']:.2f}" if row["predicted_gib"] else "–"
            seen = f"{row['driver_peak_gib']:.2f}" if row["driver_peak_gib"] else "–"
            lines.append(
                f"| {_names(row)} | {predicted} | {seen} | {row['s_per_step'] * 1e3:.1f} "
                f"| {row['s_per_step'] / best:.2f} | {row['s_per_step_p10'] * 1e3:.1f} "
                f"| {row['s_per_step_p10'] / quick:.2f} | {row['s_per_picture']:.2f} "
                f"| {row['pixels']} |"
            )
        lines.append("")
    return "\n".join(lines)


def streamed(document: dict[str, Any]) -> str:
    """A row for each budget of a streaming document, sizes and links in the order they ran."""
    lines = [
        "| size | link, GB/s | budget, GiB | predicted | driver's peak | copied a step, GiB "
        "| ms/step | bound | ÷ bound | s/picture |",
        "|" + "---|" * 10,
    ]
    for row in document["rows"]:
        if row["row"] != "budget":
            continue
        link = f"{row['throttle']:g}" if row["throttle"] else "all"
        begin = f"| {row['size']}² | {link} | {row['vram']:g} "
        if "s_per_step" not in row:
            lines.append(f"{begin}| {row.get('error') or row['why']} |" + " – |" * 6)
            continue
        peak = f"{row['driver_peak_gib']:.2f}" if "driver_peak_gib" in row else "–"
        lines.append(
            f"{begin}| {row['predicted_peak_gib']:.2f} | {peak} | {row['streamed_gib']:.2f} "
            f"| {row['s_per_step'] * 1e3:.0f} | {row['bound_s'] * 1e3:.0f} "
            f"| {row['over_bound']:.2f} | {row['s_per_picture']:.2f} |"
        )
    return "\n".join(lines)


def _append(target: Path, document: dict[str, Any], date: str) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    is_new = not target.exists()
    with target.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        if is_new:
            writer.writeheader()
        for row in rows(document):
            writer.writerow({"date": date, "commit": commit, **row})


def main() -> None:
    """Print the tables; append to the CSV if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    document = json.loads(options.file.read_text(encoding="utf-8"))
    if "rows" in document:
        print(streamed(document))
        return
    print(markdown(document))
    if options.csv:
        _append(options.csv, document, document.get("date", ""))


if __name__ == "__main__":
    main()
