"""Where pictures are saved: names, checks before any work, and files that appear whole or not.

Knows folders and bytes; knows nothing of models or of what is in a picture's metadata.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import tempfile
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from sdx_accel.errors import PictureError, RefusedError, WorkError

__all__ = [
    "LONGEST_NAME",
    "Destination",
    "check_writable",
    "file_name",
    "open_destination",
    "save_bytes",
]

DEFAULT_FOLDER = "outputs"
FORMATS = {".png": "png", ".jpg": "jpg", ".jpeg": "jpg", ".webp": "webp"}
_FOREIGN = (".avif", ".bmp", ".gif", ".heic", ".jxl", ".ppm", ".tif", ".tiff")
# the limit of nearly every file system, in bytes of UTF-8, not in characters
LONGEST_NAME = 255
# a prompt is recognisable long before this; the rest of a longer one is in the metadata
LONGEST_SLUG = 120


@dataclass(frozen=True, slots=True)
class Destination:
    """A folder that was found writable, and how files in it are called.

    Args:
        folder: exists.
        stem: the user's file name without suffix; None = made from the prompt.
        format: png, jpg or webp.
        overwrite: whether an existing file may be replaced.
        suffix: as it is written, dot included.
    """

    folder: Path
    stem: str | None
    format: str
    overwrite: bool
    suffix: str


def open_destination(
    output: str | None, format: str | None, overwrite: bool, needed_bytes: int
) -> Destination:
    """Decide and prove, before any work, where the pictures will go.

    Args:
        output: a folder, or a file name ending in .png, .jpg, .jpeg or .webp; None = `outputs/`.
        format: png, jpg (or jpeg) or webp; None = the file name's, else png.
        overwrite: whether an existing file may be replaced.
        needed_bytes: what the pictures can take at most.

    Raises:
        PictureError: the folder is missing, not writable or full, or the format is unknown.
    """
    # a shell leaves the tilde alone inside quotation marks
    output = None if output is None else os.path.expanduser(output)
    format = "jpg" if format == "jpeg" else format
    path = Path(output or DEFAULT_FOLDER)
    suffix = path.suffix.lower()
    # os.path answers False where pathlib raises: names too long, folders that may not be entered
    is_folder = os.path.isdir(path) or (output or "").endswith(("/", os.sep))
    if suffix in _FOREIGN and not is_folder:
        raise PictureError(f"--output {output}: pictures are saved as .png, .jpg or .webp")
    if suffix in FORMATS and not is_folder:
        if format is not None and format != FORMATS[suffix]:
            raise RefusedError(f"--output {output} and --format {format} differ; leave one out")
        folder, stem, chosen, ending = path.parent, path.stem, FORMATS[suffix], path.suffix
        if not os.path.isdir(folder):
            raise PictureError(
                f"--output {output}: the folder {folder} does not exist or may not be entered; "
                "create it or choose another"
            )
        if len(os.fsencode(path.name)) > LONGEST_NAME:
            raise PictureError(f"--output: the file name is longer than {LONGEST_NAME} bytes")
    else:
        folder, stem, chosen = path, None, format or "png"
        ending = f".{chosen}"
        _create_folder(folder)
    check_writable(folder, needed_bytes, "--output")
    return Destination(folder, stem, chosen, overwrite, ending)


def file_name(destination: Destination, prompt: str, seed: int, index: int, total: int) -> str:
    """The name of picture `index` without a counter, at most 255 bytes of UTF-8.

    Args:
        destination: gives the user's own name, if any, and the suffix.
        prompt: any text.
        seed: of this picture.
        index: 0…total - 1.
        total: pictures of the whole job.
    """
    if destination.stem is not None:
        tail = f"-{index + 1}" if total > 1 else ""
        return _fit(destination.stem, f"{tail}{destination.suffix}", LONGEST_NAME)
    return _fit(_slug(prompt), f"_{seed}{destination.suffix}", LONGEST_NAME)


def save_bytes(data: bytes, destination: Destination, name: str) -> Path:
    """Write a whole file under a name that nobody else has, in one step.

    Args:
        data: the file's contents.
        destination: from `open_destination`.
        name: from `file_name`; a counter is added where it is taken.

    Returns:
        The path written.

    Raises:
        WorkError: the disk filled up or went away; the message says where the picture is instead.
    """
    try:
        return _save_whole(data, destination, name)
    except OSError as error:
        rescue = Destination(Path(tempfile.gettempdir()), None, destination.format, False, "")
        try:
            kept = f"it is kept as {_save_whole(data, rescue, name)}"
        except OSError:
            kept = "and the temporary folder cannot hold it either, so it is lost"
        raise WorkError(
            f"the picture could not be saved in {destination.folder} ({error.strerror}); {kept}"
        ) from error


def _save_whole(data: bytes, destination: Destination, name: str) -> Path:
    temporary = destination.folder / f".sdx-{secrets.token_hex(8)}.part"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if destination.overwrite:
            target = destination.folder / name
            os.replace(temporary, target)
            return target
        return _claim(temporary, destination.folder, name)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _claim(temporary: Path, folder: Path, name: str) -> Path:
    """Give a finished file the first free name; two processes never get the same one."""
    stem, suffix = os.path.splitext(name)
    count = 1
    while True:
        tail = suffix if count == 1 else f"-{count}{suffix}"
        target = folder / _fit(stem, tail, LONGEST_NAME)
        count += 1
        try:
            os.link(temporary, target)
            return target
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOENT):
                raise
        # FAT and some network drives have no hard links: hold the name with an empty file
        try:
            target.touch(exist_ok=False)
        except FileExistsError:
            continue
        os.replace(temporary, target)
        return target


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise PictureError(
            f"--output {folder}: the folder {folder.parent} does not exist; create it, or check "
            "that its drive is there"
        ) from error
    except OSError as error:
        raise PictureError(
            f"--output {folder} cannot be created: {error.strerror}; choose another folder"
        ) from error


def check_writable(folder: Path, needed_bytes: int, flag: str) -> None:
    """Refuse a folder that cannot take what will be saved in it.

    Args:
        folder: exists.
        needed_bytes: what will be saved at most.
        flag: what it was named with, for the message.

    Raises:
        PictureError: it is not writable or full.
    """
    probe = folder / f".sdx-{secrets.token_hex(8)}.part"
    try:
        with probe.open("xb") as file:
            file.write(bytes(4096))
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise PictureError(
            f"{flag} {folder} is not writable: {error.strerror}; choose another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    if free < needed_bytes:
        raise PictureError(
            f"{flag} {folder}: {free >> 20} MiB are free and the pictures can take "
            f"{-(-needed_bytes >> 20)} MiB; make room or choose another folder"
        )


def _slug(prompt: str) -> str:
    """Letters, digits and symbols of any script, the rest as single dashes.

    A shortened one ends in a digest of the whole prompt, so that prompts which begin alike get
    different names even with --overwrite.
    """
    kept = [
        char if _is_name_char(char) else "-"
        for char in unicodedata.normalize("NFC", prompt.strip())
    ]
    text = "-".join(part for part in "".join(kept).split("-") if part)
    if len(text.encode()) <= LONGEST_SLUG:
        return text or "picture"
    digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return _fit(text, f"~{digest}", LONGEST_SLUG)


def _is_name_char(char: str) -> bool:
    category = unicodedata.category(char)
    # symbols beyond ASCII are mostly emoji; zero-width joiners and variation selectors hold them
    # together. ASCII ones mean something to a shell.
    symbol = ord(char) > 127 and (category in ("Sk", "So") or char in "\u200d\ufe0f")
    return category[0] in "LMN" or symbol


def _fit(stem: str, tail: str, limit: int) -> str:
    """`stem` + `tail` in at most `limit` bytes, cut between characters as a reader sees them."""
    room = limit - len(tail.encode())
    end = len(stem)
    while end and len(os.fsencode(stem[:end])) > room:
        end -= 1
    while 0 < end < len(stem) and (_joins(stem[end]) or stem[end - 1] == "\u200d"):
        end -= 1
    return stem[:end] + tail


def _joins(char: str) -> bool:
    return unicodedata.category(char) in ("Mn", "Mc", "Me", "Sk") or char in "\u200d\ufe0f"
