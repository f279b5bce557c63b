"""The file that `sdx-accel bench --tune` leaves: its name, its format, and what makes it valid.

It is data: an entry can only name one of `NAMES` and bound the shapes where that one comes first.
Nothing of a file that breaks a rule is used.
"""

import hashlib
import importlib.metadata
import json
import math
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sdx_kernels.tuning.attention_order import Preference
from sdx_kernels.tuning.shipped_digest import shipped_digest

__all__ = [
    "DTYPES",
    "MOST_BYTES",
    "MOST_ENTRIES",
    "MOST_LENGTH",
    "NAMES",
    "Entry",
    "digest_of",
    "document",
    "file_name",
    "identity",
    "pattern",
    "preferences",
    "read",
]

#: rises when a field changes its meaning: older files are ignored
FORMAT = 1
#: what may come first: torch's choice, and our kernels
NAMES = ("sdpa", "triton", "triton-short", "triton-tma", "triton-wide")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: a tuning of all shapes has some 50 entries of 300 bytes
MOST_BYTES = 1 << 16
MOST_ENTRIES = 256
#: no sequence or head dim is as long
MOST_LENGTH = 1 << 31


@dataclass(frozen=True)
class Entry:
    """Where one implementation was the faster one; bounds are inclusive.

    Attributes:
        shape: what was timed, for people. dtype: of the inputs, one of `DTYPES`.
        head_dims, queries, keys: lengths for which it comes first.
        name: the implementation. ms: its time.
        instead: the one that the shipped order prefers. instead_ms: its time.
    """

    shape: str
    dtype: str
    head_dims: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]
    name: str
    ms: float
    instead: str
    instead_ms: float

    def preference(self) -> Preference:
        """The entry as selection reads it; gradients were not timed."""
        return Preference(
            self.name,
            f"timed on this card by bench --tune: {self.shape}, {self.dtype}, {self.name} "
            f"{self.ms:.4g} ms against {self.instead}'s {self.instead_ms:.4g}",
            head_dims=self.head_dims,
            queries=self.queries,
            keys=self.keys,
            dtypes=(DTYPES[self.dtype],),
            grad=False,
        )


def identity(card: str, capability: tuple[int, int]) -> dict[str, Any]:
    """What a measurement holds for: another one of any of these may be faster elsewhere."""
    return {
        "card": card,
        "capability": list(capability),
        "torch": str(torch.__version__),
        "triton": _triton_version(),
        "tables": shipped_digest(),
    }


def _triton_version() -> str:
    # asked without importing it; its build for Windows has another name
    for name in ("triton", "triton-windows"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _stem(whose: Mapping[str, Any]) -> str:
    slug = re.sub("[^a-z0-9]+", "-", whose["card"].lower()).strip("-")[:40]
    return "attention-{}-sm{}{}".format(slug, *whose["capability"])


def file_name(whose: Mapping[str, Any]) -> str:
    """The file's name: the card for people, a digest of everything in `identity` behind it."""
    key = hashlib.sha256(json.dumps(whose, sort_keys=True).encode()).hexdigest()[:12]
    return f"{_stem(whose)}-{key}.json"


def pattern(whose: Mapping[str, Any] | None = None) -> str:
    """What matches the files of a card by whatever version, or all files of this kind."""
    return f"{'attention-*-sm*' if whose is None else _stem(whose)}-*.json"


def digest_of(data: bytes) -> str:
    """Twelve hex digits that name a file's content."""
    return hashlib.sha256(data).hexdigest()[:12]


def document(whose: Mapping[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    """The file's content as JSON-ready values."""
    return {"format": FORMAT, **whose, "entries": [asdict(entry) for entry in entries]}


def read(path: Path) -> bytes:
    """A file's bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no file (a pipe would be waited for without end), or too large a one.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 10} KiB")
    return data


def preferences(data: bytes, whose: Mapping[str, Any]) -> tuple[Preference, ...]:
    """A file's entries, first match first.

    Args:
        data: the file's bytes.
        whose: from `identity`, of the card that is there.

    Raises:
        ValueError: it breaks a rule; the message says which and repeats nothing of the file.
    """
    try:
        values = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not isinstance(values, dict) or set(values) != {"format", "entries", *whose}:
        raise ValueError("it is no measured order")
    if values["format"] != FORMAT:
        raise ValueError("it is of another format")
    if any(values[name] != value for name, value in whose.items()):
        raise ValueError("it was measured on another card or with other versions")
    entries = values["entries"]
    if not isinstance(entries, list) or len(entries) > MOST_ENTRIES:
        raise ValueError(f"its entries are no list of at most {MOST_ENTRIES}")
    return tuple(_entry(n, values).preference() for n, values in enumerate(entries))


def _entry(number: int, values: object) -> Entry:
    where = f"its entry {number}"
    if not isinstance(values, dict) or set(values) != {field.name for field in fields(Entry)}:
        raise ValueError(f"{where} has other fields")
    for name in ("head_dims", "queries", "keys"):
        values[name] = _bounds(values[name], f"{where}: {name}")
    for name in ("name", "instead"):
        if values[name] not in NAMES:
            raise ValueError(f"{where}: {name} is no implementation")
    for name in ("ms", "instead_ms"):
        if type(values[name]) is not float or not 0.0 < values[name] < math.inf:
            raise ValueError(f"{where}: {name} is no time")
    if not isinstance(values["dtype"], str) or values["dtype"] not in DTYPES:
        raise ValueError(f"{where}: dtype is not timed")
    # printed in reports and logs
    if not isinstance(values["shape"], str) or not re.fullmatch("[a-z0-9-]{1,40}", values["shape"]):
        raise ValueError(f"{where}: shape is no name")
    return Entry(**values)


def _bounds(value: object, what: str) -> tuple[int, int]:
    # bool is an int, and 1.0 equals 1
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value):
        low, high = value
        if 1 <= low <= high <= MOST_LENGTH:
            return low, high
    raise ValueError(f"{what} are no bounds")
