"""`--embedding`: learnt words for both text encoders, the same as diffusers', replayed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import sdx_accel
from sdx_accel.budget.machine import Machine
from sdx_accel.cli.adapter_flags import parse_embedding
from sdx_accel.errors import RefusedError
from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.checkpoints import describe_pipeline, load
from sdx_accel.runtime.textual_inversion import embedding_token, load_embeddings, with_embeddings

Cli = Callable[..., Any]
TINY = "random:sdxl-tiny"
SMALL = ("--width", 64, "--height", 64, "--steps", 2, "--seed", 3)


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.05


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Files in the layouts in use, for the tiny models; none is SDXL's real width."""
    save_file({"clip_l": draw(2, 64), "clip_g": draw(2, 96)}, tmp_path / "ink.safetensors")
    save_file({"<toy>": draw(64)}, tmp_path / "learned_embeds.safetensors")
    save_file({"emb_params": draw(3, 64)}, tmp_path / "old.safetensors")
    return tmp_path


def test_pictures_are_those_of_diffusers_and_a_replay_is_the_same(cli: Cli, words: Path) -> None:
    line = ("generate", "a cat in <ink>", "--model", TINY, *SMALL)
    result = cli(*line, "--negative", "dog", "--embedding", "ink.safetensors:<ink>")
    assert result.code == 0, result.err
    assert "neither prompt" not in result.err
    stock = load(TINY, dtype="fp32")
    for number, key in (("", "clip_l"), ("_2", "clip_g")):
        stock.load_textual_inversion(
            {"<ink>": draw(2, {"clip_l": 64, "clip_g": 96}[key])},
            token="<ink>",
            tokenizer=getattr(stock, f"tokenizer{number}"),
            text_encoder=getattr(stock, f"text_encoder{number}"),
        )
    stock.set_progress_bar_config(disable=True)
    picture = stock(
        "a cat in <ink>", negative_prompt="dog", width=64, height=64, num_inference_steps=2,
        guidance_scale=5.0, generator=torch.Generator().manual_seed(3),
    ).images[0]  # fmt: skip
    assert abs(pixels(result.paths[0]) - np.asarray(picture).astype(int)).max() <= 1
    again = cli("generate", "--from", result.paths[0])
    assert (pixels(again.paths[0]) == pixels(result.paths[0])).all()
    unknown = cli(*line, "--negative", "dog")
    assert (pixels(unknown.paths[0]) != pixels(result.paths[0])).any()
    save_file({"clip_l": draw(2, 64) * 2, "clip_g": draw(2, 96)}, "ink.safetensors")
    changed = cli("generate", "--from", result.paths[0])
    assert changed.code == 2
    assert "ink.safetensors has changed since" in changed.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.safetensors", ("a.safetensors", None)),
        ("a.safetensors:<cat>", ("a.safetensors", "<cat>")),
        ("C:/x/a.safetensors", ("C:/x/a.safetensors", None)),
        ("a:b/c.safetensors", ("a:b/c.safetensors", None)),
        ("a:b/c.safetensors:cat", ("a:b/c.safetensors", "cat")),
    ],
)
def test_tokens_are_told_from_colons_in_paths(text: str, expected: tuple[str, str]) -> None:
    assert parse_embedding(text) == expected


def test_a_word_is_the_one_in_the_file_or_its_name(words: Path) -> None:
    assert embedding_token(str(words / "learned_embeds.safetensors"), None) == "<toy>"
    assert embedding_token(str(words / "old.safetensors"), None) == "old"
    assert embedding_token(str(words / "ink.safetensors"), None) == "ink"
    assert embedding_token(str(words / "ink.safetensors"), "<x>") == "<x>"
    with pytest.raises(RefusedError, match="without blanks"):
        embedding_token(str(words / "ink.safetensors"), "two words")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--embedding absent.safetensors", "no such file"),
        ("--embedding word.pt", "is a pickle"),
        ("--embedding word.bin:cat", "is a pickle"),
        ("--embedding old.safetensors", "was made for another model: it is 64 wide"),
        ("--embedding real.safetensors", "it is 768 (SD 1.5) wide"),
        ("--embedding lora.safetensors", "holds no embedding"),
        ("--embedding ink.safetensors:", "--embedding FILE:TOKEN"),
        ("--embedding ink.safetensors --embedding ink.safetensors", "are both called 'ink'"),
        ("--embedding broken.safetensors", "broken.safetensors"),
    ],
)
def test_refused_before_any_weights(
    cli: Cli, words: Path, monkeypatch: pytest.MonkeyPatch, flags: str, message: str
) -> None:
    monkeypatch.setattr(
        "sdx_accel.runtime.checkpoints.load", lambda *a, **k: pytest.fail("a model was loaded")
    )
    for name in ("word.pt", "word.bin", "broken.safetensors"):
        Path(name).write_bytes(b"\x80\x02x")
    save_file({"emb_params": draw(1, 768)}, "real.safetensors")
    save_file({"a.lora_A": draw(1, 8), "a.lora_B": draw(8, 1)}, "lora.safetensors")
    result = cli("generate", "ink", "--model", TINY, *flags.split())
    assert result.code == 2
    assert message in result.err
    lines = [line for line in result.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1


def test_words_that_are_taken_or_unused_are_said(cli: Cli, words: Path) -> None:
    line = ("generate", "a cat", "--model", TINY, *SMALL)
    taken = cli(*line, "--embedding", "ink.safetensors:a")
    assert taken.code == 2
    assert "--embedding" in taken.err
    assert "ink.safetensors:<a>" in taken.err
    unused = cli(*line, "--embedding", "ink.safetensors")
    assert unused.code == 0, unused.err
    assert "'ink', the word for" in unused.err
    assert "is in neither prompt" in unused.err


@pytest.mark.parametrize(
    ("model", "file"), [(TINY, "ink.safetensors"), ("random:sd15-tiny", "old.safetensors")]
)
def test_the_plan_before_loading_is_the_plan_after(words: Path, model: str, file: str) -> None:
    described = with_embeddings(architecture(model), [str(words / file)])
    pipe = load(model, dtype="fp32")
    load_embeddings(pipe, [(str(words / file), "<w>")])
    live = describe_pipeline(pipe)
    for name in ("text_encoder", "text_encoder_2"):
        if name in live.components:
            rows = getattr(pipe, name).get_input_embeddings().weight.shape[0]
            assert live.components[name].config["vocab_size"] == rows
            assert described.components[name].config["vocab_size"] == rows
    plans = [
        sdx_accel.plan(m, vram=8, dtype="fp32", width=64, height=64, machine=Machine.generic())
        for m in (described, pipe)
    ]
    assert plans[0].phases == plans[1].phases
