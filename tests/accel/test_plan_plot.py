"""`plan --plot`, `generate --plot`: what the drawing shows, and where it cannot be made."""

import importlib
import json
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sdx_accel
from sdx_accel.api import Report
from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Phase, Plan
from sdx_accel.cli.pictures_out import Destination
from sdx_accel.cli.plot import open_plot, save_plot
from sdx_accel.errors import PictureError, RefusedError, WorkError
from sdx_accel.runtime.enforce import PhaseRecord
from sdx_accel.runtime.plot import plot_plan

Cli = Callable[..., Any]
TINY = ("--model", "random:sdxl-tiny", "--width", 64, "--height", 64)


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
    line = ("plan", "--vram", 8, *TINY, "--plot", "p.png")
    result = cli(*line)
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1] == "drawn: p.png"
    assert "predicted peak" in result.out
    assert len(drawn) == 1
    # as pictures do: what is there stays, unless it may be replaced
    first = (tmp_path / "p.png").read_bytes()
    (tmp_path / "p.png").write_bytes(b"mine")
    again = cli(*line, "--json")
    assert (tmp_path / "p.png").read_bytes() == b"mine"
    assert "drawn: p-2.png" in again.err
    assert again.out.count("\n") == 1
    assert "drawn: p.png" in cli(*line, "--overwrite").out
    assert (tmp_path / "p.png").read_bytes()[:8] == first[:8]
    assert {path.name for path in tmp_path.iterdir()} == {"p.png", "p-2.png"}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on the CPU whose phases are measured all the same, 1 GiB below their predictions."""

    class Measured(PhaseRecord):
        def __init__(self, name: str, predicted: float, seen: float | None) -> None:
            super().__init__(name, predicted, predicted - 1.0)

    monkeypatch.setattr("sdx_accel.runtime.executor.PhaseRecord", Measured)


@pytest.mark.usefixtures("measured")
def test_a_run_draws_what_it_measured(cli: Cli, drawn: list[Any], tmp_path: Path) -> None:
    line = ("generate", "a cat", *TINY, "--steps", 1, "--seed", 1, "--plot", "r.svg")
    result = cli(*line, "--json")
    assert result.code == 0, result.err
    values = json.loads(result.out)
    assert values["plot"] == "r.svg"
    (axes,) = drawn[-1].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    peaks = [phase["predicted_peak_gib"] for phase in values["report"]["phases"]]
    assert lines["measured peak"] == pytest.approx([peak - 1.0 for peak in peaks])
    assert len(peaks) == 3
    # as the user calls it, not as the loaded pipeline does
    digest = values["plan"]["digest"]
    assert axes.get_title() == f"random:sdxl-tiny, 64 × 64 px, plan {digest}"
    assert b"measured peak" in (tmp_path / "r.svg").read_bytes()
    # the same line is one of plan's
    assert cli("plan", *line[1:]).code == 0
    assert "measured peak" not in {line.get_label() for line in drawn[-1].axes[0].lines}
    assert (tmp_path / "r-2.svg").is_file()


def test_a_run_without_a_budget_draws_its_plan(
    cli: Cli, drawn: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDX_DISABLE", "1")
    # the drawing may have the picture's name, and does not replace it even where it might
    result = cli(
        *("generate", "a cat", *TINY, "--steps", 1, "-o", "a.png", "--plot", "a.png"), "--overwrite"
    )
    assert result.code == 0, result.err
    assert "drawn: a-2.png" in result.out
    assert result.paths == [Path("a.png")]
    assert drawn[0].axes[0].get_xticklabels()[0].get_text() == "text"


def test_pictures_are_named_where_the_drawing_is_lost(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise WorkError("no space left")

    monkeypatch.setattr("sdx_accel.cli.run_job.save_plot", full)
    result = cli("generate", "a cat", *TINY, "--steps", 1, "--plot", "r.png")
    assert result.code == 1
    assert len(result.paths) == 1
    assert "no space left" in result.err


def _never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("planned although the drawing cannot be made")


VERBS = [("plan",), ("generate", "a cat")]


@pytest.mark.parametrize("verb", VERBS)
def test_without_matplotlib_the_extra_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sdx_accel, "plan", _never)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    result = cli(*verb, "--vram", 8, "--plot", "p.png")
    assert result.code == 2
    assert 'pip install "sdx-accel[plot]"' in result.err


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("p.txt", ".png, .svg, .pdf"),
        ("", ".png, .svg, .pdf"),
        ("none/p.png", "does not exist"),
        ("file/p.png", "does not exist"),
        ("folder.png", "is a folder"),
        (f"{'p' * 300}.png", "longer than 255 bytes"),
    ],
)
def test_what_could_not_be_drawn_is_refused_before_any_work(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: tuple[str, ...],
    name: str,
    words: str,
) -> None:
    monkeypatch.setattr(sdx_accel, "plan", _never)
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "folder.png").mkdir()
    result = cli(*verb, "--vram", 8, "--plot", name)
    assert result.code == 2
    assert words in result.err
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder.png"}


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # permissions do not stop root, whom tests may run as
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PictureError, match=r"--plot .* not writable: Permission denied"):
        open_plot(str(tmp_path / "p.png"), False)


def test_the_ending_is_kept_as_it_was_written(tmp_path: Path) -> None:
    destination = open_plot(str(tmp_path / "P.PNG"), False)
    assert isinstance(destination, Destination)
    assert save_plot(_plan(), destination) == tmp_path / "P.PNG"
    assert (tmp_path / "P.PNG").read_bytes()[:4] == b"\x89PNG"


def test_a_report_draws_itself(drawn: list[Any], tmp_path: Path) -> None:
    report = Report((), (PhaseRecord("denoise", 3.0, 2.75),), _plan())
    report.plot(tmp_path / "r.png")
    lines = {line.get_label(): list(line.get_ydata()) for line in drawn[0].axes[0].lines}
    assert lines["measured peak"] == [2.75]
    with pytest.raises(RefusedError, match=r"enable_xattn\(vram"):
        Report((), (), None).plot(tmp_path / "none.png")
