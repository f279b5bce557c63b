"""The whole-picture benchmark: a dry run of one cell, and the tables made from a document."""

import argparse
import json
import os
import sys
import time

import pytest
import torch
from PIL import Image

from sdx_accel.bench import cell, decode, gpu, steps, table, timeline
from sdx_accel.bench.sampler import sampled


def test_a_cell_records_what_it_ran():
    wanted = {
        "device": "cpu",
        "dtype": "fp32",
        "size": 64,
        "steps": 3,
        "pictures": 2,
        "model": "random:sdxl-tiny",
        "source": "random:sdxl-tiny",
        "mode": "budget",
        "vram": 8.0,
    }
    record, other = cell.run([wanted, {**wanted, "vram": 7.0}])
    json.dumps([record, other])
    assert (record["plan"]["budget_gib"], other["plan"]["budget_gib"]) == (8.0, 7.0)
    assert [p["sha256"] for p in other["pictures"]] == [p["sha256"] for p in record["pictures"]]
    assert [len(p["sha256"]) for p in record["pictures"]] == [16, 16]
    # two prompts, two pictures
    assert len({p["sha256"] for p in record["pictures"]}) == 2
    assert record["plan"]["feasible"]
    assert len(record["plan_sha256"]) == 64
    assert record["running"]


def test_short_and_full_cells():
    short = gpu._cells(False, False, 20, 3, "")
    full = gpu._cells(False, True, 20, 3, "")
    assert [c.get("vram") for c in short] == [None, None, 8.0, 7.0, 6.8]
    assert len(full) == 13
    assert max(c["pictures"] for c in full) == 200
    # a process for each way to run; budgets share theirs, and so its model
    assert [[c.get("vram") for c in cells] for cells in gpu._processes(full)] == [
        *([None], [None], [8.0, 7.0, 6.8], [None]) * 2,
        [8.0],
    ]
    assert {c["model"] for c in full} == {"random:sdxl", "random:sdxl-fp16vae"}
    assert {c["device"] for c in gpu._cells(True, False, 1, 1, "")} == {"cpu"}


def _record(mode, step, **extra):
    return {
        "cell": {
            "mode": mode,
            "source": "random:sdxl",
            "pictures": 3,
            "steps": 20,
            **extra.pop("cell", {}),
        },
        "s_per_step": step,
        "s_per_picture": step * 20,
        "pictures": [{"sha256": "0123456789abcdef", "p10": step * 0.9}],
        **extra,
    }


DOCUMENT = {
    "versions": {"torch": "2.13.0", "diffusers": "0.42.1"},
    "records": [
        _record("stock", 0.06),
        _record("ours", 0.05),
        _record("budget", 0.055, cell={"vram": 8.0}, predicted_peak_gib=7.9, driver_peak_gib=7.7),
        {"cell": {"mode": "offload"}, "error": "out of memory"},
    ],
}


def test_the_table_compares_with_the_faster_resident_run():
    text = table.markdown(DOCUMENT)
    assert "| `enable_xattn(vram=8)` | 7.90 | 7.70 | 55.0 | 1.10 | 49.5 | 1.10 |" in text
    assert "| stock diffusers, all resident | – | – | 60.0 | 1.20 |" in text


def test_rows_are_appended_with_one_header(tmp_path):
    target = tmp_path / "card.csv"
    for _ in range(2):
        table._append(target, DOCUMENT, "2026-01-01")
    lines = target.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 2 * 3
    assert lines[0].startswith("date,commit,gpu")


