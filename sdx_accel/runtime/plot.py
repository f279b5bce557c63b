"""Draws a plan: memory over the phases of a picture, and the budget as a line.

Knows figures and bytes; knows nothing of flags. Needs matplotlib, which comes with `[plot]`.
"""

import io
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdx_accel.budget.plan import Phase, Plan
from sdx_accel.errors import RefusedError

if TYPE_CHECKING:
    from sdx_accel.runtime.enforce import PhaseRecord

__all__ = ["check_drawable", "draw_plan", "plot_plan"]

_SUFFIXES = (".png", ".svg", ".pdf")
_BASE_COLOUR, _ACTIVATION_COLOUR = "#b8b8b8", "#e08214"
# one colour for each model, the ring's last; from ColorBrewer's qualitative Set2 and Dark2
_COLOURS = ("#66c2a5", "#8da0cb", "#e78ac3", "#a6d854", "#1b9e77", "#7570b3", "#e7298a", "#ffd92f")


def check_drawable(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is planned.

    Raises:
        RefusedError: matplotlib is missing, or the name's ending is none that is drawn.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise RefusedError(f"plot {str(path)!r}: the name has to end in {', '.join(_SUFFIXES)}")
    _figure_class()


def plot_plan(plan: Plan, path: Path, measured: Sequence["PhaseRecord"] = ()) -> None:
    """Draw a plan into a file, see `draw_plan`; a file of that name is replaced.

    Args:
        plan: the plan, feasible or not.
        path: where to; the ending (.png, .svg, .pdf) gives the format. Missing folders are made.
        measured: the records of a run.

    Raises:
        RefusedError: matplotlib is missing, the ending is unknown, the file cannot be written.
    """
    check_drawable(path)
    drawn = draw_plan(plan, path.suffix, measured)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn)
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {error.strerror or error}") from error


def draw_plan(plan: Plan, suffix: str, measured: Sequence["PhaseRecord"] = ()) -> bytes:
    """Draw where a plan's memory goes, and what was measured if there was a run.

    Each phase is one unit wide. From below: the CUDA context with the libraries, the weights that
    are on the card, the live activations over the phase. The black steps are the predicted peaks,
    which lie above that by what torch keeps in its cache.

    Args:
        plan: the plan, feasible or not.
        suffix: `.png`, `.svg` or `.pdf`.
        measured: the records of a run.

    Returns:
        The contents of the file.

    Raises:
        RefusedError: matplotlib is missing.
    """
    # not through pyplot: its state and its windows belong to the caller
    figure = _figure_class()(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    names = list(dict.fromkeys(name for p in plan.phases for name in p.resident_gib))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    for at, phase in enumerate(plan.phases):
        _draw_phase(axes, at, phase, colours)
    _draw_peaks(axes, plan, measured)
    axes.set_xticks([at + 0.5 for at in range(len(plan.phases))], [p.name for p in plan.phases])
    axes.set_xlim(0, len(plan.phases))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GiB on the card")
    axes.set_title(_title(plan))
    _legend(axes)
    file = io.BytesIO()
    figure.savefig(file, format=suffix.lower().removeprefix("."))
    return file.getvalue()


def _figure_class() -> Any:
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise RefusedError(
            'a plan is drawn by matplotlib, which is not installed: pip install "sdx-accel[plot]"'
        ) from error


def _title(plan: Plan) -> str:
    job = plan.job
    title = f"{plan.model}, {job.get('width')} × {job.get('height')} px, plan {plan.digest}"
    return title if plan.feasible else f"{title}: DOES NOT FIT"


def _draw_phase(axes: Any, at: int, phase: Phase, colours: dict[str, str]) -> None:
    weights = sum(phase.resident_gib.values())
    level = phase.predicted_peak_gib - weights - phase.activations_gib
    axes.fill_between(
        [at, at + 1], 0, level, color=_BASE_COLOUR, linewidth=0, label="context and libraries"
    )
    for name, size in phase.resident_gib.items():
        axes.fill_between(
            [at, at + 1], level, level + size, color=colours[name], linewidth=0, label=name
        )
        level += size
    # a phase of one sample is drawn as wide as the others
    curve = [mib / 1024 for mib in phase.curve_mib or (0.0,)]
    curve = curve if len(curve) > 1 else curve * 2
    axes.fill_between(
        [at + i / (len(curve) - 1) for i in range(len(curve))],
        level,
        [level + live for live in curve],
        color=_ACTIVATION_COLOUR,
        linewidth=0,
        label="live activations",
    )


def _draw_peaks(axes: Any, plan: Plan, measured: Sequence["PhaseRecord"]) -> None:
    ends = list(range(len(plan.phases) + 1))
    peaks = [phase.predicted_peak_gib for phase in plan.phases]
    axes.stairs(peaks, ends, color="black", linewidth=1.5, label="predicted peak")
    seen = {r.name: r.measured_peak_gib for r in measured if r.measured_peak_gib is not None}
    found = [(at + 0.5, seen[p.name]) for at, p in enumerate(plan.phases) if p.name in seen]
    if found:
        places, values = zip(*found, strict=True)
        axes.plot(
            places, values, "D", color="white", markeredgecolor="black", label="measured peak"
        )
    budget = f"budget {plan.budget_gib:.2f} GiB"
    axes.axhline(plan.budget_gib, color="#b2182b", linestyle="--", linewidth=1.5, label=budget)


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    # from above as in the picture: what lies lowest was drawn first
    names = list(reversed(once))
    axes.legend(
        [once[name] for name in names],
        names,
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
    )
