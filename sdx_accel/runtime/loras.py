"""LoRA files: matched against the pipeline by their headers first, then loaded through peft.

Knows the two layouts in use (kohya's and diffusers'); nothing is changed when one does not fit.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.adapter_twins import lora_entry
from sdx_accel.runtime.checkpoint_files import PICKLE_SUFFIXES, Header, neighbours, read_header
from sdx_accel.runtime.descriptions import ModelDescription
from sdx_accel.runtime.file_kinds import seems_to_be
from sdx_accel.runtime.folder_loading import first_line, quiet_libraries
from sdx_accel.runtime.lora_keys import Pair, find_pairs

__all__ = ["LoraReport", "check_lora_file", "load_loras", "lora_file", "require_peft", "with_loras"]


@dataclass(frozen=True)
class LoraReport:
    """What one LoRA file changed.

    Attributes:
        path: the file.
        adapter: the name it has in the pipeline, for `set_adapters`.
        scale: its strength.
        matched: tensors of the file that found their layer.
        total: LoRA tensors in the file.
        layers: layers changed, by component.
    """

    path: str
    adapter: str
    scale: float
    matched: int
    total: int
    layers: dict[str, int]

    def __str__(self) -> str:
        where = ", ".join(f"{count} in {name}" for name, count in self.layers.items())
        ignored = self.total - self.matched
        rest = f"; {ignored} keys match nothing and are ignored" if ignored else ""
        return f"LoRA {Path(self.path).name} at {self.scale:g}: {where} layers{rest}"


def load_loras(
    pipe: Any, loras: Sequence[tuple[str | os.PathLike[str], float]]
) -> list[LoraReport]:
    """Add LoRA files to a pipeline with their scales, all of them or none.

    A file without alpha entries has the strength of alpha = rank, as everywhere.

    Args:
        pipe: a diffusers pipeline that takes LoRAs.
        loras: (file or folder with one .safetensors file, scale).

    Returns:
        One report per file, in the same order.

    Raises:
        CheckpointError: no such file, broken, made for another model ("matched 0 of N keys"), or
            peft is not installed. The pipeline is then as it was.
    """
    if not loras:
        return []
    if not hasattr(pipe, "load_lora_weights"):
        raise CheckpointError(f"{type(pipe).__name__} takes no LoRA")
    require_peft()
    taken = {name for names in pipe.get_list_adapters().values() for name in names}
    reports, plans = [], []
    for path, scale in loras:
        header, pairs, total = _match(pipe, path)
        adapter = _adapter_name(header.path, taken)
        taken.add(adapter)
        layers: dict[str, int] = {}
        for pair in pairs:
            layers[pair.component] = layers.get(pair.component, 0) + 1
        matched = sum(pair.tensors for pair in pairs)
        reports.append(LoraReport(str(path), adapter, float(scale), matched, total, layers))
        plans.append((header, pairs))
    _load_all(pipe, reports, plans)
    return reports


def with_loras(
    description: ModelDescription, paths: Sequence[str | os.PathLike[str]]
) -> ModelDescription:
    """The description of a model with LoRA files on it, matched against it before it is loaded.

    Args:
        description: the model's.
        paths: files, or folders with one .safetensors file, in the order of loading.

    Raises:
        CheckpointError: as `load_loras`.
    """
    from sdx_accel.runtime.phase_calls import twin

    names = [name for name in description.components if name.startswith(("unet", "text_encoder"))]
    # an architecture without weights has the names and shapes that a file is matched against
    twins = SimpleNamespace(**{name: twin(description, name, "float32") for name in names})
    added: dict[str, list[dict[str, Any]]] = {}
    taken: set[str] = set()
    for path in paths:
        header, pairs, _ = _match(twins, path)
        adapter = _adapter_name(header.path, taken)
        taken.add(adapter)
        for component in dict.fromkeys(pair.component for pair in pairs):
            ranks = {pair.module: pair.rank for pair in pairs if pair.component == component}
            added.setdefault(component, []).append(lora_entry(adapter, ranks))
    components = {
        name: replace(part, adapters=[*part.adapters, *added.get(name, ())])
        for name, part in description.components.items()
    }
    return replace(description, components=components)


def _match(pipe: Any, path: str | os.PathLike[str]) -> tuple[Header, list[Pair], int]:
    """(header, layers it changes, LoRA tensors in it) of a file that fits a pipeline."""
    header = read_header(lora_file(path))
    pairs, total = find_pairs(pipe, header)
    _check_match(header, pairs, total)
    return header, pairs, total


def _load_all(pipe: Any, reports: list[LoraReport], plans: list[tuple[Header, list[Pair]]]) -> None:
    """Load every checked file; on any failure remove those already in."""
    before = pipe.get_active_adapters()
    done: list[str] = []
    try:
        with quiet_libraries():
            for report, (header, pairs) in zip(reports, plans, strict=True):
                done.append(report.adapter)
                _load_one(pipe, report, header, pairs)
            names = [*before, *done]
            scales = [_current_scale(pipe, name) for name in before]
            pipe.set_adapters(names, [*scales, *(report.scale for report in reports)])
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, OSError) as error:
        known = {name for names in pipe.get_list_adapters().values() for name in names}
        if known <= set(done):
            # also takes peft's wrappers off again
            pipe.unload_lora_weights()
        else:
            pipe.delete_adapters([name for name in done if name in known])
            pipe.set_adapters(before)
        path = reports[max(0, len(done) - 1)].path
        raise CheckpointError(f"{path} could not be loaded: {first_line(error)}") from error


def _load_one(pipe: Any, report: LoraReport, header: Header, pairs: list[Pair]) -> None:
    """Load one file at strength alpha ÷ rank and make sure that every matched layer took it."""
    weights, alphas = _tensors(header, pairs)
    pipe.load_lora_weights(weights, adapter_name=report.adapter)
    for (component, path), alpha in alphas.items():
        root = getattr(pipe, component)
        layer = root.get_submodule(path)
        if report.adapter not in getattr(layer, "lora_B", {}):
            raise ValueError(f"{component}.{path} did not take its weights")
        # set_adapters computes the strength from here; the pattern is what gets saved again
        layer.lora_alpha[report.adapter] = alpha
        root.peft_config[report.adapter].alpha_pattern[path] = alpha


def _tensors(
    header: Header, pairs: list[Pair]
) -> tuple[dict[str, Any], dict[tuple[str, str], float]]:
    """(weights under peft's names, alpha by (component, module)).

    Names are written from the layers that were found: diffusers' own translation of kohya files
    misses some layers and gives those without alpha the file's most common one.
    """
    from safetensors import safe_open

    weights: dict[str, Any] = {}
    alphas = {}
    with safe_open(header.path, framework="pt", device="cpu") as file:
        for pair in pairs:
            layer = f"{pair.component}.{pair.module}"
            weights[f"{layer}.lora_A.weight"] = file.get_tensor(pair.down)
            weights[f"{layer}.lora_B.weight"] = file.get_tensor(pair.up)
            alpha = float(file.get_tensor(pair.alpha)) if pair.alpha else float(pair.rank)
            alphas[pair.component, pair.module] = alpha
    return weights, alphas


def _current_scale(pipe: Any, adapter: str) -> float:
    """The strength an adapter has now, read from its first layer."""
    for component in pipe.components.values():
        for module in getattr(component, "modules", list)():
            if adapter in getattr(module, "scaling", {}):
                rank_scale = module.lora_alpha[adapter] / module.r[adapter]
                return float(module.scaling[adapter] / rank_scale) if rank_scale else 1.0
    return 1.0


def _check_match(header: Header, pairs: list[Pair], total: int) -> None:
    """Refuse a file of which nothing fits, or whose layers have another model's sizes."""
    if any(name.endswith(("dora_scale", "lora_magnitude_vector")) for name in header.tensors):
        raise CheckpointError(
            f"{header.path} is a DoRA, which is not built yet; plain LoRA files are"
        )
    if total == 0:
        seems = seems_to_be(header.tensors)
        raise CheckpointError(
            f"--lora {header.path} holds no LoRA: matched 0 of {len(header.tensors)} keys"
            + (f"; it is {seems}" if seems else "")
        )
    fitting = [pair for pair in pairs if pair.mismatch is None]
    if not pairs:
        first = next(iter(header.tensors))
        raise CheckpointError(
            f"{header.path} was made for another kind of model: matched 0 of {total} keys "
            f"(the first is {first!r}); use it with the model it was trained on"
        )
    if len(fitting) < len(pairs):
        bad = next(pair for pair in pairs if pair.mismatch is not None)
        raise CheckpointError(
            f"{header.path} was made for another model: matched "
            f"{sum(pair.tensors for pair in fitting)} of {total} keys; {bad.component}."
            f"{bad.module} {bad.mismatch}"
        )


def check_lora_file(source: str | os.PathLike[str]) -> None:
    """What can be said of a LoRA file before its model is loaded: it is there and whole.

    Raises:
        CheckpointError: missing, broken, a pickle, or a folder without exactly one file.
    """
    read_header(lora_file(source))


def lora_file(source: str | os.PathLike[str]) -> Path:
    """The one LoRA file that a path names.

    Raises:
        CheckpointError: missing, a pickle, or a folder without exactly one file.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise CheckpointError(
                f"--lora {path} is a folder with {len(found)} .safetensors files; name one file "
                f"(it holds: {neighbours(path)})"
            )
        return found[0]
    if not path.exists():
        raise CheckpointError(
            f"--lora {path}: no such file; {path.parent} holds: {neighbours(path.parent)}"
        )
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path} is a pickle, which can run code while it loads; use a .safetensors LoRA"
        )
    return path


def _adapter_name(path: Path, taken: set[str]) -> str:
    """A name that peft accepts (no dots) and that no other adapter has."""
    base = "".join(letter if letter.isalnum() else "_" for letter in path.stem) or "lora"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    return name


def require_peft() -> None:
    """Find out whether LoRA files can be loaded at all; imports nothing.

    Raises:
        CheckpointError: peft is not installed; the message has the command that installs it.
    """
    if importlib.util.find_spec("peft") is None:
        # this very Python: `pip` alone can be another one's
        raise CheckpointError(
            "LoRA files need the package peft, which is not installed: run "
            f"{sys.executable} -m pip install peft"
        )
