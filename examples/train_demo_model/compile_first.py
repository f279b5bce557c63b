"""Compile the UNet's attention kernels in a process of their own, while the VAE is trained.

    python examples/train_demo_model/compile_first.py --attention triton --samples 8 768

Triton keeps what it has compiled on disk, so that the training process finds it there. Forward and
backward run once at each batch size given: lengths decide which kernels run, and a batch of another
size may be served by another of them. Weights and inputs are random; nothing is learnt.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from attention_choice import finish, what_ran
from model import PROMPT_PARTS, build
from progress import Clock
from train_unet import CROPS, Material, TextAndUNet, draw, noise_levels, velocity_loss
from words import LENGTH

__all__ = ["WAIT_S", "begin", "main", "wait"]

#: that the training process waits for the other one at most, seconds
WAIT_S = 60.0


def _material(vocabulary: int, device: torch.device) -> Material:
    """Random latents and tokens in the shapes of the real ones; two pictures, one caption each."""
    return Material(
        latents=torch.randn(2, len(CROPS), 4, 16, 16, device=device),
        tokens=torch.randint(vocabulary, (2, 1, LENGTH), device=device),
        empty=torch.zeros(LENGTH, dtype=torch.long, device=device),
        table=torch.arange(2, device=device),
        corners=torch.tensor(CROPS, device=device),
    )


def main(arguments: list[str] | None = None) -> dict[str, int]:
    """Returns what ran: layers by implementation, and launches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=2560)
    parser.add_argument("--attention", choices=["triton", "auto"], default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, nargs="+", default=[8])
    options = parser.parse_args(arguments)
    clock, device = Clock(0.0, prefix="compiling: "), torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    modules = [build(name, options.vocabulary).to(device, dtype) for name in PROMPT_PARTS]
    model = TextAndUNet(**dict(zip(PROMPT_PARTS, modules, strict=True)))
    model.enable_xattn(attention_op=None if options.attention == "auto" else options.attention)
    material, levels = _material(options.vocabulary, device), noise_levels(device)
    for samples in options.samples:
        with clock.part(f"forward of {samples} samples"):
            loss = velocity_loss(model, draw(material, samples, levels), dtype)
            finish(loss)
        with clock.part(f"backward of {samples} samples"):
            loss.backward()
            finish(loss)
    ran = what_ran(model.unet)
    clock.say(f"done: {ran}")
    return ran


def begin(
    attention: str, vocabulary: int, samples: list[int], device: torch.device
) -> subprocess.Popen[bytes]:
    """Start this file as a process, whose lines go where ours do."""
    from sdx_accel.runtime.kernel_cache import ensure_kernel_cache

    # both processes must mean the same folder, also where the usual one cannot be written
    ensure_kernel_cache()
    command = [sys.executable, "-u", str(Path(__file__).resolve())]
    command += ["--attention", attention, "--vocabulary", str(vocabulary), "--device", str(device)]
    return subprocess.Popen([*command, "--samples", *map(str, samples)])


def wait(process: subprocess.Popen[Any], clock: Clock, seconds: float | None = WAIT_S) -> str:
    """Let the process end, or end it after `seconds`; None waits for ever.

    Returns:
        "done", "failed" (which the check of attention will look into by itself) or "stuck": then
        the same kernels would hold up the training process too.
    """
    try:
        with clock.part("waiting for the compiling process"):
            return "failed" if process.wait(seconds) else "done"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        clock.say(f"the compiling process was ended, {seconds} s after it was needed")
        return "stuck"


if __name__ == "__main__":
    main()
