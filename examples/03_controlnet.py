"""Make a picture that follows the edges of another one, with a ControlNet and a memory budget.

Runs offline with the demo model and a ControlNet of seeded random weights, which shakes the house
instead of drawing it along the edges. With models of yours:

    python examples/03_controlnet.py --model stabilityai/stable-diffusion-xl-base-1.0 \\
        --controlnet diffusers/controlnet-canny-sdxl-1.0:0.7 --control-image edges.png --vram 12
"""

import argparse
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from sdx_accel.cli import main


def draw_edges(path: Path) -> None:
    """White outlines on black: what a ControlNet for Canny edges was trained to follow."""
    picture = Image.new("RGB", (128, 128))
    pen = ImageDraw.Draw(picture)
    pen.rectangle((24, 56, 104, 112), outline="white", width=2)
    pen.polygon([(16, 56), (64, 16), (112, 56)], outline="white", width=2)
    picture.save(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--controlnet", default="random:controlnet:0.7", help="MODEL[:SCALE]")
    parser.add_argument("--control-image", type=Path, default=Path("edges.png"))
    parser.add_argument("--vram", default="8", help="GiB that the driver may see in use")
    options = parser.parse_args()
    if not options.control_image.exists():
        draw_edges(options.control_image)

    # the same line without "generate a house" and with "plan" only says whether it fits
    command = ["generate", "a house", "--model", options.model, "--vram", options.vram]
    # once more --controlnet and --control-image would add a second one
    command += ["--controlnet", options.controlnet, "--control-image", str(options.control_image)]
    sys.exit(main(command))
