"""What a card does in a second, measured once for a driver and a torch, then read from a file.

Knows what to measure and how often; `card_speed` knows how. Free memory and the context are not
here: they are read whenever a plan is made.
"""

import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sdx_accel.budget.units import MIB
from sdx_accel.runtime.user_cache import cache_folder, read_values, write_values

if TYPE_CHECKING:
    from sdx_accel.runtime.probe import Card

__all__ = [
    "COPIES",
    "COPY_BYTES",
    "SHARES",
    "Measure",
    "Record",
    "calibrate",
    "key_of",
    "known_record",
    "load",
    "record_for",
    "steady_seconds",
]

_log = logging.getLogger("sdx_accel")
# rises when a field changes its meaning: older files are measured again. 2: the best of many
# windows, where one window gave 71 and 113 ms a step in two processes on one card
VERSION = 2
COPY_BYTES = 32 * MIB
# (pinned, beside a running matrix product): how many copies; the best counts. 416 MiB in all, of
# which 96 MiB pageable: 0.1 s on a PCIe 3.0 ×8 link
COPIES = {(True, False): 5, (True, True): 5, (False, False): 3}
# of the 13.52 TFLOP of an SDXL step at 1024² with guidance, counted on the meta device
SHARES = {"matmul": 0.644, "convolution": 0.240, "attention": 0.116}
# a transformer block of SDXL launched op by op: on fast cards the host is what it waits for
BLOCK = "block"
# a window is long against the clock's grain and short against what else a shared host does: of the
# many in a span some are left alone. Four kinds of work take 1.3 s
WINDOW_SECONDS, SPAN_SECONDS = 4e-3, 0.3
# a card that is so slow has run long enough to have risen to its clock rate
MOST_CALLS = 1024


class Measure(Protocol):
    """Where readings come from; tests script them."""

    def copy(self, n_bytes: int, *, pinned: bool, busy: bool) -> float:
        """Seconds that one copy to the card takes; `busy`: beside a running matrix product."""

    def work(self, kind: str) -> tuple[float, float]:
        """(operations, seconds) of one of `SHARES` or of `BLOCK`, in half precision."""


@dataclass(frozen=True)
class Record:
    """What was measured on one card; rates to two digits, so that equal cards give equal plans.

    Args:
        key: card, driver, torch and cuDNN, from `key_of`.
        context_bytes: driver-visible use outside torch, None where the driver does not tell.
        pinned_bytes_per_s: host to device, from pinned memory to an idle card.
        loaded_bytes_per_s: the same while the card computes: what streaming gets.
        pageable_bytes_per_s: host to device from memory that is not pinned.
        flops_per_s: of a UNet step launched op by op.
        version: of this format.
    """

    key: str
    context_bytes: int | None
    pinned_bytes_per_s: float
    loaded_bytes_per_s: float
    pageable_bytes_per_s: float
    flops_per_s: float
    version: int = VERSION

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Record | None":
        """A record from a file's values, or None if they are not a whole one of this version."""
        names = {field.name for field in fields(cls)}
        if set(values) != names or values["version"] != VERSION:
            return None
        context = values["context_bytes"]
        rates = [values[name] for name in names if name.endswith("_per_s")]
        if not isinstance(values["key"], str) or not (context is None or type(context) is int):
            return None
        if not all(type(rate) is float and math.isfinite(rate) and rate > 0 for rate in rates):
            return None
        return cls(**values)


def key_of(uuid: str, driver: str, torch: str, cudnn: str) -> str:
    """Twelve hex digits; each of the four can change every figure."""
    text = "\n".join((uuid, driver, torch, cudnn))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _file(key: str) -> str:
    return f"card-{key}.json"


def load(key: str, folder: Path | None = None) -> Record | None:
    """The record of an earlier run, or None; never measures."""
    values = read_values(folder or cache_folder(), _file(key))
    record = None if values is None else Record.from_values(values)
    return record if record is not None and record.key == key else None


def calibrate(card: "Card", measure: Measure) -> Record:
    """Measure a card; starts CUDA, takes a second or two, frees what it used."""
    rates = {}
    for (pinned, busy), times in COPIES.items():
        seconds = min(measure.copy(COPY_BYTES, pinned=pinned, busy=busy) for _ in range(times))
        rates[pinned, busy] = COPY_BYTES / seconds
    # seconds for one operation of a step: every kind at its own rate
    seconds = 0.0
    for kind, share in SHARES.items():
        done, taken = measure.work(kind)
        seconds += share * taken / done
    done, taken = measure.work(BLOCK)
    return Record(
        key=card.key,
        context_bytes=card.non_torch_bytes(),
        pinned_bytes_per_s=_two_digits(rates[True, False]),
        # a copy beside work is not faster than one without, whatever the clock says
        loaded_bytes_per_s=_two_digits(min(rates[True, True], rates[True, False])),
        pageable_bytes_per_s=_two_digits(min(rates[False, False], rates[True, False])),
        flops_per_s=_two_digits(min(1 / seconds, done / taken)),
    )


def record_for(
    card: "Card", measure: Measure | None = None, folder: Path | None = None
) -> Record | None:
    """The card's record: read where there is one, else measured and kept.

    Args:
        card: an open card.
        measure: the real card by default.
        folder: `cache_folder()` by default.

    Returns:
        None where the card could not be measured; plans then use the generic figures.
    """
    folder = folder or cache_folder()
    if (known := load(card.key, folder)) is not None:
        return known
    if measure is None:
        from sdx_accel.runtime.card_speed import CudaMeasure

        measure = CudaMeasure(card.device)
    try:
        record = calibrate(card, measure)
    except RuntimeError as error:  # out of memory beside another program, or a library that fails
        _log.info("the card could not be measured (%s): plans use generic speeds", error)
        return None
    write_values(folder, _file(record.key), asdict(record))
    return record


def known_record(card: "Card") -> Record | None:
    """The record that `record_for` would read; for planning without starting any work."""
    return load(card.key)


def steady_seconds(window: Callable[[int], float]) -> float:
    """Seconds that one call takes when nothing else gets in its way.

    Windows are lengthened until they can be timed, which brings the card to its clock rate as well;
    then the fastest of all windows of a span counts. Something else can only make one slower.

    Args:
        window: seconds of so many calls in a row, the library they need being loaded.
    """
    calls, spent, best = 1, 0.0, math.inf
    while spent < SPAN_SECONDS:
        taken = window(calls)
        # a clock that stands still would measure for ever
        spent += max(taken, WINDOW_SECONDS / 10)
        best = min(best, taken / calls)
        if taken < WINDOW_SECONDS and calls < MOST_CALLS:
            calls *= 2
    return best


def _two_digits(rate: float) -> float:
    return float(f"{rate:.1e}")
