"""Names inside LoRA files: which layer of a pipeline each tensor belongs to, and whether it fits.

Reads headers only. kohya: ``lora_unet_<module>.lora_down.weight`` with underscores for dots, module
names of diffusers or of the original SDXL layout. diffusers: ``unet.<module>.lora_A.weight`` and
the older spellings of the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sdx_accel.runtime.checkpoint_files import Header

__all__ = ["Pair", "find_pairs"]

_KOHYA_PREFIXES = {
    "lora_unet_": "unet",
    "lora_te_": "text_encoder",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
}
# role suffixes, longest first; "down" is A (rank × in), "up" is B (out × rank)
_ROLES = (
    (".lora_linear_layer.down.weight", "down"),
    (".lora_linear_layer.up.weight", "up"),
    (".lora_down.weight", "down"),
    (".lora_up.weight", "up"),
    (".lora.down.weight", "down"),
    (".lora.up.weight", "up"),
    (".lora_A.weight", "down"),
    (".lora_B.weight", "up"),
    ("_lora.down.weight", "down"),
    ("_lora.up.weight", "up"),
    (".alpha", "alpha"),
)


@dataclass(frozen=True)
class Pair:
    """The tensors of one layer.

    Attributes:
        component: the pipeline's attribute.
        module: the layer's path in it.
        down: the file's name for A (rank × in).
        up: the file's name for B (out × rank).
        alpha: the file's name for alpha, or None: then alpha is the rank.
        rank: of the low-rank pair.
        mismatch: None, or how the sizes differ from the layer's.
    """

    component: str
    module: str
    down: str
    up: str
    alpha: str | None
    rank: int
    mismatch: str | None

    @property
    def tensors(self) -> int:
        """How many of the file's keys it accounts for."""
        return 2 if self.alpha is None else 3


def find_pairs(pipe: Any, header: Header) -> tuple[list[Pair], int]:
    """(layers that the file changes, number of LoRA tensors in the file).

    Args:
        pipe: the pipeline to match against; only its module names and shapes are read.
        header: of the LoRA file.
    """
    groups: dict[str, dict[str, str]] = {}
    for name in header.tensors:
        for suffix, role in _ROLES:
            if name.endswith(suffix):
                groups.setdefault(name.removesuffix(suffix), {})[role] = name
                break
    total = sum(len(roles) for roles in groups.values())
    layers = _Layers(pipe)
    pairs = []
    for base, roles in groups.items():
        if "down" not in roles or "up" not in roles:
            continue
        found = layers.find(base)
        if found is None:
            continue
        component, path, module = found
        down, up = header.tensors[roles["down"]].shape, header.tensors[roles["up"]].shape
        mismatch = _mismatch(module, down, up)
        pairs.append(
            Pair(
                component,
                path,
                roles["down"],
                roles["up"],
                roles.get("alpha"),
                down[0] if down else 0,
                mismatch,
            )
        )
    return pairs, total


class _Layers:
    """The layers of a pipeline by every spelling that a LoRA file may use for them."""

    def __init__(self, pipe: Any) -> None:
        self._by_component: dict[str, dict[str, tuple[str, Any]]] = {}
        for component in ("unet", "text_encoder", "text_encoder_2", "transformer"):
            root = getattr(pipe, component, None)
            if root is None:
                continue
            known = self._by_component[component] = {}
            for path, module in root.named_modules():
                if getattr(module, "weight", None) is None:
                    continue
                # peft moves the layer below base_layer once it carries an adapter
                path = path.removesuffix(".base_layer")
                known[_flat(path)] = (path, module)
        unet = getattr(pipe, "unet", None)
        self._blocks = _sgm_blocks(unet.config) if unet is not None else []

    def find(self, base: str) -> tuple[str, str, Any] | None:
        """(component, path, module) for the part of a tensor's name before its role."""
        prefix = next((p for p in _KOHYA_PREFIXES if base.startswith(p)), None)
        if prefix is not None:
            component, rest = _KOHYA_PREFIXES[prefix], base.removeprefix(prefix)
        else:
            component, _, rest = base.partition(".")
        known = self._by_component.get(component)
        if known is None:
            return None
        for spelling in self._spellings(_flat(rest)):
            if spelling in known:
                return (component, *known[spelling])
        return None

    def _spellings(self, flat: str) -> list[str]:
        """The name itself, without older wrappers, and translated from the original layout."""
        names = [flat]
        plain = flat.replace("_processor_", "_")
        # older files say to_out where the layer is to_out.0
        names += [plain, f"{plain}_0"]
        # transformers 5 dropped one level of its text encoders
        names.append(flat.removeprefix("text_model_"))
        names.append(f"text_model_{flat}")
        for original, ours in self._blocks:
            if flat.startswith(original):
                names.append(ours + flat.removeprefix(original))
        return names


