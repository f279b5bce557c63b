"""What phases took beyond their prediction, kept so that the next plan leaves room for it."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sdx_accel.budget.machine import Machine
from sdx_accel.budget.plan import Plan
from sdx_accel.budget.units import MIB
from sdx_accel.runtime.descriptions import ModelDescription, jsonable
from sdx_accel.runtime.user_cache import cache_folder, read_values, write_values

__all__ = ["History", "cell_of", "digest_of", "plan_with_peaks"]

_FILE = "peaks.json"
# a cell is one model at one size: more than anybody works with, 100 bytes each
MOST_CELLS = 500
# readings differ by a few KiB from run to run; figures are kept in whole steps
STEP_BYTES = 2 * MIB


def cell_of(
    key: str, description: ModelDescription, job: Any, dtypes: Mapping[str, str], quality: str
) -> str:
    """Twelve hex digits for all that the activations of a job depend on; not its budget.

    Args:
        key: the card's, see `calibration.key_of`.
        description: the model's configurations.
        job: sizes and settings, a dataclass.
        dtypes: dtype names of the components' weights.
        quality: "exact" or "near".
    """
    parts = {name: asdict(part) for name, part in description.components.items()}
    values = jsonable([key, parts, asdict(job), dict(dtypes), quality])
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def digest_of(peaks: Mapping[str, int]) -> str:
    """Names learned figures in a plan; empty when there are none."""
    if not peaks:
        return ""
    return hashlib.sha256(json.dumps(peaks, sort_keys=True).encode()).hexdigest()[:12]


def plan_with_peaks(
    make: Callable[[Machine, Mapping[str, int]], Plan], machine: Machine, peaks: Mapping[str, int]
) -> Plan:
    """A plan that leaves room for learned peaks, unless nothing fits only because of them.

    What ran under a budget must not be refused the next time because it came close to it.

    Args:
        make: plans for a machine and bytes to add to each phase.
        machine: the card.
        peaks: from `History.peaks`.
    """
    if peaks:
        plan = make(replace(machine, history=digest_of(peaks)), peaks)
        if plan.feasible:
            return plan
    return make(machine, {})


@dataclass
class History:
    """Learned figures of this user's runs.

    Args:
        folder: where they are kept; `cache_folder()` by default.
    """

    folder: Path | None = field(default_factory=cache_folder)

    def peaks(self, cell: str) -> dict[str, int]:
        """Bytes by which each phase was predicted too low, phases without such left out."""
        return self._read().get(cell, {})

    def learn(self, cell: str, phase: str, predicted_bytes: int, measured_bytes: int) -> bool:
        """Remember that a phase took more than was planned for it, learned figures included.

        Figures only grow: a run that took less may have been a smaller one.

        Returns:
            Whether the next plan will differ.
        """
        missing = -(-(measured_bytes - predicted_bytes) // STEP_BYTES) * STEP_BYTES
        if missing <= 0:
            return False
        cells = self._read()
        # the newest cells are the last ones
        peaks = cells.pop(cell, {})
        cells[cell] = {**peaks, phase: peaks.get(phase, 0) + missing}
        kept = dict(list(cells.items())[-MOST_CELLS:])
        return write_values(self.folder, _FILE, {"cells": list(kept.items())})

    def _read(self) -> dict[str, dict[str, int]]:
        values = read_values(self.folder, _FILE) or {}
        cells = values.get("cells", [])
        try:
            read = {str(cell): dict(peaks) for cell, peaks in cells}
        except (TypeError, ValueError):
            return {}
        return {
            cell: peaks
            for cell, peaks in read.items()
            if all(isinstance(k, str) and type(n) is int and n > 0 for k, n in peaks.items())
        }
