"""From descriptions to modules without weights, and from live pipelines back to descriptions.

Knows diffusers' and transformers' classes; reads no files and never allocates a weight.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

from sdx_accel.errors import CheckpointError
from sdx_accel.runtime.adapter_twins import add_adapters, read_adapters
from sdx_accel.runtime.denoisers import denoiser_name, latent_side
from sdx_accel.runtime.descriptions import ComponentDescription, ModelDescription, jsonable
from sdx_accel.runtime.pipeline_parts import pipeline_models
from sdx_accel.runtime.shipped import name_of

__all__ = [
    "check_values",
    "component_class",
    "default_size",
    "describe_pipeline",
    "in_fp32",
    "meta_component",
    "public_config",
]

# a description may come from a downloaded file: nothing else is ever imported because of it
LIBRARIES = ("diffusers", "transformers")
_FALLBACK_SIZE = 512
# start, end and a few words; CLIP has room for 77 tokens, the demo model's encoders for 24
_FEWEST_TOKENS, _USUAL_TOKENS = 8, 77


def component_class(component: ComponentDescription) -> Any:
    """The class that a description names.

    Raises:
        CheckpointError: not a class of diffusers or transformers, or not of this version.
    """
    if component.library not in LIBRARIES:
        raise CheckpointError(
            f"{component.name} wants {component.library}.{component.class_name}; only classes of "
            f"{' and '.join(LIBRARIES)} are loaded"
        )
    found = getattr(importlib.import_module(component.library), component.class_name, None)
    if not isinstance(found, type):
        version = importlib.import_module(component.library).__version__
        raise CheckpointError(
            f"{component.name} wants {component.library}.{component.class_name}, which "
            f"{component.library} {version} does not have; a newer {component.library} may"
        )
    return found


def check_values(component: ComponentDescription) -> None:
    """Refuse numbers that a module can be built with, but that no picture can be made with.

    Raises:
        CheckpointError: naming the component, the value and what it has to be.
    """
    # in transformers such as Flux, null means the same as in_channels
    keys = ("in_channels", "out_channels", "latent_channels")
    for key in keys if component.name in ("unet", "vae") else ():
        value = component.config.get(key, 1)
        if type(value) is not int or value < 1:
            raise _senseless(component, key, "a whole number above 0")
    room = component.config.get("max_position_embeddings", _USUAL_TOKENS)
    if component.class_name.startswith("CLIPText") and (
        type(room) is not int or room < _FEWEST_TOKENS
    ):
        raise _senseless(
            component,
            "max_position_embeddings",
            f"{_FEWEST_TOKENS} or more, usually {_USUAL_TOKENS}, the tokens of a prompt",
        )
    # latents are divided by it
    value = component.config.get("scaling_factor", 1.0)
    if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
        raise _senseless(component, "scaling_factor", "a number above 0")


def _senseless(component: ComponentDescription, key: str, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"the configuration of {component.name} has {key} {component.config.get(key)!r}; it has to "
        f"be {wanted}: fetch its config.json again"
    )


def meta_component(component: ComponentDescription, dtype: str = "float32") -> Any:
    """The module on torch's meta device: every shape and no storage, in about 0.1–1 s.

    Args:
        component: which class and configuration, and the adapters on it.
        dtype: name of the parameters' dtype, for instance ``"float16"``.

    Returns:
        `torch.nn.Module` in evaluation mode, all parameters and buffers on the meta device.

    Raises:
        CheckpointError: the class is unknown, or refuses the configuration.
    """
    import torch

    cls = component_class(component)
    try:
        with torch.device("meta"):
            if component.library == "transformers":
                module = cls(cls.config_class(**component.config))
            else:
                module = cls.from_config(component.config)
    except Exception as error:
        # any value of a file may be wrong, and the hosts divide by, index with and allocate them
        text = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"the configuration of {component.name} does not fit {component.class_name}: {text}"
        ) from error
    add_adapters(module, component.adapters)
    kept = (
        []
        if dtype != "float16"
        else [p for n, p in module.named_parameters() if in_fp32(module, n)]
    )
    # diffusers' own .to() prints a warning about mixed dtypes that does not apply without weights
    torch.nn.Module.to(module, getattr(torch, dtype))
    for parameter in kept:
        parameter.data = parameter.data.float()
    return module.eval()


def in_fp32(module: Any, name: str) -> bool:
    """Whether a parameter stays in fp32 when the model is loaded in fp16, where it overflows.

    T5's `wo` does: 1.9 GiB more for the encoder of SD 3.
    """
    kept = getattr(type(module), "_keep_in_fp32_modules", None) or ()
    return any(part in kept for part in name.split("."))


def public_config(config: Any) -> dict[str, Any]:
    """A module's configuration as plain data, without the libraries' private bookkeeping."""
    values = config if isinstance(config, Mapping) else config.to_dict()
    return {
        str(key): jsonable(value)
        for key, value in values.items()
        if not str(key).startswith("_") and key not in ("transformers_version", "dtype")
    }


def default_size(components: Mapping[str, ComponentDescription]) -> tuple[int, int]:
    """(height, width) in pixels that the denoiser was made for: its latent size × the VAE's factor.

    512 × 512 where the configurations do not say.
    """
    denoiser = components.get(denoiser_name(components) or "")
    sample = latent_side(denoiser)
    if sample is None:
        return _FALLBACK_SIZE, _FALLBACK_SIZE
    factor = 8
    if "vae" in components and "block_out_channels" in components["vae"].config:
        channels = components["vae"].config["block_out_channels"]
        if not isinstance(channels, (list, tuple)) or not channels:
            raise _senseless(components["vae"], "block_out_channels", "a list of whole numbers")
        factor = 2 ** (len(channels) - 1)
    sides = sample if isinstance(sample, (list, tuple)) else (sample, sample)
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise CheckpointError(
            f"the configuration of {denoiser.name if denoiser else 'unet'} has sample_size "
            f"{sample!r}; it has to be a whole number above 0"
        )
    height, width = sides
    return height * factor, width * factor


def describe_pipeline(pipe: Any) -> ModelDescription:
    """A live pipeline's architecture, read from its modules' configurations.

    Args:
        pipe: a `diffusers.DiffusionPipeline`; it is only read.
    """
    import torch

    components = {}
    dtypes = {}
    for name, module in pipeline_models(pipe).items():
        # torch.compile wraps a module; the original holds class and configuration
        module = getattr(module, "_orig_mod", module)
        library = type(module).__module__.split(".")[0]
        components[name] = ComponentDescription(
            name,
            library,
            type(module).__name__,
            public_config(module.config),
            read_adapters(module),
        )
        floating = (p.dtype for p in module.parameters() if p.is_floating_point())
        dtypes[name] = str(next(floating, torch.float32)).removeprefix("torch.")
    main = next((name for name in ("unet", "transformer") if name in dtypes), None)
    height, width = default_size(components)
    scheduler = getattr(pipe, "scheduler", None)
    return ModelDescription(
        source=name_of(str(getattr(pipe.config, "_name_or_path", None) or type(pipe).__name__)),
        pipeline_class=type(pipe).__name__,
        components=components,
        default_dtype=dtypes[main] if main else next(iter(dtypes.values()), "float16"),
        default_height=height,
        default_width=width,
        scheduler=(type(scheduler).__name__, public_config(scheduler.config))
        if scheduler is not None
        else ("", {}),
    )
