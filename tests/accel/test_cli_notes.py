"""What the layers below have to say comes as a note of the command line, once."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sdx_patches import compat

Cli = Callable[..., Any]


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A diffusers that lacks a name, in a process that has not said so yet."""
    names = (*compat._HOST_NAMES, "diffusers.models.attention:Gone")
    monkeypatch.setattr(compat, "_HOST_NAMES", names)
    compat.warn_once.cache_clear()
    yield
    compat.warn_once.cache_clear()


@pytest.mark.usefixtures("lost")
@pytest.mark.parametrize("flags", [[], ["--vram", 8, "--device", "cpu"], ["--json"]], ids=str)
def test_what_a_newer_diffusers_lacks_is_one_note(cli: Cli, flags: list[Any]) -> None:
    size = ("--width", 64, "--height", 64, "--steps", 1, "--num", 2)
    result = cli("generate", "x", "--model", "random:sdxl-tiny", *size, *flags)
    assert result.code == 0, result.err
    said = [line for line in result.err.splitlines() if "lacks Gone" in line]
    assert len(said) == 1
    assert said[0].startswith("note: diffusers ")
    # for a program it is one of the notes
    assert result.out.count("lacks Gone") == ("--json" in flags)