def _sgm_blocks(config: Any) -> list[tuple[str, str]]:
    """Flat prefixes of blocks: the original layout's numbering → diffusers'.

    The original counts conv_in, every resnet (with its attention) and every downsampler; an
    upsampler is the last part of the block it follows.
    """
    if "block_out_channels" not in config:
        return []
    depth = len(config["block_out_channels"])
    layers = config["layers_per_block"]
    counts = [layers] * depth if isinstance(layers, int) else list(layers)
    blocks = [("middle_block_1_", "mid_block_attentions_0_")]
    blocks += _resnet("middle_block_0_", "mid_block_resnets_0_")
    blocks += _resnet("middle_block_2_", "mid_block_resnets_1_")
    position = 1
    for level in range(depth):
        ours = f"down_blocks_{level}_"
        for layer in range(counts[level]):
            blocks.append((f"input_blocks_{position}_1_", f"{ours}attentions_{layer}_"))
            blocks += _resnet(f"input_blocks_{position}_0_", f"{ours}resnets_{layer}_")
            position += 1
        blocks.append((f"input_blocks_{position}_0_op", f"{ours}downsamplers_0_conv"))
        position += 1
    position = 0
    for level in range(depth):
        ours = f"up_blocks_{level}_"
        for layer in range(counts[depth - 1 - level] + 1):
            blocks.append((f"output_blocks_{position}_1_", f"{ours}attentions_{layer}_"))
            blocks += _resnet(f"output_blocks_{position}_0_", f"{ours}resnets_{layer}_")
            position += 1
        for part in (1, 2):
            blocks.append((f"output_blocks_{position - 1}_{part}_conv", f"{ours}upsamplers_0_conv"))
    return blocks


def _resnet(original: str, ours: str) -> list[tuple[str, str]]:
    """Prefixes of one resnet's layers in both layouts."""
    names = {
        "in_layers_2": "conv1",
        "emb_layers_1": "time_emb_proj",
        "out_layers_3": "conv2",
        "skip_connection": "conv_shortcut",
    }
    return [(original + theirs, ours + name) for theirs, name in names.items()]


def _flat(path: str) -> str:
    return re.sub(r"\.", "_", path)


def _mismatch(module: Any, down: tuple[int, ...], up: tuple[int, ...]) -> str | None:
    """How a low-rank pair's sizes differ from the layer's, or None."""
    if module.weight.ndim < 2:
        return "is no linear or convolution layer, which is all that a LoRA can change"
    if len(down) < 2 or len(up) < 2:
        return (
            f"has weights of shapes {list(down)} and {list(up)} in the file, which are no matrices"
        )
    outputs, inputs = module.weight.shape[0], module.weight.shape[1]
    if down[1] != inputs or up[0] != outputs:
        return f"is {inputs} → {outputs} here and {down[1]} → {up[0]} in the file"
    if up[1] != down[0]:
        return f"has ranks {down[0]} and {up[1]}, which contradict each other"
    return None
