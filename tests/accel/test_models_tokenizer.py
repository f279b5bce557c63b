"""The tokenizer that is made in code: any prompt, no files, survives a round trip."""

import pytest
from transformers import CLIPTokenizer

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.offline_tokenizer import MINIMUM_VOCABULARY, build_tokenizer

_PROMPTS = [
    "",
    "a lighthouse, (best) 8k!",
    "Привет, мир",
    "日本の灯台",
    "👩‍👩‍👧 family",
    "e\u0301 \u200b\u202e \ufeff",
    "\x00\x01\t\r\n",
    "<|endoftext|> <|startoftext|> <|unused-600|>",
    "word " * 500,
    "\U0010ffff",
]


@pytest.mark.parametrize("size", [MINIMUM_VOCABULARY, 1000, 49408])
@pytest.mark.parametrize("prompt", _PROMPTS)
def test_any_prompt_becomes_ids_of_the_text_encoder(size, prompt):
    tokenizer = build_tokenizer(size)
    assert len(tokenizer) == tokenizer.vocab_size == size
    ids = tokenizer(prompt, padding="max_length", truncation=True, max_length=77).input_ids
    assert len(ids) == tokenizer.model_max_length == 77
    assert ids[0] == tokenizer.bos_token_id == size - 2
    assert tokenizer.eos_token_id == size - 1
    assert size - 1 in ids
    assert all(0 <= i < size for i in ids)


def test_each_byte_is_one_token_and_decodes_again():
    tokenizer = build_tokenizer(49408)
    ids = tokenizer("grün 日", add_special_tokens=False).input_ids
    assert len(ids) == len("grün日".encode())
    assert max(ids) < 512
    assert tokenizer.decode(ids) == "grün 日"


def test_ids_are_those_of_the_published_vocabulary():
    """CLIP numbers the bytes '!' = 0, 'a' = 64, and the word-ending 'a' = 320."""
    tokenizer = build_tokenizer(49408, pad_token="!")
    assert tokenizer("a", add_special_tokens=False).input_ids == [320]
    assert tokenizer("ab", add_special_tokens=False).input_ids[0] == 64
    assert tokenizer.pad_token_id == 0


@pytest.mark.parametrize("pad", ["<|endoftext|>", "!"])
def test_round_trip_through_files(tmp_path, pad):
    tokenizer = build_tokenizer(600, pad_token=pad)
    tokenizer.save_pretrained(tmp_path)
    again = CLIPTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for prompt in _PROMPTS:
        options = {"padding": "max_length", "truncation": True, "max_length": 77}
        assert again(prompt, **options).input_ids == tokenizer(prompt, **options).input_ids
    assert again.model_max_length == 77
    assert again.pad_token_id == tokenizer.pad_token_id


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(CheckpointError, match="513"):
        build_tokenizer(513)
