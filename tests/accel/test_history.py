"""Learned peaks: what a phase took too much is planned for the next time, and named in the plan."""

from dataclasses import replace

import pytest

from sdx_accel.budget.units import MIB
from sdx_accel.runtime.checkpoints import describe
from sdx_accel.runtime.history import MOST_CELLS, History, cell_of, digest_of
from sdx_accel.runtime.phase_calls import Job

DTYPES = {"unet": "float16", "vae": "float16"}


def test_a_phase_that_took_more_is_remembered(tmp_path):
    assert History(tmp_path).learn("c", "decode", 1000 * MIB, 1031 * MIB)
    # another process
    assert History(tmp_path).peaks("c") == {"decode": 32 * MIB}
    assert History(tmp_path).peaks("other") == {}


def test_figures_never_fall_and_add_up(tmp_path):
    history = History(tmp_path)
    history.learn("c", "decode", 1000 * MIB, 1020 * MIB)
    assert not history.learn("c", "decode", 1020 * MIB, 900 * MIB)
    assert not history.learn("c", "decode", 1020 * MIB, 1020 * MIB)
    assert history.peaks("c") == {"decode": 20 * MIB}
    # the prediction had those 20 MiB in it already
    assert history.learn("c", "decode", 1020 * MIB, 1024 * MIB)
    assert history.learn("c", "text", 10 * MIB, 12 * MIB)
    assert history.peaks("c") == {"decode": 24 * MIB, "text": 2 * MIB}


def test_a_cell_is_all_that_activations_depend_on():
    sdxl, sd15 = describe("random:sdxl-tiny"), describe("random:sd15-tiny")
    job = Job(64, 64)
    cells = {
        cell_of("key", sdxl, job, DTYPES, "exact"),
        cell_of("other card", sdxl, job, DTYPES, "exact"),
        cell_of("key", sd15, job, DTYPES, "exact"),
        cell_of("key", sdxl, Job(64, 128), DTYPES, "exact"),
        cell_of("key", sdxl, job, {**DTYPES, "vae": "float32"}, "exact"),
        cell_of("key", sdxl, job, DTYPES, "near"),
    }
    assert len(cells) == 6
    # the same model from another place
    moved = replace(describe("random:sdxl-tiny"), source="/models/x")
    assert cell_of("key", moved, job, DTYPES, "exact") in cells


def test_the_digest_names_the_figures():
    assert digest_of({}) == ""
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1}) != digest_of({"a": 2})


@pytest.mark.parametrize(
    "text", ["{", '{"cells": 3}', '{"cells": [["c", {"text": "x"}]]}', '{"cells": [["c"]]}']
)
def test_a_broken_file_is_an_empty_history(tmp_path, text):
    (tmp_path / "peaks.json").write_text(text)
    history = History(tmp_path)
    assert history.peaks("c") == {}
    assert history.learn("c", "text", 0, MIB)
    assert history.peaks("c") == {"text": 2 * MIB}


def test_old_cells_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr("sdx_accel.runtime.history.MOST_CELLS", 3)
    history = History(tmp_path)
    for cell in ("a", "b", "c", "a", "d"):
        history.learn(cell, "text", 0, MIB)
    assert not history.peaks("b")
    assert all(history.peaks(cell) for cell in ("c", "a", "d"))
    assert MOST_CELLS >= 100


def test_a_home_that_cannot_be_written_learns_nothing(tmp_path):
    (tmp_path / "home").write_text("")
    history = History(tmp_path / "home")
    assert not history.learn("c", "text", 0, MIB)
    assert history.peaks("c") == {}
    assert History(None).peaks("c") == {}
