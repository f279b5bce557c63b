"""Train the demo model: VAE, then UNet with both text encoders, then export and evaluation.

    python examples/train_demo_model/train.py --data data.npz --out OUT

Under 10 minutes on one H200, by the clock: every phase has its seconds (or, for a run that can be
repeated exactly, its steps), and what a phase has learnt is in OUT before the next begins.
`--resume OUT` goes on from the files of an earlier run. `--compile-first` compiles the UNet's
kernels while the VAE is trained. `--dry-run` does all of it in minutes on a CPU, on a few pictures,
and learns nothing.
"""

import argparse
import json
import math
import tempfile
import traceback
from pathlib import Path
from typing import Any

import compile_first
import torch
from attention_choice import checked_samples
from captions import CAPTIONS
from data import Picture, load_data
from evaluate import evaluate, gallery_of
from export import export, load_flat, pack_folder, save_flat, unpack
from flat import FlatWeights
from model import PROMPT_PARTS, build
from names import FILE, draw_names
from progress import Clock
from recolour import plan_colours, recolour
from safetensors.torch import load_file, save_file
from torch import Tensor
from train_unet import CROPS, Material, train_unet
from train_vae import encode, normalise, psnr, train_vae
from words import LENGTH, make_tokenizer, token_ids

__all__ = ["main", "parse"]

#: how often a picture is drawn, relative to one without skin tone and in its own colours: five
#: tones of one gesture would else be most of what the model sees
TONE_WEIGHT, COLOUR_WEIGHT = 0.07, 0.2
TABLE = 1 << 17
#: far below fp16's 65,504; above it the decoder would have to run in fp32
SAFE_ACTIVATION = 8000.0
EXPORT_S = 12.0
DRY_PICTURES = 8


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder of an earlier run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-seconds", type=float, default=560.0, help="for everything")
    parser.add_argument("--vae-seconds", type=float, default=195.0)
    parser.add_argument("--unet-seconds", type=float, default=310.0)
    parser.add_argument("--eval-seconds", type=float, default=30.0)
    parser.add_argument("--vae-steps", type=int, help="steps instead of seconds")
    parser.add_argument("--unet-steps", type=int, help="steps instead of seconds")
    parser.add_argument("--vae-batch", type=int, default=64)
    parser.add_argument("--unet-batch", type=int, default=768)
    kinds = ["triton", "auto", "stock"]
    parser.add_argument("--attention", choices=kinds, default="triton", help="of the UNet")
    # one head of 96 dimensions: kernels for it are compiled for this model alone
    parser.add_argument("--vae-attention", choices=kinds, default="stock")
    parser.add_argument("--compile-first", action="store_true", help="UNet's kernels, meanwhile")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.vae_steps = options.unet_steps = 2
        options.vae_batch = options.unet_batch = 2
        options.eval_seconds = 0.0
        # a slow machine is no reason to leave a part out; 0 still means "no such phase"
        options.total_seconds = math.inf
        options.vae_seconds *= math.inf if options.vae_seconds else 1.0
        options.unet_seconds *= math.inf if options.unet_seconds else 1.0
    return options


def drawing_table(pictures: list[Picture], coloured: int) -> Tensor:
    """Indices of pictures, each as often as it is to be drawn; the coloured ones come last."""
    weights = [1.0 if picture.name == picture.base else TONE_WEIGHT for picture in pictures]
    shares = torch.tensor(weights + [COLOUR_WEIGHT] * coloured)
    ends = (shares.cumsum(0) / shares.sum() * TABLE).round().long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return torch.repeat_interleave(torch.arange(len(shares)), counts)


def moved(pixels: Tensor, down: int, right: int) -> Tensor:
    """Pictures whose top-left corner is cut off; what comes in from the other side is the edge."""
    side = torch.arange(pixels.shape[1], device=pixels.device)
    last = pixels.shape[1] - 1
    return pixels[:, (side + down).clamp_max(last)][:, :, (side + right).clamp_max(last)]


