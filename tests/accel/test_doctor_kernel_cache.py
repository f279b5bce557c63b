"""Case 145: kernels can be compiled wherever the home folder is, and the folder used is said."""

import logging
import os
import stat
import tempfile
from pathlib import Path

import pytest

from sdx_accel.runtime import kernel_cache
from sdx_accel.runtime.kernel_cache import ensure_kernel_cache, locate_kernel_cache


@pytest.fixture(autouse=True)
def nobody_s_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cache variable, a temporary folder of our own, and nothing announced yet."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        # set first, so that monkeypatch takes away what ensure_kernel_cache() sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    kernel_cache._announce.cache_clear()


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home folder below a file: not writable for root either."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))


def test_case_145_a_sound_home_is_used_and_nothing_is_touched(tmp_path: Path) -> None:
    cache = ensure_kernel_cache()
    assert cache.path == tmp_path / "home" / ".triton" / "cache"
    assert (cache.source, cache.problems, cache.redirect) == ("home folder", (), False)
    assert "TRITON_CACHE_DIR" not in os.environ
    assert list((tmp_path / "home").iterdir()) == []


def test_case_145_tritons_own_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "triton"))
    assert locate_kernel_cache().path == tmp_path / "triton" / ".triton" / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "named"))
    assert locate_kernel_cache().path == tmp_path / "named"


@pytest.mark.usefixtures("no_home")
def test_case_145_private_folder_when_home_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sdx_accel"):
        cache = ensure_kernel_cache()
        again = ensure_kernel_cache()
    assert cache.path is not None
    assert cache.path.parent == tmp_path / "tmp"
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == str(cache.path)
    assert again.path == cache.path
    (said,) = caplog.messages
    assert str(cache.path) in said
    assert "TRITON_CACHE_DIR" in said


@pytest.mark.usefixtures("no_home")
def test_case_145_locating_creates_nothing(tmp_path: Path) -> None:
    assert locate_kernel_cache().source == "private temporary folder"
    assert list((tmp_path / "tmp").iterdir()) == []
    assert "TRITON_CACHE_DIR" not in os.environ


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_case_145_somebody_else_s_folder_is_never_used(tmp_path: Path, kind: str) -> None:
    planted = tmp_path / "tmp" / f"sdx-accel-kernels-{os.getuid()}"
    if kind == "open to others":
        planted.mkdir()
        planted.chmod(0o777)
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        planted.symlink_to(tmp_path / "elsewhere")
    else:
        planted.touch()
    cache = ensure_kernel_cache()
    assert cache.path is not None
    assert cache.path != planted
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700


def test_case_145_a_variable_that_names_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    cache = ensure_kernel_cache()
    assert cache.path == tmp_path / "home" / ".triton" / "cache"
    assert cache.redirect
    assert os.environ["TRITON_CACHE_DIR"] == str(cache.path)
    assert str(tmp_path / "file") in cache.problems[0]


def test_case_145_links_to_folders_work_and_dangling_ones_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "link" / "cache"))
    assert locate_kernel_cache().problems == ()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "dangling"))
    assert len(locate_kernel_cache().problems) == 1


def test_case_145_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # what expanduser gives in a container whose user is in no password file
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path / "home")
    cache = ensure_kernel_cache()
    assert cache.source == "private temporary folder"
    assert "no home folder" in cache.problems[0]
    assert list((tmp_path / "home").iterdir()) == []


def test_case_145_a_file_system_mounted_noexec(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mount:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda path: Mount)
    cache = ensure_kernel_cache()
    assert cache.path is None
    assert "noexec" in cache.problems[0]
    assert "TRITON_CACHE_DIR" not in os.environ


@pytest.mark.usefixtures("no_home")
def test_case_145_no_folder_at_all_is_said_and_does_not_raise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    cache = ensure_kernel_cache()
    assert cache.path is None
    assert len(cache.problems) == 2
    assert "nowhere" in caplog.text
