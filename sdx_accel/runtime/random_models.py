"""Pipelines of public architectures with seeded random weights, so that memory and speed can be
checked on any machine without a download. The pictures are noise; the bytes are always the same.
"""

from __future__ import annotations

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sdx_accel.runtime.architectures import architecture
from sdx_accel.runtime.descriptions import ComponentDescription
from sdx_accel.runtime.meta_models import meta_component
from sdx_accel.runtime.offline_tokenizer import build_tokenizer

__all__ = ["build_random", "build_random_component", "draw_weights"]

_EMBEDDING_STD = 0.02
_BIAS_STD = 0.02
# a little away from 1, so that code which forgets a norm's weight gives another picture
_NORM_STD = 0.05


def build_random(spec: str, dtype: Any, *, seed: int = 0) -> Any:
    """A complete pipeline on the CPU with random weights and an offline tokenizer.

    Every weight depends on `seed`, component and parameter name only: not on order, threads, dtype
    (one rounding apart) or processor. `random:sdxl-fp16vae` has the very weights of `random:sdxl`.

    Args:
        spec: one of `architectures.RANDOM_SPECS`.
        dtype: `torch.dtype` of all modules.
        seed: another number gives another model.

    Returns:
        A `diffusers.DiffusionPipeline` in evaluation mode, safety checker off.

    Raises:
        CheckpointError: no such spec.
    """
    import diffusers

    description = architecture(spec)
    parts: dict[str, Any] = {
        name: build_random_component(component, dtype, seed=seed)
        for name, component in description.components.items()
    }
    scheduler_name, scheduler_config = description.scheduler
    parts["scheduler"] = getattr(diffusers, scheduler_name).from_config(scheduler_config)
    vocabulary = description.components["text_encoder"].config["vocab_size"]
    parts["tokenizer"] = build_tokenizer(vocabulary)
    if description.pipeline_class == "StableDiffusionXLPipeline":
        vocabulary = description.components["text_encoder_2"].config["vocab_size"]
        parts["tokenizer_2"] = build_tokenizer(vocabulary, pad_token="!")
        # the invisible watermark needs a package that is no dependency of ours
        parts["add_watermarker"] = False
    else:
        parts.update(safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    return getattr(diffusers, description.pipeline_class)(**parts)


def build_random_component(component: ComponentDescription, dtype: Any, *, seed: int = 0) -> Any:
    """One module of `build_random`; peak memory is the module plus one fp32 tensor a thread."""

    module = meta_component(component)
    kinds = _parameter_kinds(module)
    names = [name for name, _ in module.named_parameters()]
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}

    def draw(name: str) -> Any:
        key = f"{seed}/{component.name}/{_stable_name(name)}"
        return draw_weights(tuple(shapes[name]), kinds[name], key).to(dtype)

    # torch draws on one core and lets the others run: threads over tensors, the largest first
    order = sorted(names, key=lambda name: -shapes[name].numel())
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        state = dict(zip(order, pool.map(draw, order), strict=True))
    module.load_state_dict(state, strict=False, assign=True)
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            _fill_buffer(module, name, buffer)
    return module.eval()


def _stable_name(name: str) -> str:
    """Parameter name without the level that transformers 5 dropped from its text encoders."""
    return name.removeprefix("text_model.")


def _parameter_kinds(module: Any) -> dict[str, str]:
    """Parameter name → ``"embedding"``, ``"norm"``, ``"bias"`` or ``"weight"``."""
    import torch

    kinds = {}
    for prefix, child in module.named_modules():
        for leaf, _ in child.named_parameters(recurse=False):
            if leaf == "bias":
                kind = "bias"
            elif isinstance(child, torch.nn.Embedding):
                kind = "embedding"
            elif "Norm" in type(child).__name__:
                kind = "norm"
            else:
                kind = "weight"
            kinds[f"{prefix}.{leaf}" if prefix else leaf] = kind
    return kinds


def draw_weights(shape: tuple[int, ...], kind: str, key: str) -> Any:
    """Uniform fp32 values of the kind's mean and deviation from a generator seeded by `key`.

    Uniform, not normal: torch's normal deviates differ in the last bit between instruction sets,
    while a uniform one is an integer × 2⁻²⁴, and each step below is one exactly rounded operation.
    """
    import torch

    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
    generator = torch.Generator(device="cpu").manual_seed(seed)
    values = torch.empty(shape, dtype=torch.float32).uniform_(generator=generator)
    values.mul_(2.0).sub_(1.0)  # exact; standard deviation 1/√3
    if kind == "weight":
        # variance-preserving: activations stay near 1 however deep the model
        std = 1.0 / math.sqrt(max(1, math.prod(shape[1:])))
    else:
        std = {"embedding": _EMBEDDING_STD, "bias": _BIAS_STD, "norm": _NORM_STD}[kind]
    values.mul_(std * math.sqrt(3.0))
    return values.add_(1.0) if kind == "norm" else values


def _fill_buffer(module: Any, name: str, buffer: Any) -> None:
    """Replace a meta buffer by its real value; position numbers are the only kind there is."""
    import torch

    parent_name, _, leaf = name.rpartition(".")
    if leaf != "position_ids":
        raise AssertionError(f"no rule for the buffer {name} of {type(module).__name__}")
    values = torch.arange(buffer.shape[-1], dtype=buffer.dtype).expand(buffer.shape)
    module.get_submodule(parent_name)._buffers[leaf] = values
