"""How much of the machine's memory weights may take, and how much of it the driver may pin."""

import platform
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sdx_accel.budget.units import GIB, MIB, VramRequest, parse_vram
from sdx_accel.errors import RefusedError
from sdx_accel.runtime.facts import known_bytes
from sdx_accel.runtime.gathering import attempt, cgroup_limit

__all__ = ["HostLimits", "limits", "parse_ram", "pinnable_bytes", "resolve_ram"]

# what WSL 2 lets all processes pin together: 0.75 to 2 GB have been reported
WSL_PINNED_BYTES = round(0.75 * GIB)
# Windows pins up to half of the memory; the rest of the machine needs some of that
WINDOWS_PINNED_SHARE = 0.4
LINUX_PINNED_SHARE = 0.8
# free memory changes from second to second; plans must not
PINNED_STEP_BYTES = GIB
_FORMS = 'use a number of GiB (16), "auto", a share of the memory ("80%") or what to leave ("-2")'


@dataclass(frozen=True)
class HostLimits:
    """The machine's memory; None where it cannot be read.

    Args:
        total: bytes of memory.
        available: bytes that a program could take now without swapping.
        cgroup: the tightest limit of the control groups of this process.
        used: what this process takes itself.
        wsl: Linux inside Windows.
        windows: Windows itself.
    """

    total: int | None
    available: int | None
    cgroup: int | None = None
    used: int = 0
    wsl: bool = False
    windows: bool = False

    @property
    def size(self) -> int | None:
        """What this process could have if it were alone."""
        return min((n for n in (self.total, self.cgroup) if n is not None), default=None)

    @property
    def usable(self) -> int | None:
        """What this process has and could still take: its weights may be in memory already."""
        room = None if self.available is None else self.available + self.used
        return min((n for n in (room, self.cgroup) if n is not None), default=None)


def limits(facts_root: Path = Path("/")) -> HostLimits:
    """Read the machine's limits; never raises.

    Args:
        facts_root: where Linux's `proc` and `sys` are found.
    """
    windows = platform.system() == "Windows"
    if not (facts_root / "proc/meminfo").is_file():
        total, available, used = attempt(_portable)[0] or (None, None, 0)
        return HostLimits(known_bytes(total), known_bytes(available), used=used, windows=windows)
    table = attempt(_table, facts_root / "proc/meminfo")[0] or {}
    own = attempt(_table, facts_root / "proc/self/status")[0] or {}
    release = attempt((facts_root / "proc/sys/kernel/osrelease").read_text)[0] or ""
    membership = attempt((facts_root / "proc/self/cgroup").read_text)[0] or ""
    return HostLimits(
        total=known_bytes(table.get("MemTotal")),
        available=known_bytes(table.get("MemAvailable")),
        cgroup=attempt(cgroup_limit, facts_root, membership)[0],
        used=known_bytes(own.get("VmRSS")) or 0,
        wsl="microsoft" in release.lower(),
    )


def _table(file: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file, in bytes."""
    found = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) << 10
    return found


def _portable() -> tuple[int, int, int]:
    psutil: Any = import_module("psutil")  # accelerate depends on it
    memory = psutil.virtual_memory()
    return memory.total, memory.available, psutil.Process().memory_info().rss


def pinnable_bytes(host: HostLimits) -> int | None:
    """How much memory may be pinned for copies to the card; None when nothing is known.

    RLIMIT_MEMLOCK is no limit here: the driver pins in the kernel, and does not ask it.
    """
    if host.wsl:
        return WSL_PINNED_BYTES
    if host.windows:
        return None if host.total is None else round(host.total * WINDOWS_PINNED_SHARE)
    if host.usable is None:
        return None
    allowed = round(host.usable * LINUX_PINNED_SHARE)
    return allowed // PINNED_STEP_BYTES * PINNED_STEP_BYTES or allowed // MIB * MIB


def parse_ram(value: float | str) -> VramRequest:
    """Read a `--ram` value: the forms of `--vram`, of the machine's memory.

    Raises:
        RefusedError: anything else.
    """
    try:
        return parse_vram(value)
    except RefusedError:
        raise RefusedError(f"--ram {value!r} is not an amount of memory: {_FORMS}") from None


def resolve_ram(request: VramRequest, host: HostLimits) -> tuple[int, str | None]:
    """Bytes that weights may take in host memory, and a note when the number says more.

    Raises:
        RefusedError: a relative request where the memory cannot be read, or nothing is left.
    """
    relative = request.kind != "absolute"
    if relative and (host.size is None or host.usable is None):
        raise RefusedError(
            f"--ram {request}: this machine does not tell how much memory it has; give a number "
            "of GiB"
        )
    try:
        allowed, note = request.resolve(host.size, host.usable)
    except RefusedError:
        raise RefusedError(f"--ram {request} leaves nothing: {_FORMS}") from None
    return allowed, None if note is None else f"host memory: {note}"
