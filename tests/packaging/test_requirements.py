"""The dependencies as an installer on another system would read them."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import sdx_accel

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = [
    Requirement(line) for lines in PROJECT["optional-dependencies"].values() for line in lines
]


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


@pytest.mark.parametrize(
    ("system", "expected"),
    [("Linux", {"triton"}), ("Windows", {"triton-windows"}), ("Darwin", set())],
)
def test_triton_comes_as_each_system_has_it(system: str, expected: set[str]) -> None:
    asked = {
        requirement.name
        for requirement in REQUIREMENTS
        if requirement.name.startswith("triton")
        and (requirement.marker is None or requirement.marker.evaluate({"platform_system": system}))
    }
    assert asked == expected


def test_every_requirement_is_pinned_within_its_range() -> None:
    pins = constraints()
    for requirement in [*REQUIREMENTS, *EXTRAS]:
        if requirement.name == "triton-windows":
            continue  # exists on Windows only, where the constraints were not made
        pin = pins[canonicalize_name(requirement.name)]
        (only,) = pin.specifier
        assert only.operator == "==", str(pin)
        assert requirement.specifier.contains(only.version), f"{requirement} against {pin}"


def test_pins_carry_no_local_version() -> None:
    local = [
        str(pin)
        for pin in constraints().values()
        if any(Version(specifier.version).local for specifier in pin.specifier)
    ]
    assert local == []


def test_the_makefile_asks_for_the_pinned_torch() -> None:
    asked = re.search(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert asked is not None
    assert asked[1] == str(constraints()["torch"])


def test_the_changelog_s_newest_entry_is_this_version() -> None:
    entries = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    # "Unreleased" stands for a development version
    newest = next(iter(entries), None)
    assert newest is not None, "CHANGELOG.md has no entry"
    version = Version(sdx_accel.__version__)
    assert newest.lower() == "unreleased" if version.is_devrelease else newest == str(version)
