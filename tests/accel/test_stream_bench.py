"""The streaming benchmark: a dry run on the CPU, and what it refuses to report."""

import json

import pytest
import torch

from sdx_accel.bench import streaming
from sdx_accel.bench.streaming import Bench, parser, run
from sdx_accel.bench.table import streamed

LINE = ["--tiny", "--sizes", "64", "--budgets", "0.5,2"]


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    return tmp_path / "streaming-tiny.json"


def test_a_dry_run_writes_its_rows(written):
    document = run(parser().parse_args([*LINE, "--four-steps", "--peers"]))
    assert json.loads(written.read_text(encoding="utf-8")) == json.loads(json.dumps(document))
    computing, small, large, *peers = document["rows"]
    assert computing["C_s"] == min(computing["ours_s"], computing["stock_s"])
    assert not small["feasible"]
    assert "does not fit" in small["why"]
    assert large["feasible"]
    assert large["same_plan"]
    assert large["plan"]["job"]["guided"] is False
    assert len(large["plan_sha256"]) == 64
    assert large["over_bound"] == large["s_per_step"] / large["bound_s"]
    assert {"mmgp", "diffusers_dynamic_offloader"} == {row["peer"] for row in peers}
    assert "next" not in document


def test_the_prediction_is_on_disk_before_the_run_and_other_bits_are_an_error(written, monkeypatch):
    seen = []
    real = Bench.picture

    def picture(self, pipe, size, prompt=0):
        latents, step, whole = real(self, pipe, size, prompt)
        if self.document.get("next"):
            seen.append(json.loads(written.read_text(encoding="utf-8")))
            latents = latents.clone()
            latents.view(-1)[7] += 1e-6
        return latents, step, whole

    monkeypatch.setattr(Bench, "picture", picture)
    with pytest.raises(AssertionError, match="other bits"):
        run(parser().parse_args(LINE))
    (before,) = seen
    assert before["next"]["plan_sha256"]
    # what had been measured stays
    assert [row["row"] for row in before["rows"]] == ["computing", "budget"]
    assert len(json.loads(written.read_text(encoding="utf-8"))["rows"]) == 2


def test_rising_budgets_are_held_on_and_a_falling_one_begins_anew(written, monkeypatch):
    let_go, real = [], Bench.let_go
    monkeypatch.setattr(
        Bench, "let_go", lambda self, pipe: (let_go.append(self.held), real(self, pipe))
    )
    line = ["--tiny", "--sizes", "64", "--budgets", "2,3,2.5", "--throttle", "0,5", "--steps", "3"]
    document = run(parser().parse_args(line))
    budgets = [row for row in document["rows"] if row["row"] == "budget"]
    assert [(row["vram"], row["throttle"]) for row in budgets] == [
        *((vram, None) for vram in (2.0, 3.0, 2.5)),
        *((vram, 5.0) for vram in (2.0, 3.0, 2.5)),
    ]
    assert all(row["same_plan"] and row["plan"]["budget_gib"] == row["vram"] for row in budgets)
    # before the first, before each fall, and after the last
    assert let_go == [None, 3.0, 2.5, 3.0, 2.5]
    table = streamed(document).splitlines()
    assert len(table) == 2 + 6
    assert table[5].startswith("| 64² | 5 | 2 | ")
    assert len({line.count("|") for line in table}) == 1


def test_other_tools_may_have_budgets_of_their_own(written):
    line = ["--tiny", "--budgets", "2,3"]
    assert Bench(parser().parse_args(line))._peer_budgets() == (2.0, 3.0)
    assert Bench(parser().parse_args([*line, "--peer-budgets", "6"]))._peer_budgets() == (6.0,)


def test_graphs_come_after_all_rows_and_only_where_weights_stream(written, monkeypatch):
    bench = Bench(parser().parse_args(["--tiny", "--graph"]))
    pipe = bench.load()
    held = []

    def graph(self, pipe, session, size):
        held.append((session.plan.budget_gib, size))
        return {"graph_s_per_step": 0.5}

    monkeypatch.setattr(Bench, "_streamed_graph", graph)
    monkeypatch.setattr(Bench, "_use_link", lambda *_: None)
    rows = [
        {"vram": 2.0, "size": 64, "streamed_gib": 1.0},
        {"vram": 3.0, "size": 64, "streamed_gib": 0.0},
        {"vram": 0.1, "size": 64, "why": "does not fit"},
    ]
    bench.graphs(pipe, rows, {})
    assert held == [(2.0, 64)]
    assert [row.get("graph_s_per_step") for row in rows] == [0.5, None, None]
    pipe.disable_xattn()


def test_a_table_says_why_a_budget_does_not_fit():
    row = {"row": "budget", "size": 64, "vram": 0.5, "throttle": None, "why": "too small"}
    (*_, last) = streamed({"rows": [{"row": "computing"}, row]}).splitlines()
    assert last == "| 64² | all | 0.5 | too small |" + " – |" * 6


@pytest.mark.parametrize("kind", ["lora", "controlnet"])
def test_kinds(written, kind):
    bench = Bench(parser().parse_args(["--tiny", "--kind", kind]))
    pipe = bench.load()
    if kind == "lora":
        assert any("lora" in name for name, _ in pipe.unet.named_parameters())
    with streaming.recorded_calls(pipe) as calls:
        latents, _, _ = bench.picture(pipe, 64)
    assert set(calls) == ({"unet"} if kind == "lora" else {"controlnet", "unet"})
    with torch.no_grad():
        noise = streaming.step_of(pipe, calls)()[0]
    # with guidance two predictions for each picture
    assert noise.shape == (2, *latents.shape[1:])
