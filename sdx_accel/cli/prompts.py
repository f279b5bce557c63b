"""What a text encoder will not read of a prompt, in the user's own words.

Knows tokenizers by their call signature; knows nothing of models or pictures.
"""

from collections.abc import Iterator
from typing import Any

__all__ = ["dropped_words", "prompt_notes"]

# a warning is to be read: the rest of a very long tail is counted instead
LONGEST_SHOWN = 300


def dropped_words(tokenizer: Any, text: str) -> str:
    """The end of `text` that the tokenizer's text encoder never sees, from a word's start on.

    Args:
        tokenizer: a transformers tokenizer with `model_max_length`.
        text: a prompt.

    Returns:
        "" when all of it fits.
    """
    limit = int(tokenizer.model_max_length)
    ids = tokenizer(text, truncation=False, verbose=False)["input_ids"]
    if len(ids) <= limit:
        return ""
    special = len(tokenizer("", verbose=False)["input_ids"])
    return text[_cut(tokenizer, text, limit - special) :].strip()


def prompt_notes(pipe: Any, prompt: str, negative: str) -> Iterator[str]:
    """One sentence for each prompt that is cut, naming the dropped words.

    Args:
        pipe: a pipeline; its `tokenizer` and `tokenizer_2` are asked, where it has them.
        prompt: the prompt.
        negative: the negative prompt, "" = none.
    """
    tokenizers = [
        tokenizer
        for name in ("tokenizer", "tokenizer_2")
        if (tokenizer := getattr(pipe, name, None)) is not None
    ]
    for what, text in (("prompt", prompt), ("negative prompt", negative)):
        tails = [dropped_words(tokenizer, text) for tokenizer in tokenizers]
        for number, tail in enumerate(tails, start=1):
            if not tail or tail in tails[: number - 1]:
                continue
            alone = "" if len(set(tails)) == 1 else f" (text encoder {number})"
            limit = int(tokenizers[number - 1].model_max_length)
            yield (
                f"the {what} is longer than {limit} tokens{alone}; these words were dropped: "
                f"{_shown(tail)}"
            )


def _cut(tokenizer: Any, text: str, room: int) -> int:
    """Where the first word begins that does not go in whole.

    Words are counted by the tokenizer itself instead of through character offsets: not every
    tokenizer gives those.
    """
    starts = _word_starts(text)
    special = len(tokenizer("", verbose=False)["input_ids"])

    def fits(count: int) -> bool:
        end = starts[count] if count < len(starts) else len(text)
        ids = tokenizer(text[:end], truncation=False, verbose=False)["input_ids"]
        return len(ids) - special <= room

    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return starts[low]


def _word_starts(text: str) -> list[int]:
    """First characters of words; each character of a script written without spaces is a word."""
    return [
        index
        for index, char in enumerate(text)
        if not char.isspace() and (index == 0 or text[index - 1].isspace() or _is_unspaced(char))
    ] or [0]


def _is_unspaced(char: str) -> bool:
    code = ord(char)
    # Thai to Khmer, kana and CJK, their extensions, emoji
    return 0x0E00 <= code <= 0x17FF or 0x3040 <= code <= 0x9FFF or code >= 0x1F000


def _shown(tail: str) -> str:
    if len(tail) <= LONGEST_SHOWN:
        return f'"{tail}"'
    rest = tail[LONGEST_SHOWN:]
    return f'"{tail[:LONGEST_SHOWN]}…" and {len(rest)} more characters'
