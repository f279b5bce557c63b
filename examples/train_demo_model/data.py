"""Fetch the pictures and their words, render, and pack everything into one file.

    python examples/train_demo_model/data.py --out data.npz

Needs npm (or the two packages unpacked, --icons and --words) and `pip install -e ".[train]"`.
Pictures: @iconify-json/fluent-emoji-flat (Microsoft's Fluent Emoji, MIT); words: emojibase-data
(MIT).
"""

import argparse
import io
import json
import re
import subprocess
import tarfile
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from captions import COLOURS, TONES, captions_of, plain
from words import learn_merges

__all__ = ["SIDE", "Picture", "load_data", "pack"]

SIDE = 128
#: tokens of the vocabulary; 514 are bytes, start and end
VOCABULARY = 2560
ICONS, WORDS = "@iconify-json/fluent-emoji-flat@1.2.6", "emojibase-data@17.0.0"
_TONE = re.compile(rf"-({'|'.join(sorted(TONES, key=len, reverse=True))})$")


@dataclass(frozen=True)
class Picture:
    """One training picture: its name, the name without skin tone, and what may describe it.

    Attributes:
        name: unique in the set, as words.
        base: the name without the skin tone; equals `name` where there is none.
        group: emojibase's group, such as "animals-nature".
        captions: `captions.CAPTIONS` texts.
    """

    name: str
    base: str
    group: str
    captions: list[str] = field(default_factory=list)


def fetch(package: str, folder: Path) -> Path:
    """The unpacked npm package."""
    done = subprocess.run(
        ["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True, text=True
    )
    target = folder / re.sub(r"\W", "_", package)
    with tarfile.open(folder / done.stdout.split()[-1]) as archive:
        archive.extractall(target, filter="data")
    return target / "package"


def describe(icons: Path, words: Path) -> dict[str, Picture]:
    """Icon name → picture, for every icon that belongs to a character."""
    names = json.loads((icons / "icons.json").read_text())["icons"]
    groups = json.loads((words / "meta" / "groups.json").read_text())["groups"]
    entries: dict[str, Any] = {}
    for entry in json.loads((words / "en" / "data.json").read_text()):
        entries[_code(entry["hexcode"])] = entry
        for skin in entry.get("skins", ()):
            entries[_code(skin["hexcode"])] = entry
    found: dict[str, Any] = {}
    for code, icon in json.loads((icons / "chars.json").read_text()).items():
        if (entry := entries.get(_code(code))) is not None:
            found.setdefault(icon, entry)
    pictures = {}
    for icon in sorted(names):
        tone = _TONE.search(icon)
        root = icon[: tone.start()] if tone else icon
        if tone is None or root not in names:  # "traffic-light" is no tone
            tone, root = None, icon
        entry = found.get(icon) or found.get(root)
        if entry is None:
            continue
        base = plain(root)
        label = plain(entry["label"]) or base
        pictures[icon] = Picture(
            name=base if tone is None else f"{base} {plain(tone[1])} skin tone",
            base=base,
            group=groups[str(entry["group"])] if "group" in entry else "other",
            captions=captions_of(base, label, entry.get("tags", []), tone[1] if tone else None),
        )
    return pictures


def _code(code: str) -> str:
    return code.lower().replace("-fe0f", "")


def render(body: str) -> bytes:
    """A 32 × 32 icon body as a PNG of `SIDE` pixels on white."""
    import resvg_py
    from PIL import Image

    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32" width="{SIDE}" '
    drawn = resvg_py.svg_to_bytes(
        svg_string=f'{head}height="{SIDE}">{body}</svg>',
        background="#ffffff",
        width=SIDE,
        height=SIDE,
        skip_system_fonts=True,
    )
    packed = io.BytesIO()
    Image.open(io.BytesIO(bytes(drawn))).convert("RGB").save(packed, "PNG", optimize=True)
    return packed.getvalue()


def pack(
    path: Path, files: list[bytes], pictures: list[Picture], merges: list[tuple[str, str]]
) -> None:
    """Write PNG files, descriptions and the tokenizer's merges into one .npz."""
    about = {"pictures": [asdict(p) for p in pictures], "merges": merges, "from": [ICONS, WORDS]}
    np.savez_compressed(
        path,
        png=np.frombuffer(b"".join(files), dtype=np.uint8),
        ends=np.cumsum([len(file) for file in files]),
        about=np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
    )


def load_data(
    path: Path, limit: int | None = None
) -> tuple[Any, list[Picture], list[tuple[str, str]]]:
    """Pictures, uint8 (N, `SIDE`, `SIDE`, 3), their descriptions, and the tokenizer's merges.

    Args:
        limit: read this many at most, spread over the set.
    """
    from concurrent.futures import ThreadPoolExecutor

    from PIL import Image

    with np.load(path) as stored:
        png, ends, about = stored["png"], stored["ends"], json.loads(stored["about"].tobytes())
    pictures = [Picture(**entry) for entry in about["pictures"]]
    chosen = list(range(len(pictures)))
    if limit is not None and limit < len(pictures):
        chosen = [index * len(pictures) // limit for index in range(limit)]

    def decode(index: int) -> Any:
        start = ends[index - 1] if index else 0
        return np.asarray(Image.open(io.BytesIO(png[start : ends[index]].tobytes())))

    with ThreadPoolExecutor() as pool:
        pixels = np.stack(list(pool.map(decode, chosen)))
    merges = [(first, second) for first, second in about["merges"]]
    return pixels, [pictures[index] for index in chosen], merges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data.npz"))
    parser.add_argument("--icons", type=Path, help=f"unpacked {ICONS}")
    parser.add_argument("--words", type=Path, help=f"unpacked {WORDS}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        icons = options.icons or fetch(ICONS, Path(folder))
        words = options.words or fetch(WORDS, Path(folder))
        described = describe(icons, words)
        bodies = json.loads((icons / "icons.json").read_text())["icons"]
    pictures = list(described.values())
    files = [render(bodies[icon]["body"]) for icon in described]
    # the words of names get whole tokens, related words may be spelt in pieces
    texts = [text for picture in pictures for text in dict.fromkeys(picture.captions[:4])]
    texts += [f"a {colour}" for colour in COLOURS for _ in range(100)]
    pack(options.out, files, pictures, learn_merges(texts, VOCABULARY - 514))
    print(f"{options.out}: {len(files)} pictures, {options.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
