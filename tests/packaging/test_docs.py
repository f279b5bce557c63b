"""The pages: no dead link, no variable or case without a row, and help that is up to date."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")])
SOURCES = [
    path
    for folder in ("sdx_accel", "kernels", "patches")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchor(heading: str) -> str:
    """The fragment that a heading gets on the usual hosts."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


@pytest.mark.parametrize("page", sorted(set(PAGES)), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, fragment = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            dead.append(link)
        elif fragment:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            if fragment not in map(anchor, headings):
                dead.append(link)
    assert dead == []


def test_every_variable_of_ours_has_a_row() -> None:
    read = set()
    for path in SOURCES:
        read |= set(re.findall(r"[\"'](SDX_[A-Z_]+)[\"']", path.read_text(encoding="utf-8")))
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^\| `(SDX_[A-Z_]+)`", page, re.MULTILINE))
    assert read == described


def test_every_case_that_a_test_names_is_listed() -> None:
    page = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| (\d{3}) \|", page, re.MULTILINE))
    named = set()
    for path in (ROOT / "tests").rglob("*.py"):
        named |= set(re.findall(r"\bcase[ _](\d{3})(?!\d)", path.read_text(encoding="utf-8"), re.I))
        named |= set(re.findall(r"_case_(\d{3})_", path.read_text(encoding="utf-8")))
    assert len(listed) == 89
    assert named - listed == set()


def test_the_command_line_s_page_is_up_to_date(tmp_path: Path) -> None:
    """`make docs` writes it."""
    written = tmp_path / "cli.md"
    subprocess.run(
        [sys.executable, "-m", "typer", "sdx_accel.cli.app", "utils", "docs"]
        + ["--name", "sdx-accel", "--output", str(written)],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    page = ROOT / "docs" / "cli.md"
    assert page.is_file(), "docs/cli.md is missing: run `make docs`"
    assert written.read_text() == page.read_text(), "docs/cli.md is out of date: run `make docs`"
