"""Mix two LoRA files, each with its own strength; their order on the command line is irrelevant.

Runs offline: the files are made here at random, for the demo model, whose colours they shift. With
files of yours:

    sdx-accel generate "a harbour" --model MODEL --lora ink.safetensors:0.8 --lora fog.safetensors
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from sdx_accel.cli import main
from sdx_accel.runtime.checkpoints import load

MODEL = "demo"
RANK = 4


def make_lora(path: Path, seed: int) -> None:
    """Random low-rank changes to every attention query and value of the UNet."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in load(MODEL).unet.named_modules():
        if name.endswith(("to_q", "to_v")):
            down = torch.randn(RANK, layer.in_features, generator=generator)
            up = torch.randn(layer.out_features, RANK, generator=generator)
            tensors[f"unet.{name}.lora_A.weight"] = down / layer.in_features**0.5
            tensors[f"unet.{name}.lora_B.weight"] = up / RANK**0.5
    save_file(tensors, path)


if __name__ == "__main__":
    for seed, name in enumerate(("ink.safetensors", "fog.safetensors")):
        make_lora(Path(name), seed)
    # a LoRA of another architecture is refused before any weights are read
    loras = ["--lora", "ink.safetensors:0.8", "--lora", "fog.safetensors:0.5"]
    sys.exit(main(["generate", "a red apple", "--model", MODEL, *loras]))
