"""Names, checks before work and whole files (cases 134 and 138)."""

import errno
import os
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sdx_accel.cli import pictures_out
from sdx_accel.cli.pictures_out import Destination, file_name, open_destination, save_bytes
from sdx_accel.errors import PictureError, RefusedError, WorkError

FAMILY = "👩‍👩‍👧‍👦"


def folder_destination(folder: Path, overwrite: bool = False) -> Destination:
    return open_destination(str(folder), None, overwrite, 0)


@pytest.mark.parametrize(
    "prompt",
    ["a" * 300, "word " * 60, "漢" * 120, FAMILY * 20, "e\u0301" * 200, "x\ud800y", "🇩🇪" * 80],
)
def test_case_134_names_fit_into_255_bytes(tmp_path: Path, prompt: str) -> None:
    destination = folder_destination(tmp_path)
    name = file_name(destination, prompt, 2**63 - 1, 0, 1)
    path = save_bytes(b"x", destination, name)
    assert path.read_bytes() == b"x"
    assert len(path.name.encode()) <= 255
    assert name.endswith("_9223372036854775807.png")


def test_case_134_cuts_between_characters_as_a_reader_sees_them(tmp_path: Path) -> None:
    destination = folder_destination(tmp_path)
    name = file_name(destination, FAMILY * 20, 1, 0, 1)
    assert name.partition("~")[0] == FAMILY * (len(name.partition("~")[0]) // len(FAMILY))
    accents = file_name(destination, "q\u0301" * 200, 1, 0, 1).partition("~")[0]
    assert accents == "q\u0301" * (len(accents) // 2)


def test_case_134_same_first_200_bytes_give_different_names(tmp_path: Path) -> None:
    destination = folder_destination(tmp_path, overwrite=True)
    names = {file_name(destination, "a" * 200 + end, 1, 0, 1) for end in ("cat", "dog", "")}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("prompt", "stem"),
    [
        ("a red apple, on a table", "a-red-apple-on-a-table"),
        ("../../etc/passwd", "etc-passwd"),
        ('<a> "b" | c?*: \\d', "a-b-c-d"),
        ("", "picture"),
        ("...", "picture"),
        ("модель 日本 🙂", "модель-日本-🙂"),
        ("line\nbreak\0", "line-break"),
        ("-rf $(x) `y` ^z", "rf-x-y-z"),
    ],
)
def test_slugs_are_readable_and_harmless(tmp_path: Path, prompt: str, stem: str) -> None:
    assert file_name(folder_destination(tmp_path), prompt, 5, 0, 1) == f"{stem}_5.png"


def test_users_own_name(tmp_path: Path) -> None:
    destination = open_destination(str(tmp_path / "mine.JPG"), None, False, 0)
    assert destination.format == "jpg"
    assert file_name(destination, "p", 5, 0, 1) == "mine.JPG"
    assert [file_name(destination, "p", 5, i, 2) for i in (0, 1)] == ["mine-1.JPG", "mine-2.JPG"]


def test_case_138_never_overwrites_unless_asked(tmp_path: Path) -> None:
    keep, replace = folder_destination(tmp_path), folder_destination(tmp_path, overwrite=True)
    paths = [save_bytes(text, keep, "a_1.png") for text in (b"1", b"2", b"3")]
    assert [path.name for path in paths] == ["a_1.png", "a_1-2.png", "a_1-3.png"]
    assert [path.read_bytes() for path in paths] == [b"1", b"2", b"3"]
    assert save_bytes(b"4", replace, "a_1.png") == paths[0]
    assert paths[0].read_bytes() == b"4"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("hard_links", [True, False])
def test_case_138_many_writers_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard_links: bool
) -> None:
    if not hard_links:

        def no_link(*_: Any) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(pictures_out.os, "link", no_link)
    destination = folder_destination(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        paths = list(
            pool.map(lambda i: save_bytes(str(i).encode(), destination, "a.png"), range(40))
        )
    assert len(set(paths)) == 40
    assert {path.read_bytes() for path in paths} == {str(i).encode() for i in range(40)}
    assert len(list(tmp_path.iterdir())) == 40


def test_counter_keeps_the_longest_name_within_the_limit(tmp_path: Path) -> None:
    name = "a" * 251 + ".png"
    paths = [save_bytes(b"x", folder_destination(tmp_path), name) for _ in range(2)]
    assert [len(path.name) for path in paths] == [255, 255]


def test_case_138_absent_folder(tmp_path: Path) -> None:
    assert folder_destination(tmp_path / "new").folder.is_dir()
    for output in (tmp_path / "absent" / "new", tmp_path / "absent" / "new.png"):
        with pytest.raises(PictureError, match="absent does not exist"):
            open_destination(str(output), None, False, 0)


def test_case_138_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "new", tmp_path / "file" / "x.png"):
        with pytest.raises(PictureError, match="--output"):
            open_destination(str(output), None, False, 0)


def test_case_138_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a read-only folder does not stop the administrator, who may run these tests
    real = Path.open

    def refuse(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "x" in mode:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PictureError, match="not writable: Permission denied; choose another"):
        folder_destination(tmp_path)


def test_case_138_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(
        pictures_out.shutil, "disk_usage", lambda _: usage(9 << 20, 8 << 20, 1 << 20)
    )
    with pytest.raises(PictureError, match="1 MiB are free and the pictures can take 3 MiB"):
        open_destination(str(tmp_path), None, False, 3 << 20)
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_during_the_run_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rescue = tmp_path / "full", tmp_path / "temp"
    destination = folder_destination(folder)
    rescue.mkdir()
    monkeypatch.setattr(pictures_out.tempfile, "gettempdir", lambda: str(rescue))
    real = os.fsync
    calls: list[int] = []

    def full_once(number: int) -> None:
        calls.append(number)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    monkeypatch.setattr(pictures_out.os, "fsync", full_once)
    with pytest.raises(WorkError, match=r"No space left.*kept as .*a\.png"):
        save_bytes(b"x", destination, "a.png")
    assert list(folder.iterdir()) == []
    assert (rescue / "a.png").read_bytes() == b"x"


@pytest.mark.parametrize("name", ["a.gif", "a.tiff", "a.AVIF"])
def test_foreign_formats_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PictureError, match=r"\.png, \.jpg or \.webp"):
        open_destination(str(tmp_path / name), None, False, 0)


def test_name_and_format_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="differ"):
        open_destination(str(tmp_path / "a.png"), "webp", False, 0)


def test_folder_with_a_dot_is_a_folder(tmp_path: Path) -> None:
    assert folder_destination(tmp_path / "v1.5").stem is None
    (tmp_path / "odd.png").mkdir()
    assert folder_destination(tmp_path / "odd.png").stem is None
