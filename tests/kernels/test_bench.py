"""The micro-benchmark's dry run and its timing helper."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

BENCH = Path(__file__).parents[2] / "kernels" / "bench" / "bench_attention.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_attention", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_dry_run_writes_rows_and_prints_refusals(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "rows.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), "--tiny", "--out", str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(out.read_text())
    rows = {(row["shape"], row["implementation"]): row for row in document["rows"]}
    assert len(rows) == 12
    assert rows["tiny-self", "automatic"]["median_ms"] > 0
    assert document["machine"]["torch"] == torch.__version__
    if not torch.cuda.is_available():
        assert rows["tiny-self", "sdpa-cudnn"]["note"] == "refused"
        assert rows["tiny-self", "automatic"]["ran"] == "sdpa"
        assert rows["tiny-causal", "automatic"]["ran"] == "reference"
    assert "TFLOP/s" in done.stdout


def test_case_149_every_sample_is_timed_alone_after_the_warm_up() -> None:
    bench = load()
    now = 0.0
    calls: list[int] = []

    def call(index: int) -> None:
        nonlocal now
        calls.append(index)
        # the warm-up is slow, and must not show
        now += 5.0 if len(calls) <= 10 else 0.25

    times = bench.samples_ms(call, torch.device("cpu"), samples=4, clock=lambda: now)
    assert times == [250.0] * 4
    assert calls == [*range(10), *range(4)]


def test_the_dispatch_benchmark_has_a_row_for_every_way(tmp_path: Path) -> None:
    script = BENCH.with_name("bench_dispatch.py")
    out = tmp_path / "deep" / "dispatch.json"
    command = [sys.executable, str(script), "--tiny", "--device", "cpu"]
    # where $OUT names a folder, --json is not needed
    environment = {**os.environ, "OUT": str(out.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    document = json.loads(out.read_text())
    ran = {(row["case"], row["op"]): row["ran"] for row in document["rows"]}
    assert ran == {
        ("self", ""): "sdpa",
        ("self", "sdpa"): "sdpa",
        ("cross", ""): "sdpa",
        ("cross", "sdpa"): "sdpa",
        ("causal (CLIP)", ""): "reference",
        ("key padding", ""): "sdpa",
        ("dense bias", ""): "sdpa",
        ("self in bf16", ""): "sdpa",
        ("512 dims", ""): "sdpa",
        ("forward of gradients", ""): "sdpa",
        ("backward", ""): "torch's",
        ("backward of causal", ""): "reference-backward",
    }
    for row in document["rows"]:
        assert row["ours_us"] > 0
        assert row["torch_us"] > 0
        assert abs(row["ours_us"] - row["torch_us"] - row["above_us"]) < 0.02
    assert document["machine"]["torch"] == torch.__version__
    assert len(done.stdout.splitlines()) == len(document["rows"])
