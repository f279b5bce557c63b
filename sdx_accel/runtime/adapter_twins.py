"""What adapters add to a model, as data: read off live modules, built into ones without weights.

Two kinds, each a JSON-able table with `kind`. A `lora` has its `name` and `ranks`, the rank by the
path of each layer that it changes. An `ip_adapter` has `projections`, one for each image prompt:
the class, its `arguments`, and the `tokens` it gives to every cross-attention. Knows peft's and
diffusers' layers; reads no files and never allocates a weight.
"""

from __future__ import annotations

import warnings
from typing import Any

from sdx_accel.errors import RefusedError

__all__ = [
    "PLUS",
    "STANDARD",
    "add_adapters",
    "ip_adapter_entry",
    "ip_projections",
    "lora_entry",
    "read_adapters",
]

#: projections of one pooled vector, and of the image encoder's whole sequence
STANDARD, PLUS = "ImageProjection", "IPAdapterPlusImageProjection"


def lora_entry(name: str, ranks: dict[str, int]) -> dict[str, Any]:
    """The table of a LoRA on one module.

    Args:
        name: of the adapter.
        ranks: by path of the layer.
    """
    return {"kind": "lora", "name": name, "ranks": dict(sorted(ranks.items()))}


def ip_adapter_entry(projections: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of the IP-Adapters on a UNet, which are loaded together.

    Args:
        projections: `class`, `arguments` and `tokens` of each.
    """
    return {"kind": "ip_adapter", "projections": projections}


def ip_projections(adapters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The image projections among a component's adapters."""
    return [p for a in adapters if a["kind"] == "ip_adapter" for p in a["projections"]]


def read_adapters(module: Any) -> list[dict[str, Any]]:
    """What has been added to a live module, in the order in which it was added."""
    ranks: dict[str, dict[str, int]] = {}
    for path, layer in module.named_modules():
        loras: Any = getattr(layer, "lora_A", None)
        if not hasattr(loras, "keys"):
            continue
        for name in loras:
            ranks.setdefault(name, {})[path] = layer.r[name]
    found = [lora_entry(name, layers) for name, layers in ranks.items()]
    layers = getattr(getattr(module, "encoder_hid_proj", None), "image_projection_layers", None)
    if layers is not None:
        found.append(ip_adapter_entry([_read_projection(layer) for layer in layers]))
    # where SD 3 has its one
    if (projection := getattr(module, "image_proj", None)) is not None:
        found.append(ip_adapter_entry([_read_projection(projection)]))
    return found


def _read_projection(layer: Any) -> dict[str, Any]:
    name = type(layer).__name__
    arguments, tokens = {}, 0
    if name == STANDARD:
        tokens = layer.num_image_text_embeds
        arguments = {
            "image_embed_dim": layer.image_embeds.in_features,
            "cross_attention_dim": layer.image_embeds.out_features // tokens,
            "num_image_text_embeds": tokens,
        }
    elif name == PLUS:
        tokens = layer.latents.shape[1]
        arguments = {
            "embed_dims": layer.proj_in.in_features,
            "output_dims": layer.proj_out.out_features,
            "hidden_dims": layer.proj_in.out_features,
            "depth": len(layer.layers),
            "heads": layer.layers[0].attn.heads,
            "num_queries": tokens,
        }
    return {"class": name, "arguments": arguments, "tokens": tokens}


def add_adapters(module: Any, adapters: list[dict[str, Any]]) -> None:
    """Build adapters into a module on the meta device.

    Args:
        module: without weights.
        adapters: tables of this file.

    Raises:
        RefusedError: a kind that is not known.
    """
    for adapter in adapters:
        if adapter["kind"] == "lora":
            _add_lora(module, adapter)
        elif adapter["kind"] == "ip_adapter":
            _add_ip_adapters(module, adapter["projections"])
        else:
            raise RefusedError(f"an adapter of kind {adapter['kind']!r} cannot be planned yet")


def _add_lora(module: Any, adapter: dict[str, Any]) -> None:
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    ranks: dict[str, int] = adapter["ranks"]
    usual = max(ranks.values(), key=list(ranks.values()).count)
    config = LoraConfig(
        r=usual,
        target_modules=list(ranks),
        rank_pattern={path: rank for path, rank in ranks.items() if rank != usual},
        init_lora_weights=False,
    )
    with torch.device("meta"), warnings.catch_warnings():
        # a second LoRA on one model is what was asked for
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        inject_adapter_in_model(config, module, adapter_name=adapter["name"])


def _add_ip_adapters(unet: Any, projections: list[dict[str, Any]]) -> None:
    """What `load_ip_adapter` makes of a UNet, without weights."""
    import torch
    from diffusers.models import embeddings
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    for projection in projections:
        if projection["class"] not in (STANDARD, PLUS):
            raise RefusedError(
                f"a budget for IP-Adapters of the kind {projection['class']} cannot be planned yet "
                f"(built: {STANDARD}, {PLUS}); enable_xattn() without vram works"
            )
    processors = dict(unet.attn_processors)
    tokens = [projection["tokens"] for projection in projections]
    with torch.device("meta"):
        for name in processors:
            layer = unet.get_submodule(name.removesuffix(".processor"))
            if layer.is_cross_attention:
                hidden, context = layer.to_k.weight.shape
                processors[name] = IPAdapterAttnProcessor2_0(hidden, context, num_tokens=tokens)
        unet.set_attn_processor(processors)
        unet.encoder_hid_proj = embeddings.MultiIPAdapterImageProjection(
            [getattr(embeddings, p["class"])(**p["arguments"]) for p in projections]
        )
    # where diffusers itself notes that image prompts are there
    unet.config.encoder_hid_dim_type = "ip_image_proj"
