"""The verb `plan`: whether a job fits, and where everything lies, without loading weights."""

import json as json_format
from typing import Annotated

import typer

from sdx_accel.cli.flags import Dtype, Format, Quality
from sdx_accel.cli.json_errors import json_on_error

__all__ = ["plan"]

_Ignored = Annotated[str | None, typer.Option(hidden=True)]


def plan(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Ignored: a prompt changes no memory."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="As in generate. Default: demo.")
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(help="Budget as in generate. Default: auto on a GPU, 8 without one."),
    ] = None,
    width: Annotated[int | None, typer.Option(help="Pixels. Default: the model's.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels. Default: the model's.")] = None,
    num: Annotated[
        int | None,
        typer.Option(help="Pictures are made one after the other: memory does not change."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="1 or less: no guidance.")] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="As in generate: lcm, lightning and turbo run without guidance."),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="A picture to start from: its size is planned for.")
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option(metavar="PATH[:SCALE]", help="As in generate.")
    ] = None,
    embedding: Annotated[
        list[str] | None, typer.Option(metavar="FILE[:TOKEN]", help="As in generate.")
    ] = None,
    controlnet: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL[:SCALE]", help="As in generate; needs no picture here."),
    ] = None,
    control_image: Annotated[
        list[str] | None,
        typer.Option(metavar="PICTURE", help="As in generate: its size is planned for."),
    ] = None,
    ip_adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH[:SCALE]", help="As in generate; needs no picture here."),
    ] = None,
    refiner: Annotated[str | None, typer.Option(help="As in generate: a phase of its own.")] = None,
    refiner_start: Annotated[
        float | None, typer.Option(help="As in generate; changes no memory.")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: auto.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="auto|cpu|cuda[:N]", help="Default: auto.")
    ] = None,
    ram: Annotated[
        str | None, typer.Option(help="Host memory for weights: GiB, auto, 80%, or -2.")
    ] = None,
    quality: Annotated[
        Quality | None, typer.Option(help="exact (default) or near; fast is not built.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Configuration folder for a single-file model.")
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Draw the memory over the phases: a .png, .svg or .pdf file."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a drawing of the same name.")
    ] = False,
    no_learn: Annotated[bool, typer.Option("--no-learn", help="As in generate.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    # a line of generate's can be planned as it is: these change no memory
    mask: _Ignored = None,
    strength: Annotated[float | None, typer.Option(hidden=True)] = None,
    ip_image: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    negative: _Ignored = None,
    seed: Annotated[int | None, typer.Option(hidden=True)] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", hidden=True)] = None,
    format: Annotated[Format | None, typer.Option(hidden=True)] = None,
) -> None:
    """Say whether a job fits into a budget, and where everything lies in each phase.

    Loads no weights and needs no GPU. Exit code 1 when it does not fit.
    """
    flags = {**locals(), "prompt": prompt or ""}
    with json_on_error(json):
        from sdx_accel.cli.budgeting import budget_note, plan_job
        from sdx_accel.cli.devices import pick_device
        from sdx_accel.cli.plot import open_plot, save_plot
        from sdx_accel.cli.prepare import prepare
        from sdx_accel.cli.talk import Talk, one_voice

        talk = Talk(json)
        drawing = None if plot is None else open_plot(plot, overwrite)
        prepared = prepare(flags, talk.note, only_plan=True)
        with one_voice(talk):
            job = prepared.job
            device = pick_device(job.device)
            if sentence := budget_note(job, device):
                talk.note(sentence)
            made = plan_job(prepared, device, job.dtype, learn=not no_learn)
        drawn = None if drawing is None else save_plot(made, drawing)
        if json:
            print(json_format.dumps(json_format.loads(made.to_json())))
        else:
            talk.say(made.explain())
        if drawn is not None:
            talk.say(f"drawn: {drawn}")
    if not made.feasible:
        raise typer.Exit(1)
