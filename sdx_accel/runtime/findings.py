"""The shape of a diagnosis: rows of a level, a subject, a finding and what mends it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["FLOORS", "TESTED", "Diagnosis", "Level", "Row", "release"]

# the oldest release that works, as in pyproject.toml (a test compares them)
FLOORS: Mapping[str, str] = {
    "torch": "2.7",
    "triton": "3.3",
    "diffusers": "0.40",
    "transformers": "5.6",
    "accelerate": "1.10",
}
# the newest release tested, as in constraints.txt (a test compares them)
TESTED: Mapping[str, str] = {
    "torch": "2.13.0",
    "triton": "3.7.1",
    "diffusers": "0.42.1",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
}


class Level(StrEnum):
    """How bad a finding is; only FAIL makes `doctor` exit with 1."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Row:
    """One finding. `mend` is one command or instruction; None where nothing is wrong."""

    level: Level
    subject: str
    finding: str
    mend: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """All findings about one machine, in reading order."""

    rows: tuple[Row, ...]

    @property
    def blockers(self) -> tuple[Row, ...]:
        """The rows that have to be mended before anything can run as promised."""
        return tuple(row for row in self.rows if row.level is Level.FAIL)

    @property
    def exit_code(self) -> int:
        """1 if anything blocks, else 0."""
        return int(bool(self.blockers))

    def to_dict(self) -> dict[str, Any]:
        """The rows as JSON-able dictionaries, and the number of blockers."""
        return {"blockers": len(self.blockers), "rows": [asdict(row) for row in self.rows]}


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `release("2.13.0+cpu") == (2, 13, 0)`."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
