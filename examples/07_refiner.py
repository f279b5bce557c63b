"""Let SDXL's refiner do the last fifth of the noise; the budget never holds both UNets at once
unless both fit.

Runs offline with seeded random weights. With the public models:

    python examples/07_refiner.py --model stabilityai/stable-diffusion-xl-base-1.0 \\
        --refiner stabilityai/stable-diffusion-xl-refiner-1.0 --vram 8
"""

import argparse
import sys

from sdx_accel.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:sdxl-tiny")
    parser.add_argument("--refiner", default="random:sdxl-refiner-tiny")
    parser.add_argument("--vram", default="8", help="GiB that the driver may see in use")
    options = parser.parse_args()

    command = ["generate", "a lighthouse", "--model", options.model, "--vram", options.vram]
    # the plan has a phase `refine` of its own, with the UNets that lie on the card in each
    command += ["--refiner", options.refiner, "--refiner-start", "0.8"]
    sys.exit(main(command))