def make_vae(
    options: argparse.Namespace, pixels: Tensor, vocabulary: int, start: Any, clock: Clock
) -> tuple[Any, dict[str, Any]]:
    """The trained VAE, fp32 on the device of `pixels`, and its part of the report."""
    device = pixels.device
    vae = build("vae", vocabulary).to(device)
    if start is not None:
        vae.load_state_dict(load_file(start / "vae" / "diffusion_pytorch_model.safetensors"))
    record: dict[str, Any] = {}
    if options.vae_seconds > 0:
        record = train_vae(
            vae,
            pixels,
            min(options.vae_seconds, clock.left(reserve=30.0)),
            clock,
            batch=options.vae_batch,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            attention=options.vae_attention,
            most_steps=options.vae_steps,
            resumed=start is not None,
        )
        vae.disable_xattn()
    vae.requires_grad_(False).eval()
    with clock.part("normalising the latents"):
        record["normalised"] = normalise(vae, pixels)
    clean = build("vae", vocabulary).to(device)
    clean.load_state_dict(vae.state_dict())
    save_file({k: v.half().cpu() for k, v in clean.state_dict().items()}, options.out / "vae.new")
    (options.out / "vae.new").replace(options.out / "vae.safetensors")
    half = torch.float16 if device.type == "cuda" else torch.float32
    with clock.part("PSNR in 16 bits"):
        record["fp16"] = psnr(clean.to(half).eval(), pixels)
    if record["fp16"]["largest_activation"] > SAFE_ACTIVATION:
        vae.register_to_config(force_upcast=True)
    clock.say(f"VAE: {record['fp16']}")
    return vae, record


def make_material(
    vae: Any, pixels: Tensor, pictures: list[Picture], merges: Any
) -> tuple[Material, int]:
    """Latents, tokens and drawing table, and the number of recoloured pictures."""
    device = pixels.device
    seen, _ = plan_colours(pixels, pictures)
    everything = torch.cat([pixels, recolour(pixels, seen)])
    latents = torch.stack([encode(vae, moved(everything, *crop)) for crop in CROPS], dim=1)
    captions = [text for picture in pictures for text in picture.captions]
    captions += [text for change in seen for text in change.captions]
    tokenizer = make_tokenizer(merges)
    tokens = token_ids(tokenizer, captions).view(len(everything), CAPTIONS, LENGTH)
    return Material(
        latents=latents,
        tokens=tokens.to(device),
        empty=token_ids(tokenizer, [""])[0].to(device),
        table=drawing_table(pictures, len(seen)).to(device),
        corners=torch.tensor(CROPS, device=device),
    ), len(seen)


def earlier_weights(parts: dict[str, Any], start: Path, out: Path) -> Tensor:
    """Load the mean weights of an earlier run into `parts`; returns the master weights, flat."""
    for name, module in parts.items():
        file = "diffusion_pytorch_model" if name == "unet" else "model"
        module.load_state_dict(load_file(start / name / f"{file}.safetensors"))
    return load_flat(out, next(parts["unet"].parameters()).device)


