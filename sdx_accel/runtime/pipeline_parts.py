"""The models of a pipeline, one by one: what a budget places and a description lists.

Knows how diffusers nests several ControlNets or T2I-Adapters; nothing of files, plans or devices.
"""

from __future__ import annotations

from typing import Any

__all__ = ["numbered", "pipeline_models"]

# modules around several models of one kind, and where they keep them
_NESTED = {"MultiControlNetModel": "nets", "MultiAdapter": "adapters"}


def numbered(name: str, index: int) -> str:
    """``name``, ``name_2``, ``name_3``, … as pipelines number their text encoders."""
    return name if index == 0 else f"{name}_{index + 1}"


def pipeline_models(pipe: Any) -> dict[str, Any]:
    """The modules that have a configuration, by name, in the pipeline's order.

    Several ControlNets are listed singly, as ``controlnet``, ``controlnet_2``, …: each is loaded
    from a place of its own, and the module around them holds no weights. So are T2I-Adapters.

    Args:
        pipe: a `diffusers.DiffusionPipeline`; it is only read.
    """
    import torch

    found = {}
    for name, module in pipe.components.items():
        if not isinstance(module, torch.nn.Module):
            continue
        inner = getattr(module, "_orig_mod", module)
        held = _NESTED.get(type(inner).__name__)
        nets = None if held is None else getattr(inner, held)
        for index, part in enumerate([module] if nets is None else nets):
            # torch.compile wraps a module; the original holds class and configuration
            if hasattr(getattr(part, "_orig_mod", part), "config"):
                found[numbered(name, index)] = part
    return found
