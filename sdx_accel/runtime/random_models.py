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
from sdx_accel.runtime.denoisers import LONG_TEXT
from sdx_accel.runtime.descriptions import ComponentDescription
from sdx_accel.runtime.meta_models import in_fp32, meta_component
from sdx_accel.runtime.offline_tokenizer import build_long_tokenizer, build_tokenizer

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
    # with its class, as files have it, by which flow-matching models keep their own scheduler
    parts["scheduler"] = getattr(diffusers, scheduler_name).from_config(
        {"_class_name": scheduler_name, **scheduler_config}
    )
    for name, component in description.components.items():
        if name.startswith("text_encoder"):
            parts[name.replace("text_encoder", "tokenizer")] = _tokenizer(component)
    if description.pipeline_class == "StableDiffusionXLPipeline":
        # the invisible watermark needs a package that is no dependency of ours
        parts["add_watermarker"] = False
    elif description.pipeline_class == "StableDiffusionPipeline":
        parts.update(safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    return getattr(diffusers, description.pipeline_class)(**parts)


def _tokenizer(component: ComponentDescription) -> Any:
    vocabulary = component.config["vocab_size"]
    if component.class_name == LONG_TEXT:
        return build_long_tokenizer(vocabulary)
    if component.name == "text_encoder_2":
        # as SDXL and SD 3 have it
        return build_tokenizer(vocabulary, pad_token="!")
    return build_tokenizer(vocabulary)


def build_random_component(component: ComponentDescription, dtype: Any, *, seed: int = 0) -> Any:
    """One module of `build_random`; peak memory is the module plus one fp32 tensor a thread."""
    import torch

    module = meta_component(component)
    kinds = _parameter_kinds(module)
    names = [name for name, _ in module.named_parameters()]
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    ties = _ties(module)

    def draw(name: str) -> Any:
        key = f"{seed}/{component.name}/{_stable_name(name)}"
        drawn = draw_weights(tuple(shapes[name]), kinds[name], key)
        # as loading does it
        return drawn if dtype == torch.float16 and in_fp32(module, name) else drawn.to(dtype)

    # torch draws on one core and lets the others run: threads over tensors, the largest first
    order = sorted(names, key=lambda name: -shapes[name].numel())
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        state = dict(zip(order, pool.map(draw, order), strict=True))
    module.load_state_dict(state, strict=False, assign=True)
    for other, name in ties.items():
        parent, _, leaf = other.rpartition(".")
        module.get_submodule(parent)._parameters[leaf] = module.get_parameter(name)
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            _fill_buffer(module, name, buffer, dtype)
    return module.eval()


def _ties(module: Any) -> dict[str, str]:
    """Second names of parameters, as T5's token embedding has them, with the first."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties


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


def _fill_buffer(module: Any, name: str, buffer: Any, dtype: Any) -> None:
    """Replace a meta buffer by its real value: position numbers, or waves over a picture."""
    import torch

    parent_name, _, leaf = name.rpartition(".")
    parent = module.get_submodule(parent_name)
    if leaf == "position_ids":
        values = torch.arange(buffer.shape[-1], dtype=buffer.dtype).expand(buffer.shape)
    elif leaf == "pos_embed":
        values = _waves(parent, buffer).to(dtype)
    else:
        raise AssertionError(f"no rule for the buffer {name} of {type(module).__name__}")
    parent._buffers[leaf] = values


def _waves(parent: Any, buffer: Any) -> Any:
    """The fixed position embedding of a transformer's patches, in fp32 as the buffer's shape."""
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    waves = get_2d_sincos_pos_embed(
        buffer.shape[-1],
        math.isqrt(buffer.shape[-2]),
        base_size=parent.base_size,
        interpolation_scale=parent.interpolation_scale,
        output_type="pt",
    )
    return waves.float().reshape(buffer.shape)
