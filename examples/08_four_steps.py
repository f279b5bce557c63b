"""Four steps without guidance: LCM, SDXL-Lightning and SDXL-Turbo, each by its scheduler's name.

Runs offline with the demo model, which was not distilled and does well enough. With the public
models:

    sdx-accel generate "a lighthouse" --model stabilityai/sdxl-turbo --scheduler turbo
    sdx-accel generate "a lighthouse" --model stabilityai/stable-diffusion-xl-base-1.0 \\
        --lora sdxl_lightning_4step_lora.safetensors --scheduler lightning
"""

import sys

from sdx_accel.cli import main

MODEL = "demo"

if __name__ == "__main__":
    codes = []
    for scheduler in ("lcm", "lightning", "turbo"):
        # the name alone means 4 steps, no guidance, and the timesteps of that distillation
        flags = ["--scheduler", scheduler, "--output", f"{scheduler}.png"]
        codes.append(main(["generate", "a red apple", "--model", MODEL, *flags]))
    sys.exit(max(codes))
