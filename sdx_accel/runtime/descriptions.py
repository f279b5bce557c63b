"""What a model is, without its weights: plain data that the planner and the command line read.

Knows nothing of files, torch or diffusers; everything here is JSON-able and compares by value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sdx_accel.runtime.denoisers import transformer_of

__all__ = ["ComponentDescription", "ModelDescription", "jsonable"]


def jsonable(value: Any) -> Any:
    """The same value made of dict, list, str, int, float, bool and None only.

    Tuples become lists, so that a configuration read from a file and one read from a live module
    compare equal. Anything else (a torch dtype, an enum) becomes its text.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    return str(value)


@dataclass(frozen=True)
class ComponentDescription:
    """One module of a pipeline.

    Attributes:
        name: the pipeline's attribute, for instance ``"text_encoder_2"``.
        library: ``"diffusers"`` or ``"transformers"``: where `class_name` is imported from.
        class_name: for instance ``"UNet2DConditionModel"``.
        config: the class's configuration; keys that are left out have the class's defaults.
        adapters: what was added to the module, in order; see `adapter_twins`.
    """

    name: str
    library: str
    class_name: str
    config: dict[str, Any]
    adapters: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class ModelDescription:
    """A pipeline's architecture, read from configurations only.

    Attributes:
        source: what the user named, for instance ``"random:sdxl"`` or a folder.
        pipeline_class: for instance ``"StableDiffusionXLPipeline"``.
        components: the modules by name, in the pipeline's order; tokenizers are not listed.
        default_dtype: dtype of the stored weights (files) or of the modules (live pipeline),
            ``"float16"`` for random specs and wherever it is unknown.
        default_height: pixels, used when the user gives no size.
        default_width: pixels.
        scheduler: class name and configuration.
        weight_files: per component, (path, bytes) of each local weight file; the key ``""`` is
            one file that holds all components. Empty where no weights are on this disk.
    """

    source: str
    pipeline_class: str
    components: dict[str, ComponentDescription]
    default_dtype: str
    default_height: int
    default_width: int
    scheduler: tuple[str, dict[str, Any]]
    weight_files: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    @property
    def embeds_guidance(self) -> bool:
        """Whether the strength of guidance asks for no second run.

        It is an input of whole LCM models and of Flux, whose distilled models have none at all.
        """
        transformer = transformer_of(self.components)
        if transformer is not None:
            return transformer.guidance == "in turn"
        unet = self.components.get("unet")
        return unet is not None and unet.config.get("time_cond_proj_dim") is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` is the inverse."""
        return dict(jsonable(asdict(self)))

    def to_json(self) -> str:
        """`to_dict` as text, keys sorted, so that equal descriptions give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelDescription:
        """Rebuild from `to_dict`'s result."""
        values = dict(data)
        values["components"] = {
            name: ComponentDescription(**dict(component))
            for name, component in values["components"].items()
        }
        class_name, config = values["scheduler"]
        values["scheduler"] = (class_name, dict(config))
        values["weight_files"] = {
            name: [(path, size) for path, size in files]
            for name, files in values.get("weight_files", {}).items()
        }
        return cls(**values)
