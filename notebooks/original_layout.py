"""Writes a diffusers pipeline as one file in the original layout of SD 1.5 and SDXL.

    from original_layout import write
    write(pipe, "model.safetensors")

Names only, and three reshapings: what model sites give away, made from a model at hand. Without
tokenizers and configurations, as there: loading one takes `config=`, a diffusers folder.
"""

import os
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["write"]

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}


def _original_unet_name(name: str, layers: int) -> str:
    """A UNet tensor's name in the original layout."""
    plain = {
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
        "mid_block.attentions.0": "middle_block.1",
    }
    for ours, theirs in plain.items():
        if name.startswith(ours + "."):
            return theirs + name.removeprefix(ours)
    parts = name.split(".")
    if parts[0] == "mid_block":
        block, inner = f"middle_block.{2 * int(parts[2])}", parts[3:]
        return f"{block}.{_RESNET[inner[0]]}.{inner[1]}"
    level, kind, index, inner = int(parts[1]), parts[2], int(parts[3]), parts[4:]
    down = parts[0] == "down_blocks"
    if kind == "downsamplers":
        return f"input_blocks.{(level + 1) * (layers + 1)}.0.op.{inner[-1]}"
    if kind == "upsamplers":
        return f"output_blocks.{level * (layers + 1) + layers}.UP.conv.{inner[-1]}"
    position = (1 if down else 0) + level * (layers + 1) + index
    block = f"{'input' if down else 'output'}_blocks.{position}"
    if kind == "attentions":
        return ".".join([block, "1", *inner])
    return f"{block}.0.{_RESNET[inner[0]]}.{inner[1]}"


def _original_vae_name(name: str, levels: int) -> str:
    """A VAE tensor's name in the original layout; its decoder counts levels from the end."""
    parts = name.split(".")
    if "mid_block" in parts:
        side, _, kind, index, *inner = parts
        if kind == "resnets":
            return f"{side}.mid.block_{int(index) + 1}.{'.'.join(inner)}"
        for ours, theirs in _VAE_ATTENTION.items():
            if ".".join(inner).startswith(ours + "."):
                return f"{side}.mid.attn_1.{theirs}.{inner[-1]}"
    if len(parts) > 2 and parts[1] in ("down_blocks", "up_blocks"):
        side, way, level, kind, index, *inner = parts
        way = way.removesuffix("_blocks")
        level = str(levels - 1 - int(level)) if way == "up" else level
        if kind == "resnets":
            inner = ["nin_shortcut" if part == "conv_shortcut" else part for part in inner]
            return f"{side}.{way}.{level}.block.{index}.{'.'.join(inner)}"
        return f"{side}.{way}.{level}.{way}sample.conv.{inner[-1]}"
    return name.replace("conv_norm_out", "norm_out")


def _open_clip(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The second text encoder: query, key and value are one matrix, the projection is turned."""
    out = {}
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        name = name.removeprefix("text_model.")
        if name.startswith("encoder.layers."):
            number, inner = name.removeprefix("encoder.layers.").split(".", 1)
            inner = inner.replace("layer_norm1", "ln_1").replace("layer_norm2", "ln_2")
            inner = inner.replace("mlp.fc1", "mlp.c_fc").replace("mlp.fc2", "mlp.c_proj")
            inner = inner.replace("self_attn.out_proj", "attn.out_proj")
            if "self_attn." in inner:
                layers.setdefault(number, {})[inner.removeprefix("self_attn.")] = tensor
            else:
                out[f"transformer.resblocks.{number}.{inner}"] = tensor
        elif name == "text_projection.weight":
            out["text_projection"] = tensor.T.contiguous()
        elif name == "embeddings.position_embedding.weight":
            out["positional_embedding"] = tensor
        else:
            name = name.replace("embeddings.token_embedding", "token_embedding")
            out[name.replace("final_layer_norm", "ln_final")] = tensor
    for number, parts in layers.items():
        for kind in ("weight", "bias"):
            joined = torch.cat([parts[f"{letter}_proj.{kind}"] for letter in "qkv"])
            out[f"transformer.resblocks.{number}.attn.in_proj_{kind}"] = joined
    return out


def write(pipe: Any, path: str | os.PathLike[str]) -> None:
    """Write a Stable Diffusion 1.5 or XL pipeline as one .safetensors file.

    Args:
        pipe: the pipeline, wherever its weights lie.
        path: the file; replaced if it is there.
    """
    tensors = {}
    unet = pipe.unet.state_dict()
    layers = pipe.unet.config.layers_per_block
    for name, tensor in unet.items():
        new = _original_unet_name(name, layers)
        if ".UP." in new:
            level = name.split(".")[1]
            attention = any(key.startswith(f"up_blocks.{level}.attentions") for key in unet)
            new = new.replace("UP", "2" if attention else "1")
        tensors["model.diffusion_model." + new] = tensor
    levels = len(pipe.vae.config.block_out_channels)
    for name, tensor in pipe.vae.state_dict().items():
        new = _original_vae_name(name, levels)
        if ".attn_1." in new and new.endswith("weight") and tensor.ndim == 2:
            tensor = tensor[:, :, None, None]
        tensors["first_stage_model." + new] = tensor
    xl = hasattr(pipe, "text_encoder_2")
    first = "conditioner.embedders.0.transformer." if xl else "cond_stage_model.transformer."
    for name, tensor in pipe.text_encoder.state_dict().items():
        tensors[f"{first}text_model.{name.removeprefix('text_model.')}"] = tensor
    if xl:
        for name, tensor in _open_clip(pipe.text_encoder_2.state_dict()).items():
            tensors["conditioner.embedders.1.model." + name] = tensor
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
