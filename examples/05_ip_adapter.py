"""Use a picture as part of the prompt, with an IP-Adapter and a memory budget.

Runs offline with the demo model and an adapter of seeded random weights, which blurs what the words
say. With an adapter of yours, and the folder `image_encoder` beside it:

    hf download h94/IP-Adapter --include 'sdxl_models/*' --local-dir ip-adapter
    python examples/05_ip_adapter.py --model stabilityai/stable-diffusion-xl-base-1.0 \\
        --ip-adapter ip-adapter/sdxl_models/ip-adapter_sdxl.safetensors:0.6 --ip-image cat.png
"""

import argparse
import sys
from pathlib import Path

from PIL import Image

from sdx_accel.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ip-adapter", default="random:ip-adapter:0.6", help="PATH[:SCALE]")
    parser.add_argument("--ip-image", type=Path, default=Path("sunset.png"))
    parser.add_argument("--vram", default="8", help="GiB that the driver may see in use")
    options = parser.parse_args()
    if not options.ip_image.exists():
        Image.linear_gradient("L").convert("RGB").save(options.ip_image)

    command = ["generate", "a rocket", "--model", options.model, "--vram", options.vram]
    # scale 1 counts the picture as much as the words, 0 not at all
    command += ["--ip-adapter", options.ip_adapter, "--ip-image", str(options.ip_image)]
    sys.exit(main(command))
