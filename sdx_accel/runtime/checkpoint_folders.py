"""A diffusers folder: which components it has, and what is missing before anything is loaded.

Reads model_index.json, component configurations, file names and weight headers; never weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.checkpoint_files import (
    PICKLE_SUFFIXES,
    neighbours,
    read_header,
    read_json,
)
from sdx_accel.runtime.descriptions import ComponentDescription, ModelDescription
from sdx_accel.runtime.meta_models import LIBRARIES, check_values, default_size
from sdx_accel.runtime.schedulers import try_scheduler

__all__ = [
    "Weights",
    "check_folder",
    "check_small_parts",
    "describe_folder",
    "find_weights",
    "read_index",
]

INDEX = "model_index.json"
# components that hold no weights, by the end of their class name, and the file each needs
_SMALL_FILES = {
    "Scheduler": "scheduler_config.json",
    "ImageProcessor": "preprocessor_config.json",
    "FeatureExtractor": "preprocessor_config.json",
}
_TOKENIZER_CHOICES = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("spiece.model",),
    ("vocab.txt",),
)
_STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
# 1.2 GB that change no picture except by blacking it out
_NEVER_LOADED = ("safety_checker",)
# first match decides; the text encoders that no prompt can do without
_NEEDED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("StableDiffusion3", ()),
    ("StableDiffusionXL", ("unet", "vae", "scheduler", "text_encoder_2", "tokenizer_2")),
    ("StableDiffusion", ("unet", "vae", "scheduler", "text_encoder", "tokenizer")),
)
# no prompt is that long; transformers writes int(1e30) where a length was never set
UNKNOWN_LENGTH = 1_000_000


@dataclass(frozen=True)
class Weights:
    """The weight files of one component.

    Attributes:
        variant: ``"fp16"`` for files like model.fp16.safetensors, None for the plain name.
        files: (path, bytes), one or several shards.
    """

    variant: str | None
    files: list[tuple[Path, int]]


def find_weights(
    folder: Path, library: str, *, half: bool = False, allow_pickle: bool = False
) -> Weights:
    """The safetensors files of one component folder.

    Args:
        folder: for instance ``model/unet``.
        library: ``"diffusers"`` or ``"transformers"``; they name their files differently.
        half: prefer the fp16 variant where both are there (half the reading for the same result).
        allow_pickle: accept .bin files where there is no safetensors file.

    Raises:
        CheckpointError: no weights; the message names the expected file and what is there.
    """
    stem = _STEMS[library]
    for variant in ("fp16", None) if half else (None, "fp16"):
        name = f"{stem}.{variant}" if variant else stem
        single = folder / f"{name}.safetensors"
        if single.is_file():
            return Weights(variant, [(single, single.stat().st_size)])
        index = folder / f"{stem}.safetensors.index{f'.{variant}' if variant else ''}.json"
        if index.is_file():
            shards = _shards(index)
            lost = [shard.name for shard in shards if not shard.is_file()]
            if lost:
                raise CheckpointError(
                    f"{folder}: {len(lost)} of {len(shards)} weight shards are missing "
                    f"({', '.join(lost[:3])}); fetch them again"
                )
            return Weights(variant, [(shard, shard.stat().st_size) for shard in shards])
    pickles = [p for p in sorted(folder.glob("*")) if p.suffix in PICKLE_SUFFIXES]
    if pickles and allow_pickle:
        return Weights(None, [(path, path.stat().st_size) for path in pickles[:1]])
    hint = (
        "pickles can run code, so they are not loaded unless asked for; use the safetensors version"
        if pickles
        else "fetch that file again"
    )
    raise CheckpointError(
        f"the component {folder.name!r} has no weights: {folder / stem}.safetensors is missing; "
        f"{folder.name}/ holds: {neighbours(folder)}; {hint}"
    )


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index, "the list of weight shards").get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{index} lists no weight shards (weight_map); fetch the file again")
    return [index.parent / name for name in sorted(set(names))]


def read_index(folder: Path) -> tuple[str, dict[str, tuple[str, str]]]:
    """(pipeline class, component name → (library, class)) of a folder's model_index.json.

    Raises:
        CheckpointError: no such folder or file, or not an index.
    """
    if not (folder / INDEX).is_file():
        if (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder} is a single component (it has a config.json but no {INDEX}); name the "
                f"folder of the whole model, perhaps {folder.parent}"
            )
        raise CheckpointError(
            f"{folder} has no {INDEX}, so it is not a diffusers model folder; it holds: "
            f"{neighbours(folder)}"
        )
    index = read_json(folder / INDEX, "the list of components")
    pipeline_class = index.get("_class_name")
    if not isinstance(pipeline_class, str):
        raise CheckpointError(f"{folder / INDEX} names no pipeline class (_class_name)")
    parts = {}
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2:
            continue
        if name in _NEVER_LOADED or value[0] is None or value[1] is None:
            continue
        if value[0] not in LIBRARIES:
            raise CheckpointError(
                f"{folder / INDEX} wants {value[0]}.{value[1]} as {name}; only classes of "
                f"{' and '.join(LIBRARIES)} are loaded"
            )
        parts[name] = (value[0], str(value[1]))
    needed = next((n for start, n in _NEEDED if pipeline_class.startswith(start)), ())
    lost = [name for name in needed if name not in parts]
    if lost:
        raise CheckpointError(
            f"{folder / INDEX} does not fit its pipeline class: a {pipeline_class} also needs "
            f"{', '.join(lost)}, each as [library, class]; fetch that file again"
        )
    return pipeline_class, parts


def describe_folder(folder: Path, source: str, *, half: bool = False) -> ModelDescription:
    """`ModelDescription` of a diffusers folder from its configurations and weight headers.

    Weights may be absent (a folder of configurations): then `weight_files` lacks the component.

    Raises:
        CheckpointError: the index or a configuration is missing or invalid.
    """
    pipeline_class, parts = read_index(folder)
    components: dict[str, ComponentDescription] = {}
    files: dict[str, list[tuple[str, int]]] = {}
    scheduler: tuple[str, dict[str, Any]] = ("", {})
    for name, (library, class_name) in parts.items():
        if class_name.endswith("Scheduler"):
            path = folder / name / "scheduler_config.json"
            scheduler = (class_name, _public(read_json(path, f"the configuration of {name}")))
        elif _needs_weights(library, class_name):
            path = folder / name / "config.json"
            config = _public(read_json(path, f"the configuration of {name}"))
            components[name] = ComponentDescription(name, library, class_name, config)
            check_values(components[name])
            try:
                weights = find_weights(folder / name, library, half=half)
            except CheckpointError:
                continue
            files[name] = [(str(path), size) for path, size in weights.files]
    if not components:
        raise CheckpointError(f"{folder / INDEX} lists no component with weights")
    height, width = default_size(components)
    main = next((n for n in ("unet", "transformer") if n in files), next(iter(files), None))
    dtype = read_header(files[main][0][0]).dtype if main else None
    return ModelDescription(
        source=source,
        pipeline_class=pipeline_class,
        components=components,
        default_dtype=dtype or "float16",
        default_height=height,
        default_width=width,
        scheduler=scheduler,
        weight_files=files,
    )


def check_folder(
    folder: Path, *, half: bool = False, allow_pickle: bool = False
) -> dict[str, Weights]:
    """Everything that loading will need is there and whole; component name → its weights.

    Raises:
        CheckpointError: the first thing that is missing or broken.
    """
    _, parts = read_index(folder)
    found = {}
    for name, (library, class_name) in parts.items():
        place = folder / name
        if not place.is_dir():
            raise CheckpointError(
                f"the component {name!r} ({class_name}) has no folder {place}; {folder.name}/ "
                f"holds: {neighbours(folder)}"
            )
        if _needs_weights(library, class_name):
            config = read_json(place / "config.json", f"the configuration of {name}")
            check_values(ComponentDescription(name, library, class_name, config))
            found[name] = find_weights(place, library, half=half, allow_pickle=allow_pickle)
            for path, _ in found[name].files:
                if path.suffix not in PICKLE_SUFFIXES:
                    read_header(path)
        else:
            for ending, needed in _SMALL_FILES.items():
                if class_name.endswith(ending):
                    read_json(place / needed, f"the configuration of {name}")
    check_small_parts(folder, parts)
    return found


def check_small_parts(folder: Path, parts: dict[str, tuple[str, str]]) -> None:
    """Every tokenizer and scheduler of an index is there, whole and usable.

    Raises:
        CheckpointError: the first one that is not.
    """
    for name, (_, class_name) in parts.items():
        if "Tokenizer" in class_name:
            _check_tokenizer(folder / name, name)
            _check_length(folder, name, parts)
        elif class_name.endswith("Scheduler"):
            path = folder / name / "scheduler_config.json"
            config = read_json(path, f"the configuration of {name}")
            try_scheduler(class_name, config, str(path))


def _check_length(folder: Path, name: str, parts: dict[str, tuple[str, str]]) -> None:
    """Prompts are padded to the tokenizer's length, which its text encoder has to have room for."""
    path = folder / name / "tokenizer_config.json"
    if not path.is_file():
        return
    length = read_json(path, f"part of {name}").get("model_max_length")
    # absent, null and transformers' 1e30 mean "not known": loading takes the text encoder's
    if length is None or (type(length) in (int, float) and length >= UNKNOWN_LENGTH):
        return
    # start, one piece of a word, end
    if type(length) is not int or length < 3:
        raise CheckpointError(
            f"{path} has model_max_length {length!r}; it has to be a whole number from 3 up, "
            "usually 77: correct it or fetch the file again"
        )
    encoder = name.replace("tokenizer", "text_encoder")
    config = folder / encoder / "config.json"
    if not parts.get(encoder, ("", ""))[1].startswith("CLIPText") or not config.is_file():
        return
    room = read_json(config, f"the configuration of {encoder}").get("max_position_embeddings", 77)
    if type(room) is int and room < length:
        raise CheckpointError(
            f"the configuration of {encoder} has max_position_embeddings {room}, but {name} makes "
            f"{length} tokens of every prompt (model_max_length); one of {config} and {path} is "
            "wrong: fetch both again"
        )


def _check_tokenizer(place: Path, name: str) -> None:
    """A vocabulary is there, in any of the forms that tokenizers are saved in."""
    if any(all((place / file).is_file() for file in choice) for choice in _TOKENIZER_CHOICES):
        for file in ("tokenizer.json", "vocab.json", "tokenizer_config.json"):
            if (place / file).is_file():
                read_json(place / file, f"part of {name}")
        return
    # name what would complete a half-copied vocabulary, else the single-file form
    pair = next(
        (c for c in _TOKENIZER_CHOICES[1:2] if any((place / f).is_file() for f in c)),
        _TOKENIZER_CHOICES[0],
    )
    lost = [file for file in pair if not (place / file).is_file()]
    raise CheckpointError(
        f"the tokenizer {name!r} is incomplete: {place / lost[0]} is missing; {place.name}/ "
        f"holds: {neighbours(place)}; fetch it again"
    )


def _needs_weights(library: str, class_name: str) -> bool:
    """Whether a component of the index is a module of a library whose file names are known."""
    light = ("Tokenizer", "Scheduler", *_SMALL_FILES)
    return library in LIBRARIES and not any(word in class_name for word in light)


def _public(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("_")}
