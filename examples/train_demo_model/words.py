"""The demo model's tokenizer: byte-level BPE in CLIP's form, learnt from the captions themselves.

Ids 0–255 are bytes, 256–511 bytes that end a word, then one id per merge, then start and end of
text: any prompt can be encoded, and a frequent word of the captions is one token.
"""

import itertools
from collections import Counter
from typing import Any

from sdx_accel.runtime.offline_tokenizer import byte_letters

__all__ = ["END", "LENGTH", "START", "learn_merges", "make_tokenizer", "token_ids"]

#: tokens of a prompt, start and end included; the longest name has 12
LENGTH = 24
START, END = "<|startoftext|>", "<|endoftext|>"

Merge = tuple[str, str]


def learn_merges(captions: list[str], count: int) -> list[Merge]:
    """The first `count` merges of byte-pair encoding; ties go to the pair that sorts last.

    Args:
        captions: lower-case ASCII words parted by blanks; each distinct word counts by the square
            root of its frequency, so that rare names get whole tokens too.
    """
    words = Counter(word for caption in captions for word in caption.split())
    parts = {word: [*word[:-1], word[-1] + "</w>"] for word in words}
    merges: list[Merge] = []
    while len(merges) < count:
        pairs: Counter[Merge] = Counter()
        for word, symbols in parts.items():
            for pair in itertools.pairwise(symbols):
                pairs[pair] += words[word] ** 0.5
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (round(pairs[pair], 6), pair))
        merges.append(best)
        for word, symbols in parts.items():
            parts[word] = _merged(symbols, best)
    return merges


def _merged(symbols: list[str], pair: Merge) -> list[str]:
    out: list[str] = []
    for symbol in symbols:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out


def make_tokenizer(merges: list[Merge], *, pad_token: str = END) -> Any:
    """A `transformers.CLIPTokenizer`; end of text has the highest id, as CLIP's pooling needs."""
    from transformers import CLIPTokenizer

    letters = byte_letters()
    words = letters + [letter + "</w>" for letter in letters]
    words += [first + second for first, second in merges]
    words = list(dict.fromkeys(words))
    words += [START, END]
    return CLIPTokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=[tuple(merge) for merge in merges],
        pad_token=pad_token,
        model_max_length=LENGTH,
    )


def token_ids(tokenizer: Any, captions: list[str]) -> Any:
    """Ids of the captions as the pipeline makes them, int64 (captions, `LENGTH`)."""
    return tokenizer(
        captions,
        padding="max_length",
        max_length=LENGTH,
        truncation=True,
        return_tensors="pt",
    ).input_ids
