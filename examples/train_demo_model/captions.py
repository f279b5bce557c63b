"""Captions of one picture: its name in the forms that people type, and words related to it.

Knows words only; no pictures and no tokens.
"""

import re
import unicodedata

__all__ = [
    "CAPTIONS",
    "COLOURS",
    "TONES",
    "captions_of",
    "coloured_captions",
    "plain",
    "with_article",
]

#: captions of a picture; one is drawn at random each time the picture is
CAPTIONS = 10

TONES = ("light", "medium-light", "medium", "medium-dark", "dark")

#: colour word → hue in degrees and what its saturation is multiplied by
COLOURS: dict[str, tuple[float, float]] = {
    "red": (357.0, 1.0),
    "orange": (27.0, 1.0),
    "yellow": (50.0, 1.0),
    "green": (125.0, 1.0),
    "blue": (212.0, 1.0),
    "purple": (272.0, 1.0),
    "pink": (330.0, 0.6),
}


def plain(text: str) -> str:
    """Lower-case ASCII words of `text`, parted by single blanks."""
    text = unicodedata.normalize("NFKD", text.replace("’", "").replace("&", " and "))
    text = text.encode("ascii", "ignore").decode().lower().replace("'", "")
    return " ".join(re.findall(r"[a-z0-9#*]+", text))


def with_article(name: str) -> str:
    """`name` after "a" or "an"; plurals keep it too, as many people would not type a prompt so."""
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"


def _fill(forms: list[str]) -> list[str]:
    """`CAPTIONS` captions: the distinct forms, then again from the first."""
    forms = list(dict.fromkeys(form for form in forms if form))
    return [forms[index % len(forms)] for index in range(CAPTIONS)]


def captions_of(name: str, label: str, tags: list[str], tone: str | None = None) -> list[str]:
    """Captions of a picture as drawn.

    Args:
        name: the picture's name in the icon set, as words.
        label: Unicode's name of the character.
        tags: words that emojibase relates to it.
        tone: one of `TONES`, or None for the picture without a tone.
    """
    if tone is not None:
        words = f"{plain(tone)} skin tone"
        return _fill([f"{name} {words}", f"{with_article(name)} with {words}", f"{label} {words}"])
    extra = [plain(tag) for tag in tags]
    extra = [tag for tag in extra if tag and tag not in name]
    forms = [name, with_article(name), f"{name} emoji", label]
    # the first words of the list say most; the rest are often jokes
    if extra:
        forms += [f"{name} {' '.join(extra[:2])}", f"{label} {extra[-1]}"]
        forms += [f"{' '.join(extra[:3])} {name}"]
    forms += [f"a picture of {with_article(name)}", name, with_article(name)]
    return _fill(forms)


def coloured_captions(object_name: str, colour: str) -> list[str]:
    """Captions of a picture whose main colour was changed, or whose own colour is named."""
    name = f"{colour} {object_name}"
    return _fill([name, with_article(name), f"{name} emoji", f"a picture of {with_article(name)}"])
