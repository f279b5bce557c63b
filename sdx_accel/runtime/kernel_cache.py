"""Where Triton keeps compiled kernels, and a private place when that folder cannot be used.

Knows environment variables and folders; knows nothing of kernels, torch or pipelines.
"""

import functools
import logging
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KernelCache", "ensure_kernel_cache", "locate_kernel_cache"]

_log = logging.getLogger("sdx_accel")


@dataclass(frozen=True)
class KernelCache:
    """The folder that compiled kernels go to.

    Attributes:
        path: the folder, which need not exist yet; None if no folder at all can be written.
        source: what names it: an environment variable, "home folder" or "private temporary folder".
        problems: one line for every folder that came first and cannot be used.
        redirect: True if Triton would choose another folder by itself, so that TRITON_CACHE_DIR
            has to be set.
    """

    path: Path | None
    source: str
    problems: tuple[str, ...] = ()
    redirect: bool = False

    def __str__(self) -> str:
        if self.path is None:
            return "nowhere: " + "; ".join(self.problems)
        used = f"{self.path} ({self.source})"
        return f"{used}, because {'; '.join(self.problems)}" if self.problems else used


def _candidates() -> list[tuple[str, Path | None]]:
    """Triton's own order of preference (`triton.knobs`), each with what names it."""
    found: list[tuple[str, Path | None]] = []
    if named := os.environ.get("TRITON_CACHE_DIR"):
        found.append(("TRITON_CACHE_DIR", Path(named)))
    if triton_home := os.environ.get("TRITON_HOME"):
        found.append(("TRITON_HOME", Path(triton_home) / ".triton" / "cache"))
    # without a home folder expanduser returns "~" as it came, and Triton would create a folder
    # of that name in the working directory
    home = os.path.expanduser("~")
    found.append(("home folder", Path(home) / ".triton" / "cache" if os.path.isabs(home) else None))
    return found


def _problem(folder: Path) -> str | None:
    """Why kernels cannot be kept in `folder`, or None. Leaves nothing behind, creates nothing."""
    place = folder.absolute()
    # lexists: a dangling link is found here and fails below, as it would for Triton
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return f"{folder} is not writable ({error.strerror or error})"
    # the launcher that Triton builds is a shared library and has to be mapped executable
    noexec = getattr(os, "ST_NOEXEC", None)
    if noexec is not None and os.statvfs(place).f_flag & noexec:
        return f"{folder} is on a file system mounted noexec"
    return None


def _private_folder(problems: list[str], *, create: bool) -> Path | None:
    """A folder in the temporary folder that only this user can read and write (mode 0700)."""
    try:
        root = Path(tempfile.gettempdir())
        if (problem := _problem(root)) is not None:
            problems.append(problem)
            return None
        user = str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
        folder = root / f"sdx-accel-kernels-{user}"
        if not create:
            return folder
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            if not _is_private(folder):
                return Path(tempfile.mkdtemp(prefix="sdx-accel-kernels-"))
        return folder
    except OSError as error:
        problems.append(f"no temporary folder ({error.strerror or error})")
        return None


def _is_private(folder: Path) -> bool:
    """Whether nobody else can have put compiled code into `folder`: ours, mode 0700, no link."""
    found = folder.lstat()
    if not hasattr(os, "getuid"):
        return stat.S_ISDIR(found.st_mode)  # on Windows the temporary folder is the user's own
    open_to_others = stat.S_IMODE(found.st_mode) & 0o077
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not open_to_others


def locate_kernel_cache() -> KernelCache:
    """Find the folder that kernels would be compiled into; changes nothing."""
    return _choose(create=False)


def ensure_kernel_cache() -> KernelCache:
    """Make sure that kernels can be compiled, setting TRITON_CACHE_DIR where that is needed.

    Says once per process when another folder than Triton's own choice is used. Never raises:
    without any folder torch's kernels run.
    """
    cache = _choose(create=True)
    if cache.path is not None and cache.redirect:
        os.environ["TRITON_CACHE_DIR"] = str(cache.path)
    if cache.problems:
        _announce(str(cache))
    return cache


def _choose(*, create: bool) -> KernelCache:
    problems: list[str] = []
    for source, folder in _candidates():
        if folder is None:
            problems.append("this user has no home folder")
            continue
        problem = _problem(folder)
        if problem is None:
            return KernelCache(folder, source, tuple(problems), redirect=bool(problems))
        problems.append(problem)
    private = _private_folder(problems, create=create)
    source = "none" if private is None else "private temporary folder"
    return KernelCache(private, source, tuple(problems), redirect=private is not None)


@functools.cache
def _announce(text: str) -> None:
    _log.warning("Compiled kernels go to %s. TRITON_CACHE_DIR chooses another folder.", text)
