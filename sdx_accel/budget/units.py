"""Byte units and the meaning of `--vram`; pure arithmetic."""

import math
import re
from dataclasses import dataclass

from sdx_accel.errors import RefusedError

__all__ = [
    "GIB",
    "MIB",
    "VramRequest",
    "about",
    "ceil_gib",
    "parse_vram",
    "say_seconds",
    "say_size",
    "to_gib",
]

MIB = 1 << 20
GIB = 1 << 30

# what `auto` leaves to the rest of the machine: a browser or a compositor redraw takes 100-300 MiB
AUTO_MARGIN_BYTES = 512 * MIB
# readings of free memory jitter by a few MiB between calls; plans must not
FREE_STEP_BYTES = 64 * MIB

_FORMS = 'use a number of GiB (8), "auto", a share of the card ("80%") or what to leave free ("-1")'


def to_gib(n_bytes: float) -> float:
    """Bytes as GiB, rounded to four decimals (0.1 MiB) so that JSON stays readable."""
    return round(n_bytes / GIB, 4)


def ceil_gib(n_bytes: float, step: float = 0.05) -> float:
    """Smallest multiple of `step` GiB that holds `n_bytes`."""
    return round(math.ceil(n_bytes / GIB / step - 1e-9) * step, 4)


def say_seconds(seconds: float) -> str:
    """A time for people: three digits, in ms where it is short."""
    if seconds < 1e-3:
        return "below 1 ms"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds:.3g} s"


def about(seconds: float) -> str:
    """A predicted time for people, with the word that says so."""
    return say_seconds(seconds) if seconds < 1e-3 else f"about {say_seconds(seconds)}"


def say_size(gib: float) -> str:
    """A size in GiB for people; in MiB where it is small."""
    if gib < 0.01:
        return f"{gib * 1024:.0f} MiB"
    return f"{gib:.2f} GiB"


@dataclass(frozen=True)
class VramRequest:
    """What the user asked for.

    Args:
        kind: "absolute" (`value` GiB), "auto", "share" (`value` in 0…1 of the total) or
            "leave" (`value` GiB stay free).
        value: see `kind`; 0 for "auto".
    """

    kind: str
    value: float = 0.0

    def resolve(self, total_bytes: int | None, free_bytes: int | None) -> tuple[int, str | None]:
        """Budget in bytes on a card, and a note when it is not what the number says.

        Args:
            total_bytes: size of the card, or None when there is none.
            free_bytes: what this process could use at most (free plus already ours), or None.

        Raises:
            RefusedError: the request needs a card and there is none, or leaves nothing.
        """
        if self.kind == "absolute":
            budget, note = round(self.value * GIB), None
        elif total_bytes is None or free_bytes is None:
            raise RefusedError(
                f"a budget of {self} is relative to a GPU and none was found: give a number of GiB"
            )
        elif self.kind == "share":
            budget, note = round(total_bytes * self.value), None
        elif self.kind == "leave":
            budget, note = free_bytes - round(self.value * GIB), None
        else:
            budget, note = free_bytes - AUTO_MARGIN_BYTES, None
        if free_bytes is not None:
            free = free_bytes // FREE_STEP_BYTES * FREE_STEP_BYTES
            if budget > free:
                note = f"{budget / GIB:.2f} GiB asked, {free / GIB:.2f} GiB free: planned for that"
                budget = free
        if budget <= 0:
            raise RefusedError(f"a budget of {self} leaves nothing: {_FORMS}")
        return budget, note

    def __str__(self) -> str:
        if self.kind == "absolute":
            return f"{self.value:g} GiB"
        if self.kind == "share":
            return f"{self.value:.0%}"
        return f"-{self.value:g} GiB" if self.kind == "leave" else "auto"


def parse_vram(value: float | str) -> VramRequest:
    """Read a `--vram` value.

    Args:
        value: GiB as a number or text ("8", "6.8", "8GiB", "8 GB"), "auto", "80%", or a negative
            number for what to leave free. GB is read as GiB, as card makers print it.

    Raises:
        RefusedError: anything else, zero and not-a-number included.
    """
    text = str(value).strip().lower()
    if text == "auto":
        return VramRequest("auto")
    match = re.fullmatch(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*(%|g|gb|gib)?", text)
    if not match:
        raise RefusedError(f"--vram {value!r} is not a budget: {_FORMS}")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        if not 0 < number <= 100:
            raise RefusedError(f"--vram {value!r}: a share lies above 0% and up to 100%; {_FORMS}")
        return VramRequest("share", number / 100)
    if number == 0 or not math.isfinite(number):
        raise RefusedError(f"--vram {value!r} is no budget: {_FORMS}")
    return VramRequest("absolute", number) if number > 0 else VramRequest("leave", -number)
