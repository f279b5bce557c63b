"""Write the trained pipeline as diffusers does, in fp16; pack it into files below 16 MiB."""

import tarfile
from pathlib import Path
from typing import Any

import torch
from model import build, pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor
from words import Merge

__all__ = ["export", "load_flat", "pack_folder", "save_flat", "unpack"]


def export(parts: dict[str, Any], merges: list[Merge], folder: Path, vocabulary: int) -> Path:
    """The folder with fp16 copies of all modules, ready for `from_pretrained`.

    Args:
        parts: "vae", "unet", "text_encoder", "text_encoder_2" with their final weights. Stock
            modules of the same configuration are made for them, so nothing of training remains.
    """
    clean = {}
    for name, module in parts.items():
        clean[name] = build(name, vocabulary)
        clean[name].load_state_dict(module.state_dict())
        clean[name].half().eval()
    pipe = pipeline(clean, merges)
    pipe.vae.register_to_config(**dict(parts["vae"].config))
    pipe.save_pretrained(folder, safe_serialization=True)
    return folder


def pack_folder(folder: Path, out: Path) -> list[Path]:
    """unet.tar and rest.tar in `out`: the UNet alone is two thirds of the bytes."""
    made = []
    for name, wanted in (("unet.tar", True), ("rest.tar", False)):
        path = out / name
        with tarfile.open(path.with_suffix(".new"), "w") as archive:
            for file in sorted(folder.rglob("*")):
                inside = file.relative_to(folder)
                if file.is_file() and (inside.parts[0] == "unet") is wanted:
                    archive.add(file, str(inside))
        # whole or not at all, should the machine be taken away meanwhile
        path.with_suffix(".new").replace(path)
        made.append(path)
    return made


def unpack(out: Path, folder: Path) -> None:
    """The pipeline's folder from `pack_folder`'s files."""
    for name in ("unet.tar", "rest.tar"):
        with tarfile.open(out / name) as archive:
            archive.extractall(folder, filter="data")


def save_flat(flat: Tensor, out: Path) -> None:
    """fp32 weights as two files, master-0 and master-1, each below 16 MiB."""
    for index, part in enumerate(flat.detach().cpu().chunk(2)):
        new = out / f"master-{index}.new"
        save_file({"master": part.contiguous()}, new)
        new.replace(out / f"master-{index}.safetensors")


def load_flat(out: Path, device: torch.device) -> Tensor:
    """The inverse of `save_flat`."""
    parts = [load_file(out / f"master-{index}.safetensors")["master"] for index in range(2)]
    return torch.cat(parts).to(device)
