"""Loading a diffusers folder: checked first, then component by component, offline."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.checkpoint_files import read_header, read_json
from sdx_accel.runtime.checkpoint_folders import INDEX, Weights, check_folder, read_index
from sdx_accel.runtime.descriptions import ComponentDescription
from sdx_accel.runtime.meta_models import component_class, meta_component, public_config

__all__ = [
    "dtype_argument",
    "first_line",
    "fit_tokenizers",
    "load_folder",
    "load_module",
    "quiet_libraries",
]


def load_folder(folder: Path, dtype: Any, *, allow_pickle: bool = False) -> Any:
    """A pipeline on the CPU from a diffusers folder.

    Args:
        folder: has a model_index.json.
        dtype: `torch.dtype` of all modules.
        allow_pickle: accept .bin weights.

    Raises:
        CheckpointError: something is missing, broken or does not fit together.
    """
    import diffusers
    import torch

    weights = check_folder(folder, half=dtype is torch.float16, allow_pickle=allow_pickle)
    class_name, parts = read_index(folder)
    pipeline_class = getattr(diffusers, class_name, None)
    if pipeline_class is None:
        raise CheckpointError(
            f"{folder} is a {class_name}, which diffusers {diffusers.__version__} does not have"
        )
    _check_parts(folder, class_name, pipeline_class, parts)
    extra = {}
    if class_name.startswith("StableDiffusion") and "safety_checker" in _arguments(pipeline_class):
        extra = {"safety_checker": None, "requires_safety_checker": False}
    with quiet_libraries():
        # the largest first, so that its temporary pages are gone before the others arrive
        order = sorted(weights, key=lambda name: -sum(size for _, size in weights[name].files))
        modules = {
            name: load_module(folder / name, name, *parts[name], weights[name], dtype)
            for name in order
        }
        try:
            pipe = pipeline_class.from_pretrained(
                str(folder), local_files_only=True, **{dtype_argument(): dtype}, **modules, **extra
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{folder} cannot be loaded: {first_line(error)}") from error
    fit_tokenizers(pipe)
    return pipe


def _check_parts(
    folder: Path, class_name: str, pipeline_class: Any, parts: dict[str, tuple[str, str]]
) -> None:
    """The index lists what its pipeline class is made of, no more and no less."""
    optional = {*getattr(pipeline_class, "_optional_components", ()), "safety_checker"}
    known = inspect.signature(pipeline_class.__init__).parameters
    needed = {
        name
        for name, parameter in known.items()
        if name != "self" and parameter.default is parameter.empty and name not in optional
    }
    wrong = [
        f"{verb} {', '.join(sorted(names))}"
        for verb, names in (
            ("has no use for", parts.keys() - known.keys()),
            ("also needs", needed - parts.keys()),
        )
        if names
    ]
    if wrong:
        raise CheckpointError(
            f"{folder / INDEX} does not fit its pipeline class: a {class_name} "
            f"{' and '.join(wrong)}; correct _class_name or fetch the model again"
        )


def fit_tokenizers(pipe: Any) -> None:
    """Give tokenizers that know no length of their own that of their text encoder.

    Diffusers pads every prompt to it, and transformers' stand-in for "not known" is 1e30.
    """
    for name, tokenizer in pipe.components.items():
        if not name.startswith("tokenizer") or tokenizer is None:
            continue
        encoder = getattr(pipe, name.replace("tokenizer", "text_encoder"), None)
        room = getattr(getattr(encoder, "config", None), "max_position_embeddings", None)
        if isinstance(room, int) and tokenizer.model_max_length > room:
            tokenizer.model_max_length = room


def load_module(
    folder: Path, name: str, library: str, class_name: str, weights: Weights, dtype: Any
) -> Any:
    """One component with its weights; missing or misshapen ones are an error, not a warning."""
    cls = component_class(ComponentDescription(name, library, class_name, {}))
    pickled = weights.files[0][0].suffix != ".safetensors"
    options: dict[str, Any] = {
        "variant": weights.variant,
        "use_safetensors": not pickled,
        "local_files_only": True,
        "output_loading_info": True,
        (dtype_argument() if library == "diffusers" else "dtype"): dtype,
    }
    try:
        module, info = cls.from_pretrained(str(folder), **options)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
        config = public_config(read_json(folder / "config.json", f"the configuration of {name}"))
        component = ComponentDescription(name, library, class_name, config)
        cause = _misshapen(component, weights) or _without_options(first_line(error))
        raise CheckpointError(
            f"the weights of {name} in {folder} do not fit its configuration: {cause}; the files "
            "belong to different models or are damaged: fetch them again"
        ) from error
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise CheckpointError(
            f"{len(missing)} weights of {name} are not in {folder} (the first: {missing[0]}); "
            "the files belong to another model or are incomplete"
        )
    return module.eval()


def _misshapen(component: ComponentDescription, weights: Weights) -> str | None:
    """Which tensor has which shape instead of which; None where every one of them fits."""
    state = meta_component(component).state_dict()
    # transformers 5 dropped a level of the names that older files of text encoders have
    shapes = {key.removeprefix("text_model."): tuple(value.shape) for key, value in state.items()}
    for path, _ in weights.files:
        if path.suffix != ".safetensors":
            continue
        for key, tensor in read_header(path).tensors.items():
            expected = shapes.get(key.removeprefix("text_model."), tensor.shape)
            if expected != tensor.shape:
                return f"{key} should be {list(expected)} and is {list(tensor.shape)}"
    return None


def _without_options(text: str) -> str:
    """A host's sentence, unless it advises arguments that nobody can give here."""
    options = ("low_cpu_mem_usage", "ignore_mismatched_sizes", "from_pretrained")
    return "their shapes differ" if any(option in text for option in options) else text


def dtype_argument() -> str:
    """What this diffusers calls the dtype of a loader; 0.42 deprecates the longer name."""
    import diffusers
    from packaging.version import Version

    return "dtype" if Version(diffusers.__version__) >= Version("0.42") else "torch_dtype"


def _arguments(pipeline_class: Any) -> set[str]:
    return set(inspect.signature(pipeline_class.__init__).parameters)


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, without its stack of details."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """diffusers' and transformers' progress bars and warnings off, and as they were afterwards.

    Ours checks the same things first and says them in one line.
    """
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    restore = []
    for library in (diffusers_logging, transformers_logging):
        bar = library.is_progress_bar_enabled()
        restore.append((library, library.get_verbosity(), bar))
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, level, bar in restore:
            library.set_verbosity(level)
            if bar:
                library.enable_progress_bar()
