"""T2I-Adapters in a plan: what they compute, and what of it lives through the rest of a picture.

One runs once before the denoise; what it found in its picture is added to the UNet's blocks at
each step. Knows modules on the meta device and sizes; nothing of descriptions, plans or files.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["ADAPTER", "adapter_call", "adapter_names", "features_of", "pictures_of"]

#: the class of one of them; several stand in a module that holds no weights of its own
ADAPTER = "T2IAdapter"


def adapter_names(components: Iterable[str]) -> list[str]:
    """Those of a pipeline's components, in its order: ``adapter``, ``adapter_2``, …"""
    return [name for name in components if name.startswith("adapter")]


def pictures_of(adapters: Sequence[Any], size: tuple[int, int], batch: int) -> list[torch.Tensor]:
    """The pictures that they look at, (batch, channels, height, width) each, without storage.

    Args:
        adapters: on the meta device.
        size: height and width in pixels.
        batch: pictures at once.
    """
    return [
        torch.empty(
            (batch, adapter.config.in_channels, *size),
            dtype=next(adapter.parameters()).dtype,
            device="meta",
        )
        for adapter in adapters
    ]


def adapter_call(
    adapters: Sequence[Any], pictures: Sequence[torch.Tensor], guided: bool
) -> Callable[[], list[torch.Tensor]]:
    """What a pipeline does before its loop, as a call.

    Args:
        adapters: on the meta device.
        pictures: one for each of them.
        guided: whether the features are doubled for two predictions.

    Returns:
        A function that gives the features of all, one tensor for each of the UNet's levels.
    """
    if len(adapters) == 1:
        whole: Any = adapters[0]
        arguments: tuple[Any, ...] = (pictures[0],)
    else:
        from diffusers.models.adapter import MultiAdapter

        # what the pipelines put around several; around one they put nothing
        whole = MultiAdapter(list(adapters))
        arguments = (list(pictures), None)

    def call() -> list[torch.Tensor]:
        features: list[torch.Tensor] = whole(*arguments)
        for level, feature in enumerate(features):
            # one at a time takes the place of its original: the list is the pipeline's own
            features[level] = feature * 1.0
        if guided:
            for level, feature in enumerate(features):
                features[level] = torch.cat([feature] * 2)
        return features

    return call


def features_of(
    adapters: Sequence[Any], pictures: Sequence[torch.Tensor], guided: bool
) -> list[torch.Tensor]:
    """The features that live from the adapters' call to the end of the picture."""
    if not adapters:
        return []
    with torch.no_grad():
        found = adapter_call(adapters, pictures, guided)()
    return [torch.empty_like(feature) for feature in found]
