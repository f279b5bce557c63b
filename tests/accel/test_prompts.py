"""What is dropped of a long prompt is named in the user's own words (case 123)."""

from types import SimpleNamespace
from typing import Any

import pytest

from sdx_accel.cli.prompts import dropped_words, prompt_notes


class WordTokenizer:
    """Two tokens a word beyond four letters, one otherwise, and a begin and an end token."""

    def __init__(self, limit: int = 10) -> None:
        self.model_max_length = limit

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        inner = [7] * sum(1 + (len(word) > 4) for word in text.split())
        return {"input_ids": [0, *inner, 1]}


@pytest.mark.parametrize(
    ("text", "dropped"),
    [
        ("", ""),
        ("a b c d e f g h", ""),
        ("a b c d e f g h i", "i"),
        ("a b c d e f g Hello, World", "Hello, World"),
        ("A  b\tc d e f g h  I j\nK", "I j\nK"),
        ("Hello " * 5, "Hello"),
    ],
)
def test_dropped_words_start_at_the_first_that_does_not_go_in_whole(
    text: str, dropped: str
) -> None:
    assert dropped_words(WordTokenizer(), text) == dropped


def test_one_note_when_both_encoders_cut_at_the_same_place() -> None:
    pipe = SimpleNamespace(tokenizer=WordTokenizer(), tokenizer_2=WordTokenizer())
    (note,) = prompt_notes(pipe, "a b c d e f g h i j", "")
    assert note == 'the prompt is longer than 10 tokens; these words were dropped: "i j"'


def test_each_encoder_is_named_when_they_differ() -> None:
    pipe = SimpleNamespace(tokenizer=WordTokenizer(), tokenizer_2=WordTokenizer(6))
    notes = list(prompt_notes(pipe, "a b c d e f g h i", "a b c d e"))
    assert notes == [
        'the prompt is longer than 10 tokens (text encoder 1); these words were dropped: "i"',
        "the prompt is longer than 6 tokens (text encoder 2); these words were dropped: "
        '"e f g h i"',
        "the negative prompt is longer than 6 tokens (text encoder 2); these words were dropped: "
        '"e"',
    ]


def test_single_encoder_and_none() -> None:
    assert list(prompt_notes(SimpleNamespace(tokenizer=None), "a " * 99, "")) == []
    pipe = SimpleNamespace(tokenizer=WordTokenizer(), tokenizer_2=None)
    assert len(list(prompt_notes(pipe, "a " * 99, "b " * 99))) == 2


def test_a_very_long_tail_is_counted() -> None:
    pipe = SimpleNamespace(tokenizer=WordTokenizer())
    (note,) = prompt_notes(pipe, "word " * 1000, "")
    assert len(note) < 450
    assert note.endswith("more characters")


def test_offline_tokenizer_counts_what_the_encoder_reads() -> None:
    from sdx_accel.runtime.checkpoints import load

    pipe = load("random:sdxl-tiny")
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_2):
        for text in ("ab cd " * 40, "日本語" * 60, "🙂 " * 90):
            tail = dropped_words(tokenizer, text)
            kept = text[: len(text.rstrip()) - len(tail)].rstrip()
            assert tail
            assert text.rstrip().endswith(tail)
            assert dropped_words(tokenizer, kept) == ""
            cut = tokenizer(text, truncation=True, max_length=77)["input_ids"]
            whole = tokenizer(kept)["input_ids"]
            # the last token before the end differs when it ends a word in only one of the two
            assert whole[:-2] == cut[: len(whole) - 2]
