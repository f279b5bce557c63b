"""CLIP and T5 tokenizers made in code: no network, no vocabulary file, no merges.

CLIP's is byte-level with empty merges: each UTF-8 byte of the prompt is one token, so any text
works, but only 75 bytes of it reach the model. T5's has one token for each character of ASCII. Used
with random weights, where words mean nothing anyway.
"""

from __future__ import annotations

from typing import Any

from sdx_accel.errors import CheckpointError

__all__ = ["MINIMUM_VOCABULARY", "build_long_tokenizer", "build_tokenizer", "byte_letters"]

MINIMUM_VOCABULARY = 2 * 256 + 2
_START = "<|startoftext|>"
_END = "<|endoftext|>"


def byte_letters() -> list[str]:
    """One visible letter per byte, in CLIP's order: printable bytes first, then the others.

    The byte-level BPE convention: a printable Latin-1 byte stands for itself, the n-th other byte
    for the character U+0100 + n.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(0x100 + n) for n in range(len(others))]


def build_tokenizer(vocab_size: int, *, pad_token: str = _END, model_max_length: int = 77) -> Any:
    """A `transformers.CLIPTokenizer` whose ids fit a text encoder of `vocab_size` embeddings.

    Ids 0–255 are bytes, 256–511 bytes that end a word, the last two are start and end of text,
    as in CLIP's own vocabulary; ids between are placeholders that no prompt reaches.

    Args:
        vocab_size: rows of the text encoder's token embedding, at least `MINIMUM_VOCABULARY`.
        pad_token: SDXL's second tokenizer pads with ``"!"`` (id 0), the others with end of text.
        model_max_length: tokens per prompt, start and end included.

    Raises:
        CheckpointError: `vocab_size` is too small for the bytes.
    """
    from transformers import CLIPTokenizer

    if vocab_size < MINIMUM_VOCABULARY:
        raise CheckpointError(
            f"a text encoder with {vocab_size} token embeddings is too small for the offline "
            f"tokenizer, which needs {MINIMUM_VOCABULARY}"
        )
    letters = byte_letters()
    words = letters + [letter + "</w>" for letter in letters]
    words += [f"<|unused-{index}|>" for index in range(len(words), vocab_size - 2)]
    words += [_START, _END]
    return CLIPTokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=[],
        pad_token=pad_token,
        model_max_length=model_max_length,
    )


def build_long_tokenizer(vocab_size: int, *, model_max_length: int = 512) -> Any:
    """A `transformers.T5Tokenizer` whose ids fit a text encoder of `vocab_size` embeddings.

    Args:
        vocab_size: rows of the encoder's token embedding, at least one for each of 98 pieces.
        model_max_length: tokens a prompt; pipelines say themselves how many they want.

    Raises:
        CheckpointError: `vocab_size` is too small.
    """
    from transformers import T5Tokenizer

    pieces = ["<pad>", "</s>", "<unk>", "▁", *(chr(code) for code in range(0x21, 0x7F))]
    if vocab_size < len(pieces):
        raise CheckpointError(
            f"a text encoder with {vocab_size} token embeddings is too small for the offline "
            f"tokenizer, which needs {len(pieces)}"
        )
    vocab = [(piece, -float(rank)) for rank, piece in enumerate(pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=model_max_length)
