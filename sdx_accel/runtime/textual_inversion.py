"""Textual inversions: words learnt as embeddings, matched against the text encoders by header.

Knows the layouts in use: `clip_l` and `clip_g` for SDXL, `emb_params` or the word itself for SD 1.5
and 2. Only .safetensors files are read: the others are pickles, which can run code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdx_accel.errors import CheckpointError, RefusedError
from sdx_accel.runtime.checkpoint_files import PICKLE_SUFFIXES, neighbours, read_header
from sdx_accel.runtime.descriptions import ModelDescription
from sdx_accel.runtime.file_kinds import seems_to_be
from sdx_accel.runtime.folder_loading import first_line, quiet_libraries

__all__ = ["embedding_token", "load_embeddings", "with_embeddings"]

# names of tensors by text encoder; the second column is what diffusers' own trainers write
_SDXL = (("clip_l", "text_encoders_0"), ("clip_g", "text_encoders_1"))
_PLAIN = "emb_params"
_ENCODERS = ("text_encoder", "text_encoder_2")
_WIDTHS = {768: "SD 1.5", 1024: "SD 2"}


def embedding_token(source: str, token: str | None) -> str:
    """The word that stands for an embedding in a prompt.

    Args:
        source: the file.
        token: as asked for; None takes the word inside the file, else the file's name.

    Raises:
        CheckpointError: no such file, broken, a pickle, or without an embedding.
        RefusedError: a word that no prompt can hold.
    """
    names = _read(source)
    if token is None:
        alone = next(iter(names)) if len(names) == 1 else None
        token = alone if alone is not None and alone != _PLAIN else Path(source).stem
    if not token or any(letter.isspace() for letter in token):
        raise RefusedError(
            f"--embedding {source}: {token!r} cannot be a word of a prompt; name one without "
            "blanks: --embedding FILE:TOKEN"
        )
    return token


def with_embeddings(description: ModelDescription, sources: Sequence[str]) -> ModelDescription:
    """The description of a model whose text encoders know more words.

    Args:
        description: the model's.
        sources: .safetensors files.

    Raises:
        CheckpointError: broken, or made for another model.
        RefusedError: the model takes none.
    """
    components = dict(description.components)
    encoders = [name for name in _ENCODERS if name in components]
    if not encoders or not all(components[n].class_name.startswith("CLIPText") for n in encoders):
        raise RefusedError(
            "--embedding works with Stable Diffusion 1.5, 2 and SDXL models; "
            f"{description.source} is a {description.pipeline_class}"
        )
    for source in sources:
        shapes = {name: tensor.shape for name, tensor in read_header(Path(source)).tensors.items()}
        widths = {name: components[name].config.get("hidden_size", 512) for name in encoders}
        for encoder, key in _keys(source, list(shapes), widths, shapes).items():
            vectors = shapes[key][0] if len(shapes[key]) == 2 else 1
            part = components[encoder]
            words = part.config.get("vocab_size", 49408) + vectors
            components[encoder] = replace(part, config={**part.config, "vocab_size": words})
    return replace(description, components=components)


def load_embeddings(pipe: Any, embeddings: Sequence[tuple[str, str]]) -> None:
    """Teach a pipeline on the CPU words from files.

    Args:
        pipe: a Stable Diffusion or SDXL pipeline.
        embeddings: (file, word).

    Raises:
        CheckpointError: a word that the tokenizer knows already, or a file that does not fit.
    """
    from safetensors.torch import load_file

    encoders = [name for name in _ENCODERS if getattr(pipe, name, None) is not None]
    for source, token in embeddings:
        tensors = load_file(source)
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        widths = {name: getattr(pipe, name).config.hidden_size for name in encoders}
        for encoder, key in _keys(source, list(shapes), widths, shapes).items():
            tokenizer = getattr(pipe, encoder.replace("text_encoder", "tokenizer"))
            if token in tokenizer.get_vocab():
                raise CheckpointError(
                    f"--embedding {source}: {token!r} is a word that the model knows already; "
                    f"give it another one: --embedding {source}:<{token}>"
                )
            try:
                with quiet_libraries():
                    pipe.load_textual_inversion(
                        tensors[key],
                        token=token,
                        tokenizer=tokenizer,
                        text_encoder=getattr(pipe, encoder),
                    )
            except (ValueError, KeyError, RuntimeError, TypeError) as error:
                raise CheckpointError(
                    f"--embedding {source} cannot be loaded: {first_line(error)}"
                ) from error


def _read(source: str) -> list[str]:
    """Names of the tensors in a file."""
    path = Path(source).expanduser()
    if not path.exists():
        raise CheckpointError(
            f"--embedding {path}: no such file; {path.parent} holds: {neighbours(path.parent)}"
        )
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"--embedding {path} is a pickle, which can run code while it loads; use the "
            ".safetensors version"
        )
    names = list(read_header(path).tensors)
    if not names:
        raise CheckpointError(f"--embedding {path} holds no embedding")
    return names


def _keys(
    source: str,
    names: list[str],
    widths: dict[str, int],
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, str]:
    """Text encoder → name of its tensor, every width checked."""
    found: dict[str, str] = {}
    for encoder, choices in zip(_ENCODERS, _SDXL, strict=True):
        key = next((choice for choice in choices if choice in names), None)
        if key is not None:
            found[encoder] = key
    if not found and len(names) == 1:
        found = {"text_encoder": names[0]}
    if not found and _PLAIN in names:
        found = {"text_encoder": _PLAIN}
    if not found:
        seems = seems_to_be(names)
        what = f"is {seems}" if seems else f"has {names[0]!r}"
        raise CheckpointError(f"--embedding {source} holds no embedding; it {what}")
    wrong = [key for key in found.values() if len(shapes[key]) not in (1, 2)]
    if wrong:
        raise CheckpointError(
            f"--embedding {source} holds no embedding: {wrong[0]} has the shape "
            f"{list(shapes[wrong[0]])}"
        )
    theirs = {encoder: shapes[key][-1] for encoder, key in found.items()}
    if theirs != widths:
        raise CheckpointError(
            f"--embedding {source} was made for another model: it is {_shown(theirs)} wide, and "
            f"the text encoders here are {_shown(widths)}"
        )
    return found


def _shown(widths: dict[str, int]) -> str:
    text = " and ".join(str(width) for width in widths.values())
    family = "SDXL" if len(widths) == 2 else _WIDTHS.get(next(iter(widths.values())))
    return f"{text} ({family})" if family else text
