"""The verb `generate`: its flags and nothing else."""

from typing import Annotated

import typer

from sdx_accel.cli.flags import Dtype, Format, Quality
from sdx_accel.cli.json_errors import json_on_error

__all__ = ["generate"]


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What the picture shows.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="demo (the small model of this package, 128 × 128), hub id, diffusers folder, "
            ".safetensors file, or seeded random weights that draw noise: random:sdxl, "
            "random:sdxl-fp16vae, random:sd15, random:sd3, random:flux, random:pixart-sigma, and "
            "-tiny ones of sdxl, sd15, sd3 and flux. Default: demo.",
        ),
    ] = None,
    negative: Annotated[str | None, typer.Option(help="What it shall not show.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Denoising steps. Default: 20; 4 for -tiny models and for lcm, lightning, turbo."
        ),
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(
            help="Default: 4.0 for demo, 5.0 for SDXL, else 7.5; 1 for lcm, lightning, turbo. 1 or "
            "less: no guidance."
        ),
    ] = None,
    width: Annotated[int | None, typer.Option(help="Pixels. Default: the model's.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels. Default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: random, and printed.")] = None,
    num: Annotated[
        int | None,
        typer.Option(help="How many pictures, one after the other, with seeds SEED, SEED + 1, …"),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH[:SCALE]", help="A LoRA file; may be given several times."),
    ] = None,
    embedding: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE[:TOKEN]",
            help="A textual inversion, used by writing TOKEN (default: the file's name) into a "
            "prompt; may be given several times.",
        ),
    ] = None,
    image: Annotated[str | None, typer.Option(help="A picture to start from.")] = None,
    mask: Annotated[
        str | None, typer.Option(help="With --image: white is repainted, black is kept exactly.")
    ] = None,
    strength: Annotated[
        float | None, typer.Option(help="With --image: how much is replaced. Default: 0.6.")
    ] = None,
    controlnet: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL[:SCALE]",
            help="A ControlNet: folder, hub id or random:controlnet; may be given several times.",
        ),
    ] = None,
    control_image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PICTURE",
            help="What the ControlNet follows, such as edges or depth; one for each --controlnet.",
        ),
    ] = None,
    ip_adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH[:SCALE]",
            help="An IP-Adapter: .safetensors file or random:ip-adapter; may be given several "
            "times.",
        ),
    ] = None,
    ip_image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PICTURE", help="A picture as prompt: its subject and style; one for each."
        ),
    ] = None,
    refiner: Annotated[
        str | None,
        typer.Option(
            help="An SDXL refiner for the last steps: folder, hub id, random:sdxl-refiner or "
            "random:sdxl-refiner-tiny."
        ),
    ] = None,
    refiner_start: Annotated[
        float | None, typer.Option(help="How much of the noise the base removes. Default: 0.8.")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: auto.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="auto|cpu|cuda[:N]", help="Default: auto.")
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="euler, euler-a, ddim, dpm++, unipc, …; lcm, lightning or turbo for models "
            "distilled to 4 steps. Default: the model's."
        ),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(help="Budget: GiB, auto (what is free), 80%, or -1 (free minus 1 GiB)."),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(
            help="Host memory that weights may take: GiB, auto, 80%, or -2 (all but 2 GiB). "
            "Default: not limited."
        ),
    ] = None,
    quality: Annotated[
        Quality | None,
        typer.Option(help="exact (default): same mathematics. near: VAE tiles. fast: not built."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="A folder, or a file name. Default: outputs/."),
    ] = None,
    format: Annotated[Format | None, typer.Option(help="Default: png.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file of the same name.")
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Draw the memory over the phases, planned and measured: a .png, .svg or .pdf "
            "file.",
        ),
    ] = None,
    no_learn: Annotated[
        bool,
        typer.Option(
            "--no-learn", help="Neither use nor keep what earlier runs took beyond their plans."
        ),
    ] = False,
    config: Annotated[
        str | None, typer.Option(help="Configuration folder for a single-file model.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, the rest on stderr.")
    ] = False,
    replay: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PICTURE",
            help="Make a saved picture again; other flags change what they name.",
        ),
    ] = None,
) -> None:
    """Make pictures from a prompt, from a picture, or from a picture and a mask.

    Prints the plan, then what each phase was predicted to need and needed, then the paths of the
    saved pictures, one a line.
    """
    flags = dict(locals())
    with json_on_error(json):
        from sdx_accel.cli.metadata import versions
        from sdx_accel.cli.plot import open_plot
        from sdx_accel.cli.prepare import choose_destination, prepare
        from sdx_accel.cli.run_job import run_job
        from sdx_accel.cli.talk import Talk

        talk = Talk(json)
        drawing = None if plot is None else open_plot(plot, overwrite)
        prepared = prepare(flags, talk.note)
        destination = choose_destination(prepared, flags, talk.note)
        outcome = run_job(prepared, destination, talk, learn=not no_learn, drawing=drawing)
        talk.result(
            [str(path) for path in outcome.paths],
            {
                "seeds": outcome.seeds,
                "settings": prepared.job.to_dict(),
                "plan": outcome.plan,
                "report": outcome.report,
                "plot": None if outcome.plot is None else str(outcome.plot),
                "versions": versions(),
                "seconds": round(outcome.seconds, 3),
                "notes": talk.notes,
            },
        )
    if drawing is not None and outcome.plot is None:
        raise typer.Exit(1)
