"""A model with everything that is added to it, as one description that can be planned.

Knows in which order things are added; loads no weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sdx_accel.runtime.controlnets import with_controlnets
from sdx_accel.runtime.descriptions import ModelDescription
from sdx_accel.runtime.ip_adapters import with_ip_adapters
from sdx_accel.runtime.loras import require_peft, with_loras
from sdx_accel.runtime.refiner import with_refiner
from sdx_accel.runtime.textual_inversion import with_embeddings

__all__ = ["assembled"]


def assembled(
    description: ModelDescription,
    *,
    loras: Sequence[str | os.PathLike[str]] = (),
    embeddings: Sequence[str] = (),
    ip_adapters: Sequence[str] = (),
    refiner: str | None = None,
    controlnets: Sequence[str] = (),
    kind: str = "text",
) -> ModelDescription:
    """The description of a model with adapters, ControlNets and a refiner.

    Args:
        description: the model's own.
        loras: files, or folders with one .safetensors file, in the order of loading.
        embeddings: textual inversions.
        ip_adapters: files, or `random:ip-adapter`.
        refiner: folder, hub id or random spec.
        controlnets: folders, hub ids or `random:controlnet`.
        kind: `text`, `image` or `inpaint`: what the pictures are made from.

    Raises:
        CheckpointError: something is missing, broken, or was made for another model.
        RefusedError: the model does not take it.
    """
    if loras:
        require_peft()
        description = with_loras(description, loras)
    if embeddings:
        description = with_embeddings(description, embeddings)
    if ip_adapters:
        description = with_ip_adapters(description, ip_adapters)
    if refiner is not None:
        description = with_refiner(description, refiner)
    if controlnets:
        description = with_controlnets(description, list(controlnets), kind)
    return description
