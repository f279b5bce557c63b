"""`--plot`: where the drawing of a plan goes, found writable before any work, and saved whole."""

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sdx_accel.budget.plan import Plan
from sdx_accel.cli.pictures_out import LONGEST_NAME, Destination, check_writable, save_bytes
from sdx_accel.errors import PictureError
from sdx_accel.runtime.plot import check_drawable, draw_plan

if TYPE_CHECKING:
    from sdx_accel.runtime.enforce import PhaseRecord

__all__ = ["open_plot", "save_plot"]

# a drawing of five phases takes 30 KiB as .png and 60 KiB as .svg
_NEEDED_BYTES = 1 << 20


def open_plot(plot: str, overwrite: bool) -> Destination:
    """Decide and prove, before any work, where the drawing will go.

    Args:
        plot: a file name that ends in .png, .svg or .pdf.
        overwrite: whether an existing file may be replaced; else a counter is added.

    Raises:
        RefusedError: it could not be drawn.
        PictureError: the place cannot be written.
    """
    path = Path(os.path.expanduser(plot))
    check_drawable(path)
    if os.path.isdir(path):
        raise PictureError(f"--plot {plot} is a folder; name a file")
    if not os.path.isdir(path.parent):
        raise PictureError(
            f"--plot {plot}: the folder {path.parent} does not exist or may not be entered; "
            "create it or choose another"
        )
    if len(os.fsencode(path.name)) > LONGEST_NAME:
        raise PictureError(f"--plot: the file name is longer than {LONGEST_NAME} bytes")
    check_writable(path.parent, _NEEDED_BYTES, "--plot")
    suffix = path.suffix
    return Destination(path.parent, path.stem, suffix.lower()[1:], overwrite, suffix)


def save_plot(
    plan: Plan,
    destination: Destination,
    measured: Sequence["PhaseRecord"] = (),
    keep: Collection[Path] = (),
) -> Path:
    """Draw a plan, with what its phases took if there was a run.

    Args:
        plan: feasible or not.
        destination: from `open_plot`.
        measured: the records of a run.
        keep: files that are never replaced, because the same run has made them.

    Returns:
        The path written; with a counter where the name was taken and may not be replaced.

    Raises:
        WorkError: the disk filled up or went away; the message says where the drawing is instead.
    """
    data = draw_plan(plan, destination.suffix, measured)
    name = f"{destination.stem}{destination.suffix}"
    own = os.path.realpath(destination.folder / name) in map(os.path.realpath, keep)
    return save_bytes(data, replace(destination, overwrite=destination.overwrite and not own), name)