def judge(
    options: argparse.Namespace, folder: Path, pixels: Tensor, pictures: list[Picture]
) -> dict[str, Any]:
    """Load the export as anyone would, and evaluate it."""
    from diffusers import StableDiffusionXLPipeline

    dtype = torch.float16 if pixels.device.type == "cuda" else torch.float32
    pipe = StableDiffusionXLPipeline.from_pretrained(folder, torch_dtype=dtype).to(pixels.device)
    gallery = gallery_of(pixels, pictures)
    if not options.dry_run:
        fixed = json.loads(FILE.read_text())
        return evaluate(pipe, gallery, fixed, options.out, options.eval_seconds)
    fixed = draw_names(pictures, [("blue", "apple"), ("red", "rocket")], seed=0)
    fixed |= {"names": fixed["names"][:6], "blind": fixed["blind"][:6]}
    return evaluate(pipe, gallery, fixed, options.out, 0.0, steps=2, prompts=["a red apple"])


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run as from the command line; returns what is in report.json."""
    options = parse(arguments)
    clock = Clock(options.total_seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo_model_") as work:
        return train(options, clock, Path(work))


def train(options: argparse.Namespace, clock: Clock, work: Path) -> dict[str, Any]:
    """All phases; `work` is a folder for what needs not be kept."""
    device = torch.device("cuda" if torch.cuda.is_available() and not options.dry_run else "cpu")
    torch.manual_seed(options.seed)
    # cuDNN chooses by its rules: trying every algorithm at each of the models' shapes takes longer
    # than phases of minutes can win back, and may choose differently each time
    torch.backends.cudnn.benchmark = False
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "options": {key: str(value) for key, value in vars(options).items()},
    }

    def note(name: str, value: Any) -> None:
        report[name] = value
        report["seconds"] = {**report.get("seconds", {}), name: round(clock.passed(), 1)}
        report["parts"] = clock.parts
        (options.out / "report.json").write_text(json.dumps(report, indent=1))
        clock.say(name)

    start = None
    if options.resume is not None:
        unpack(options.resume, start := work / "earlier")
    with clock.part("reading the pictures"):
        array, pictures, merges = load_data(options.data, DRY_PICTURES if options.dry_run else None)
        pixels = torch.from_numpy(array).to(device)
    vocabulary = len(make_tokenizer(merges))
    note("data", {"pictures": len(pictures), "vocabulary": vocabulary})

    attention, compiling = options.attention, None
    if options.compile_first and attention != "stock":
        sizes = list(dict.fromkeys((checked_samples(device), options.unet_batch)))
        compiling = compile_first.begin(attention, vocabulary, sizes, device)
    try:
        vae, record = make_vae(options, pixels, vocabulary, start, clock)
        note("vae", record)
        with clock.part("latents and tokens"):
            material, coloured = make_material(vae, pixels, pictures, merges)
        if compiling is not None:
            patience = None if options.dry_run else compile_first.WAIT_S
            note("compiled_first", outcome := compile_first.wait(compiling, clock, patience))
            attention = "stock" if outcome == "stuck" else attention
    finally:
        if compiling is not None and compiling.poll() is None:
            compiling.kill()
            compiling.wait()
    note("material", {"latents": list(material.latents.shape), "recoloured": coloured})

    parts = {name: build(name, vocabulary).to(device) for name in PROMPT_PARTS}
    resume = None if start is None else earlier_weights(parts, start, options.resume)
    folder = work / "demo"

    def save(learnt: dict[str, Any], flat: FlatWeights) -> None:
        save_flat(flat.master, options.out)
        export({**learnt, "vae": vae}, merges, folder, vocabulary)
        pack_folder(folder, options.out)

    record, _ = train_unet(
        parts,
        material,
        min(options.unet_seconds, clock.left(reserve=options.eval_seconds + EXPORT_S)),
        clock,
        batch=options.unet_batch,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        attention=attention,
        save=save,
        every=120.0,
        most_steps=options.unet_steps,
        resume=resume,
    )
    (options.out / "vae.safetensors").unlink()  # it is in rest.tar now
    note("unet", record)
    try:
        with clock.part("evaluation"):
            judged = judge(options, folder, pixels, pictures)
        note("evaluation", judged)
    except Exception:  # the weights are saved; evaluate.py can be run again
        note("evaluation_failed", traceback.format_exc())
        clock.say(report["evaluation_failed"])
    return report


if __name__ == "__main__":
    found = main().get("evaluation", {})
    print(json.dumps({k: v for k, v in found.items() if k != "names"}))
    for measure, entry in found.get("names", {}).items():
        print(measure, entry["right"], "distinct", entry["distinct"], entry["wrong"][:20])
