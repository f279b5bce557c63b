"""The order of implementations measured on this very card, before the one that is shipped.

Read once a process from the user's cache and timed never: what `sdx-accel bench --tune` writes
counts from the next process on. Selection stays a pure function of that file and the signature.
"""

import logging
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sdx_kernels import target
from sdx_kernels.checks import Signature
from sdx_kernels.tuning.attention_order import Preference, preference
from sdx_kernels.tuning.cache_folder import cache_folder
from sdx_kernels.tuning.measured_file import (
    digest_of,
    file_name,
    identity,
    pattern,
    preferences,
    read,
)

__all__ = ["Measured", "in_use", "measured", "order", "switched_off"]

_log = logging.getLogger("sdx_kernels")


@dataclass(frozen=True)
class Measured:
    """What was found for one card.

    Attributes:
        path: the file that was read, or that is ignored; None without one.
        digest: of its content, "" where it is not used.
        entries: first match first.
        ignored: why a file that is there is not used, "" otherwise.
    """

    path: Path | None = None
    digest: str = ""
    entries: tuple[Preference, ...] = ()
    ignored: str = ""


#: by name and capability of a card; a card's answer does not change while a process lives
_found: dict[tuple[str, int, int], Measured] = {}


def switched_off() -> bool:
    """Whether SDX_TUNING=off keeps the shipped order."""
    return os.environ.get("SDX_TUNING", "").strip().lower() in ("off", "0")


def measured(card: str, major: int, minor: int) -> Measured:
    """What was measured on a card: read at the first call, the same answer ever after."""
    key = (card, major, minor)
    if key not in _found:
        answer = _look(card, (major, minor))
        if _found.setdefault(key, answer) is answer:
            _say(answer)
    return _found[key]


def _look(card: str, capability: tuple[int, int]) -> Measured:
    folder = cache_folder()
    if folder is None:
        return Measured()
    whose = identity(card, capability)
    path = folder / file_name(whose)
    try:
        if not path.exists():
            others = sorted(folder.glob(pattern(whose)))
            return Measured(others[0] if others else None, ignored=_OLD if others else "")
        if switched_off():
            return Measured(path, ignored="SDX_TUNING=off")
        data = read(path)
        return Measured(path, digest_of(data), preferences(data, whose))
    except OSError as error:
        return Measured(path, ignored=f"it cannot be read ({error.strerror or error})")
    except ValueError as error:
        return Measured(path, ignored=str(error))


_OLD = "it was measured with another torch, triton or sdx_accel"


def _say(found: Measured) -> None:
    if found.entries:
        _log.info("attention is chosen as %s says (%s)", found.path, found.digest)
    elif found.ignored:
        broken = found.ignored != _OLD and not switched_off()
        level = logging.WARNING if broken else logging.INFO
        _log.log(level, "%s is ignored: %s", found.path, found.ignored)


#: the fields of a `Preference`
_Fields = tuple[Any, ...]


def _entries(card: str, major: int, minor: int) -> tuple[_Fields, ...]:
    """The entries' fields: Dynamo takes plain constants from a call, and no objects of ours."""
    return tuple(
        tuple(getattr(entry, field.name) for field in fields(Preference))
        for entry in measured(card, major, minor).entries
    )


# the mark of `torch.compiler.assume_constant_result`, whose own call would import all of Dynamo:
# without it a compiled first attention would have the reading of a file in its graph
_entries._dynamo_marked_constant = True  # type: ignore[attr-defined]


def order(signature: Signature) -> tuple[tuple[str, ...], str]:
    """Names to try first for unmasked attention, and why the first one is; ((), "") = by priority.

    What was measured here comes before what is shipped, where it was measured: without masks,
    dropout and gradients. The shipped order follows, for signatures that the first one refuses.
    """
    s = signature
    shipped, why = preference(s)
    facts = s.target
    if facts.kind != "cuda" or facts.capability is None:
        return shipped, why
    if s.bias != "none" or s.structure or s.dropout > 0.0:
        return shipped, why
    for values in _entries(facts.name, *facts.capability):
        entry = Preference(*values)
        if entry.holds(s):
            return (entry.name, *(name for name in shipped if name != entry.name)), entry.source
    return shipped, why


def _any_file() -> bool:
    folder = cache_folder()
    try:
        return folder is not None and any(folder.glob(pattern()))
    except OSError:
        return False


def in_use() -> tuple[tuple[str, str], ...]:
    """(card, digest) of each card of this machine whose measured order changes what runs there."""
    # without a file there is no reason to start CUDA
    if not (_found or _any_file()) or not torch.cuda.is_available():
        return ()
    try:
        cards = {target.of(torch.device("cuda", n)) for n in range(torch.cuda.device_count())}
    except RuntimeError:  # in a forked process, where CUDA cannot be started
        return ()
    found = [
        (facts.name, measured(facts.name, *facts.capability))
        for facts in cards
        if facts.kind == "cuda" and facts.capability is not None
    ]
    return tuple(sorted((name, one.digest) for name, one in found if one.entries))