def test_turns_compare_each_round_with_itself():
    options = argparse.Namespace(tiny=True, model="", vram=(8.0, 7.0), rounds=2, steps=3)
    record = steps.run(options)
    json.dumps(record)
    assert {mode: len(values) for mode, values in record["s_per_step"].items()} == {
        "stock": 2,
        "ours": 2,
        "8 GiB": 2,
        "7 GiB": 2,
    }
    # a mode gives the same latents each round, and no budget changes a bit
    latents = record["latents"]
    assert [len(found) for found in latents.values()] == [1, 1, 1, 1]
    assert latents["ours"] == latents["8 GiB"] == latents["7 GiB"]
    times = record["s_per_step"]
    ratios = [
        b / min(s, o) for s, o, b in zip(times["stock"], times["ours"], times["7 GiB"], strict=True)
    ]
    assert record["budget_over_best_resident"]["7 GiB"] == pytest.approx(sum(ratios) / 2)
    assert set(record["budget_over_best_resident"]) == {"8 GiB", "7 GiB"}


def test_a_decode_is_whole_and_in_bands(monkeypatch, tmp_path):
    monkeypatch.setenv("OUT", str(tmp_path))
    document = decode.run(argparse.Namespace(sizes=(256,), truth=256, tiny=True))
    assert json.loads((tmp_path / "decode.json").read_text(encoding="utf-8")) == document
    whole, fast, low = document["rows"]
    assert [row["mode"] for row in document["rows"]] == ["whole", "fast", "low"]
    assert whole["error"] == 0.0
    # fp32: equal but for the order of sums
    assert 0 < fast["error"] < 1e-5
    assert 0 < low["error"] < 1e-5


def test_a_seam_shows_at_band_borders():
    error = torch.ones(1, 3, 32, 4)
    assert decode._border(error, 8) == pytest.approx(1.0)
    error[:, :, 7:9] = 3.0
    assert decode._border(error, 8) == pytest.approx(1.0 + 2 * 2 / 6)
    # one band has no border
    assert decode._border(error, 32) == 1.0


def test_memory_over_time(tmp_path):
    line = argparse.Namespace(model="", vram=2.0, steps=2, size=1024, tiny=True)
    document = timeline.run(line)
    begins = [phase["begin_s"] for phase in document["phases"]]
    assert [phase["name"] for phase in document["phases"]] == ["text", "denoise", "decode"]
    assert 0 <= begins[0] < begins[1] < begins[2] < document["seconds"]
    document["driver_gib"] = [(0.0, 0.6), (document["seconds"], 0.7)]
    timeline.draw(document, tmp_path / "timeline.png")
    with Image.open(tmp_path / "timeline.png") as picture:
        assert picture.width > 600


FAKE_NVML = """
class Info:
    used = 100

def nvmlInit(): pass
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMemoryInfo(handle):
    Info.used += 50
    return Info
"""


def test_the_sampler_sees_the_block_from_its_own_process(monkeypatch, tmp_path):
    (tmp_path / "pynvml.py").write_text(FAKE_NVML, encoding="utf-8")
    # before what is installed, and beside what runs these tests from a checkout
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    seen = {}
    begin = time.time()
    with sampled(seen, series=True):
        time.sleep(0.1)
    assert seen["idle"] == 150
    assert seen["samples"] == len(seen["series"]) + 1
    assert seen["peak"] == seen["series"][-1][1] == 150 + 50 * len(seen["series"])
    assert all(begin <= at <= time.time() for at, _ in seen["series"])


@pytest.mark.parametrize(
    ("program", "options", "words"),
    [
        (gpu, ["--tiny", "--pictures", "0"], "'0' is no whole number from 1 up"),
        (gpu, ["--tiny", "--only", "nothing"], "no cell's name contains this"),
        (steps, ["--tiny", "--rounds", "0"], "'0' is no whole number"),
        (steps, ["--tiny", "--steps", "-1"], "'-1' is no whole number"),
        (steps, ["--tiny", "--vram", "foo"], "'foo' are no budgets in GiB"),
        (steps, ["--tiny", "--vram", "0"], "'0' are no budgets in GiB"),
    ],
)
def test_what_would_measure_nothing_is_refused(monkeypatch, capsys, program, options, words):
    monkeypatch.setattr("sys.argv", ["bench", *options])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
