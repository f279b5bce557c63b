"""`plan --plot`: what the picture shows, and what happens where it cannot be drawn."""

import importlib
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sdx_accel
from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Phase, Plan
from sdx_accel.cli.plot import plot_plan
from sdx_accel.errors import RefusedError
from sdx_accel.runtime.enforce import PhaseRecord

Cli = Callable[..., Any]


def _plan() -> Plan:
    phases = (
        Phase("text", 2.0, {"text_encoder": 1.0}, {"text_encoder": "2/2"}, 0.25, (64.0,)),
        Phase(
            "denoise",
            3.0,
            {"unet": 1.0, "unet ring": 0.2},
            {"unet": "4/9 + ring 205 MiB"},
            1.0,
            (100.0, 512.0, 256.0),
        ),
        Phase("decode", 2.5, {}, {}, 1.75, ()),
    )
    return Plan(
        model="made up",
        job={"width": 64, "height": 64},
        machine=Machine.generic(),
        budget_gib=3.5,
        feasible=True,
        smallest_budget_gib=2.0,
        binding_phase="decode",
        numerics={},
        placement={},
        phases=phases,
        moved_gib_per_picture=1.0,
        host_gib=4.0,
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keeps the figure that is saved."""
    figures = importlib.import_module("matplotlib.figure")
    kept = []
    save = figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda self, *a, **k: kept.append(self) or save(self, *a, **k)
    )
    return kept


def test_the_picture_holds_the_plans_figures(drawn: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "plan.png"
    plot_plan(_plan(), path, [PhaseRecord("denoise", 3.0, 2.75), PhaseRecord("text", 2.0, None)])
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > height > 300
    (axes,) = drawn[0].axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["text", "denoise", "decode"]
    (steps,) = (p for p in axes.patches if p.get_label() == "predicted peak")
    assert list(steps.get_data().values) == [2.0, 3.0, 2.5]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["budget 3.50 GiB"] == [3.5, 3.5]
    assert lines["measured peak"] == [2.75]
    tops = _tops(axes)
    # context, then the weights, then what is live at most
    assert tops["context and libraries"] == pytest.approx([0.75, 0.8, 0.75])
    assert tops["unet"] == pytest.approx([1.8])
    assert tops["unet ring"] == pytest.approx([2.0])
    assert tops["live activations"] == pytest.approx([1.75 + 64 / 1024, 2.5, 0.75])
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(legend) == len(set(legend))
    assert {"unet ring", "live activations", "predicted peak"} <= set(legend)


def _tops(axes: Any) -> dict[str, list[float]]:
    """The upper edge of each filled area, by label, in order of the phases."""
    tops: dict[str, list[float]] = {}
    for area in axes.collections:
        tops.setdefault(area.get_label(), []).append(area.get_paths()[0].vertices[:, 1].max())
    return tops


def test_pyplot_is_left_alone(drawn: list[Any], tmp_path: Path) -> None:
    before = "matplotlib.pyplot" in sys.modules
    plot_plan(_plan(), tmp_path / "plan.svg")
    assert ("matplotlib.pyplot" in sys.modules) == before
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_a_plan_that_does_not_fit_is_drawn_too(drawn: list[Any], tmp_path: Path) -> None:
    plot_plan(replace(_plan(), feasible=False, budget_gib=1.0), tmp_path / "plan.png")
    assert "DOES NOT FIT" in drawn[0].axes[0].get_title()


def test_what_cannot_be_written_is_refused(drawn: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RefusedError, match="cannot be written"):
        plot_plan(_plan(), tmp_path / "file" / "plan.png")


def test_the_verb_draws(cli: Cli, drawn: list[Any], tmp_path: Path) -> None:
    result = cli("plan", "--vram", 8, "--width", 64, "--height", 64, "--plot", "p.png")
    assert result.code == 0
    assert (tmp_path / "p.png").is_file()
    assert "predicted peak" in result.out
    assert len(drawn) == 1


def test_without_matplotlib_the_extra_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("planned although the picture cannot be drawn")

    monkeypatch.setattr(sdx_accel, "plan", never)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    result = cli("plan", "--vram", 8, "--plot", "p.png")
    assert result.code == 2
    assert 'pip install "sdx-accel[plot]"' in result.err


def test_another_ending_is_refused(cli: Cli) -> None:
    result = cli("plan", "--vram", 8, "--plot", "p.txt")
    assert result.code == 2
    assert ".png, .svg, .pdf" in result.err
