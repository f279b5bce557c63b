"""Make one picture with sdx_accel switched on, print what ran, and switch it off again.

Runs offline: without `--model` it is the small model that comes with sdx_accel, 128 × 128 pixels
in the style of flat emoji. With a model of yours:

    python examples/01_make_picture.py --model stabilityai/stable-diffusion-xl-base-1.0 --vram 8
"""

import argparse
from pathlib import Path

import torch

import sdx_accel  # noqa: F401  (attaches enable_xattn, xattn_report and disable_xattn)
from sdx_accel.runtime.checkpoints import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="a red apple")
    parser.add_argument("--model", default="demo", help="demo, folder, checkpoint or hub id")
    parser.add_argument("--vram", default="8", help="GiB that the driver may see in use")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("outputs/example.png"))
    options = parser.parse_args()

    # with a hub id this is the same as DiffusionPipeline.from_pretrained(options.model)
    pipe = load(options.model)

    # no .to("cuda"): with a budget, sdx_accel decides what lies where
    pipe.enable_xattn(vram=options.vram)
    picture = pipe(
        options.prompt,
        num_inference_steps=options.steps,
        # noise from a CPU generator is the same on every machine
        generator=torch.Generator("cpu").manual_seed(0),
    ).images[0]
    print(pipe.xattn_report())
    pipe.disable_xattn()

    options.output.parent.mkdir(parents=True, exist_ok=True)
    picture.save(options.output)
    print(options.output)


if __name__ == "__main__":
    main()
