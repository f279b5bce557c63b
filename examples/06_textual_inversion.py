"""Teach both text encoders a word from a textual inversion file, and use it in a prompt.

Runs offline: the file is made here at random, for the demo model. With a file of yours:

    sdx-accel generate "a house in the style of <ink>" --model MODEL \\
        --embedding ink.safetensors:"<ink>"
"""

import sys

import torch
from safetensors.torch import save_file

from sdx_accel.cli import main
from sdx_accel.runtime.checkpoints import describe

MODEL = "demo"
VECTORS = 2

if __name__ == "__main__":
    encoders = describe(MODEL).components
    tensors = {
        # SDXL files hold one tensor for each text encoder, a row for each vector of the word
        key: torch.randn(VECTORS, encoders[name].config["hidden_size"]) * 0.02
        for key, name in (("clip_l", "text_encoder"), ("clip_g", "text_encoder_2"))
    }
    save_file(tensors, "ink.safetensors")
    # without :<ink> the word would be the file's name
    word = ["--embedding", "ink.safetensors:<ink>"]
    sys.exit(main(["generate", "a dog face <ink>", "--model", MODEL, *word]))
