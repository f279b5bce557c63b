"""The demo model's pages are made by commands: sheets of pictures, one evaluation of all tiers."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "train_demo_model"
PICTURES = ROOT / "docs" / "pictures"
FIXED = {"names": ["rocket", "dog face"], "unseen": [["blue", "dog face"]]}


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """The two scripts, with three evaluated prompts instead of 260; forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(RECIPE))
    found = {name: __import__(name) for name in ("names", "sheet", "tiers")}
    fixed = tmp_path / "fixed.json"
    fixed.write_text(json.dumps(FIXED))
    monkeypatch.setattr(found["names"], "FILE", fixed)
    monkeypatch.setattr(found["tiers"], "FILE", fixed)
    yield SimpleNamespace(**found)
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == RECIPE:
            del sys.modules[name]


def test_a_sheet_shows_every_prompt_with_its_picture(
    recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "sheet.png"
    line = ["sheet.py", "--out", str(path), "--evaluated", "--steps", "2", "--columns", "3"]
    monkeypatch.setattr(sys, "argv", [*line, "--colours", "64", "a red apple"])
    shown: list[str] = []
    monkeypatch.setattr(
        recipe.sheet,
        "contact_sheet",
        lambda pictures, titles, columns, made=recipe.sheet.contact_sheet: (
            shown.extend(titles) or made(pictures, titles, columns)
        ),
    )
    recipe.sheet.main()
    assert shown == ["a red apple", "NEW blue dog face", "rocket", "dog face"]
    with Image.open(path) as sheet:
        assert sheet.size == (3 * 134, 2 * 148)
        assert len(sheet.getcolors() or []) <= 64
        # after two steps there is something other than white in each place
        for column, row in ((0, 0), (1, 0), (2, 0), (0, 1)):
            cell = (column * 134 + 20, row * 148 + 20, column * 134 + 110, row * 148 + 110)
            assert len(sheet.crop(cell).convert("RGB").getcolors() or []) > 4


def test_every_tier_is_judged_alike(
    recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    picture = sys.modules["data"].Picture
    pictures = [picture(name, name, "objects") for name in ("rocket", "dog face")]
    pixels = torch.randint(0, 256, (2, 128, 128, 3), dtype=torch.uint8).numpy()
    monkeypatch.setattr(recipe.tiers, "load_data", lambda path: (pixels, pictures, None))
    path = tmp_path / "tiers.json"
    line = ["tiers.py", "--data", "none", "--out", str(path), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", line)
    recipe.tiers.main()
    made: dict[str, Any] = json.loads(path.read_text())
    tiers = made["tiers"]
    assert list(tiers) == list(recipe.tiers.TIERS)
    assert made["settings"]["names"] == 2
    assert tiers["stock, fp32"]["psnr_to_stock_db"] is None
    assert tiers["exact, fp32"]["psnr_to_stock_db"] > 60
    assert tiers["exact, fp32, VAE in bands"]["psnr_to_stock_db"] > 60
    assert tiers["near, fp32, VAE in stock tiles of 64 px"]["psnr_to_stock_db"] < 60
    assert tiers["exact, fp32, our reference attention"]["attention_ran"] == ["reference"]
    assert tiers["exact, bf16"]["psnr_to_stock_db"] < 60


@pytest.mark.parametrize(("name", "kib"), [("demo-sheet", 1024), ("demo-strip", 150)])
def test_the_pictures_of_the_pages_are_small(name: str, kib: int) -> None:
    assert (PICTURES / f"{name}.png").stat().st_size <= kib << 10
