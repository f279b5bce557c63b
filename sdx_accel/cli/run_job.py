"""Runs a prepared job: plan, load, place, denoise, save; one picture at a time.

Knows pipelines through their public calls; knows nothing of flags or of file names.
"""

import json
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdx_accel.cli.budgeting import budget_note, budget_of, plan_job, refuse_infeasible
from sdx_accel.cli.decode_guard import finite_decode
from sdx_accel.cli.devices import pick_device
from sdx_accel.cli.job import Job
from sdx_accel.cli.loading import load_pipeline, picture_arguments
from sdx_accel.cli.metadata import encode_picture, parameters_text, versions
from sdx_accel.cli.pictures_out import Destination, file_name, save_bytes
from sdx_accel.cli.plot import save_plot
from sdx_accel.cli.prepare import Prepared
from sdx_accel.cli.progress import StepProgress
from sdx_accel.cli.prompts import prompt_notes
from sdx_accel.cli.talk import Talk, one_voice
from sdx_accel.errors import BudgetExceeded, WorkError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Outcome", "run_job"]


@dataclass(slots=True)
class Outcome:
    """What a job made.

    Args:
        paths: saved pictures, in order.
        seeds: their seeds.
        plan: the plan that was held, as JSON-ready values, or None.
        report: what ran, as JSON-ready values, or None.
        plot: the drawing of the plan and of what was measured, or None.
        seconds: from loading to the last saved picture.
    """

    paths: list[Path] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    plot: Path | None = None
    seconds: float = 0.0


def run_job(
    prepared: Prepared,
    destination: Destination,
    talk: Talk,
    *,
    learn: bool = True,
    drawing: Destination | None = None,
) -> Outcome:
    """Make and save every picture of a job.

    Pictures are made by separate calls, so that memory does not grow with their number and
    picture i equals the picture that its own seed gives alone.

    Args:
        prepared: from `prepare`.
        destination: from `choose_destination`.
        talk: where messages go.
        learn: whether plans use, and runs keep, what phases took beyond their predictions.
        drawing: from `open_plot`, where the plan is drawn with what its phases took.

    Raises:
        SdxError: refused (budget, model, LoRA) or failed.
        KeyboardInterrupt: after saying which pictures were finished.
    """
    from sdx_accel.runtime.checkpoints import dtype_for

    job, outcome = prepared.job, Outcome()
    start = time.perf_counter()
    device = pick_device(job.device)
    with one_voice(talk):
        dtype, dtype_note = dtype_for(device, job.dtype)
        if dtype_note:
            talk.note(dtype_note)
        talk.say(_headline(prepared, device, dtype))
        for sentence in (budget_note(job, device), _threads_note(prepared, device)):
            if sentence:
                talk.note(sentence)
        plan = plan_job(prepared, device, str(dtype).removeprefix("torch."), learn=learn)
        talk.say(plan.explain())
        refuse_infeasible(plan, prepared, device)
        outcome.plan = plan.to_dict()
        pipe = load_pipeline(prepared, device, talk)
        prompt, negative = job.prompt, job.negative if job.guided else ""
        if job.embeddings:
            # a word of several vectors takes as many places in the prompt
            prompt = pipe.maybe_convert_prompt(prompt, pipe.tokenizer)
            negative = pipe.maybe_convert_prompt(negative, pipe.tokenizer)
        for sentence in prompt_notes(pipe, prompt, negative):
            talk.note(sentence)
        held = _place(pipe, job, device, plan.feasible, learn, talk)
        try:
            for index in range(job.num):
                picture = _make(pipe, prepared, index, device, plan.seconds_per_step, talk)
                record = _record(prepared.job.single(index), prepared, pipe, device, outcome.plan)
                outcome.paths.append(_save(picture, record, prepared, index, destination, talk))
                outcome.seeds.append(job.seed + index)
        except KeyboardInterrupt:
            done = ", ".join(str(path) for path in outcome.paths) or "none"
            talk.note(f"stopped; finished pictures: {done}")
            raise
        report = pipe.xattn_report() if held else None
        if report is not None:
            _audit(report, outcome, talk)
    outcome.seconds = time.perf_counter() - start
    if drawing is not None:
        _draw(plan, report, drawing, outcome, talk)
    return outcome


def _headline(prepared: Prepared, device: str, dtype: Any) -> str:
    job = prepared.job
    seeds = f"seed {job.seed}" if job.num == 1 else f"seeds {job.seed} to {job.seed + job.num - 1}"
    return (
        f"{job.model}: {prepared.description.pipeline_class} on {device} in "
        f"{str(dtype).removeprefix('torch.')}, "
        f"{job.width} × {job.height}, {job.steps} steps, guidance {job.guidance:g}, {seeds}"
    )


def _threads_note(prepared: Prepared, device: str) -> str | None:
    """A sentence when a CPU run is made again with another number of threads."""
    import torch

    then, now = prepared.threads, torch.get_num_threads()
    if device != "cpu" or then is None or then == now:
        return None
    return (
        f"recorded with {then} CPU threads, now {now}: sums are rounded in another order, so "
        f"pixels may differ by one level; set OMP_NUM_THREADS={then} to have as many"
    )


def _place(pipe: Any, job: Job, device: str, feasible: bool, learn: bool, talk: Talk) -> bool:
    """Patch the pipeline and put it on its device; False when everything of ours is off."""
    import sdx_accel  # noqa: F401  (attaches enable_xattn to diffusers' classes)

    if os.environ.get("SDX_DISABLE", "") not in ("", "0"):
        talk.note("SDX_DISABLE is set: nothing is patched and no budget is held")
        pipe.to(device)
        return False
    if device == "cpu" and not feasible:
        pipe.enable_xattn()
        return True
    pipe.enable_xattn(
        vram=budget_of(job, device),
        ram=job.ram,
        device=device,
        quality=job.quality,
        learn=learn,
    )
    return True


def _make(
    pipe: Any, prepared: Prepared, index: int, device: str, pace: float, talk: Talk
) -> "Image":
    """One picture; noise is drawn on the CPU, so that no placement or device changes it.

    `pace` is the predicted time of a step in seconds, 0 for none.
    """
    import torch
    from PIL import Image

    from sdx_accel.runtime.enforce import spill_note
    from sdx_accel.runtime.host_memory import limits

    job = prepared.job
    title = "picture" if job.num == 1 else f"picture {index + 1} of {job.num}"
    progress = StepProgress(_steps(job), title)
    arguments = {
        "prompt": job.prompt,
        # None and "" differ: SDXL zeroes the embeddings of None
        "negative_prompt": job.negative or None,
        "num_inference_steps": job.steps,
        "guidance_scale": job.guidance,
        "generator": torch.Generator("cpu").manual_seed(job.seed + index),
        "callback_on_step_end": progress.callback,
        **picture_arguments(prepared),
    }
    try:
        with progress, finite_decode(pipe, talk.note):
            result = pipe(**arguments)
    except (torch.OutOfMemoryError, BudgetExceeded) as error:
        said = f" ({error})" if isinstance(error, BudgetExceeded) else ""
        raise WorkError(
            f"{title}: {device} ran out of memory after step {progress.done}{said}; pictures made "
            "before are saved. Close other programs that use the card, or make a smaller picture"
        ) from error
    picture: Image.Image = result.images[0].convert("RGB")
    if progress.seconds_per_step is not None:
        talk.say(f"{title}: {progress.done} steps, {progress.seconds_per_step:.3g} s/step")
    if device != "cpu" and (sentence := spill_note(progress.seconds_per_step, pace, limits())):
        talk.note(sentence)
    if prepared.image is not None and prepared.mask is not None:
        size = (job.width, job.height)
        original, mask = prepared.image.resized(*size), prepared.mask.resized(*size)
        picture = Image.composite(picture, original, mask)
    if picture.getbbox() is None:
        talk.note("the picture is black all over, although every value is finite")
    return picture


def _steps(job: Job) -> int:
    return job.steps if job.strength is None else int(job.steps * job.strength)


def _record(
    single: Job, prepared: Prepared, pipe: Any, device: str, plan: dict[str, Any] | None
) -> dict[str, Any]:
    """What goes into the picture's metadata."""
    import torch

    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    pictures = (prepared.image, prepared.mask, *prepared.guides, *prepared.prompts)
    return {
        "settings": single.to_dict(),
        "inputs": {
            **{picture.path: picture.sha256 for picture in pictures if picture is not None},
            **{path: digest for path, (_, digest) in prepared.files.items()},
        },
        "ran": {
            "device": device,
            "dtype": str(denoiser.dtype).removeprefix("torch."),
            "scheduler": type(pipe.scheduler).__name__,
            "pipeline": type(pipe).__name__,
            **({"threads": torch.get_num_threads()} if device == "cpu" else {}),
        },
        "versions": versions(),
        "plan": plan,
    }


def _save(
    picture: "Image",
    record: dict[str, Any],
    prepared: Prepared,
    index: int,
    destination: Destination,
    talk: Talk,
) -> Path:
    single = prepared.job.single(index)
    sampler = record["ran"]["scheduler"].removesuffix("Scheduler")
    parameters = parameters_text(single, sampler)
    data, note = encode_picture(picture, destination.format, record, parameters)
    if note:
        talk.note(note)
    name = file_name(destination, single.prompt, single.seed, index, prepared.job.num)
    return save_bytes(data, destination, name)


def _audit(report: Any, outcome: Outcome, talk: Talk) -> None:
    outcome.report = json.loads(report.to_json())
    for phase in report.phases:
        measured = (
            "not measured on the CPU"
            if phase.measured_peak_gib is None
            else f"measured {phase.measured_peak_gib:.2f} GiB"
        )
        talk.say(f"{phase.name}: predicted {phase.predicted_peak_gib:.2f} GiB, {measured}")


def _alike(held: Any, plan: Any) -> bool:
    """Whether phases take the same within a hundredth: a CPU's VAE may decode another way."""
    peaks = ([phase.predicted_peak_gib for phase in each.phases] for each in (held, plan))
    mine, others = peaks
    return len(mine) == len(others) and all(
        abs(one - other) <= 0.01 * other for one, other in zip(mine, others, strict=True)
    )


def _draw(plan: Any, report: Any, drawing: Destination, outcome: Outcome, talk: Talk) -> None:
    """Draw what was held, else what was planned; the pictures are saved, so no failure ends it."""
    held = None if report is None else report.plan
    phases = () if held is None else report.phases
    try:
        # a loaded pipeline knows neither what the user calls it nor the order of its parts, so its
        # plan has another digest than the one that was printed and saved
        shown = plan
        if held is not None and not _alike(held, plan):
            shown = replace(held, model=plan.model)
        outcome.plot = save_plot(shown, drawing, phases, outcome.paths)
    except WorkError as error:
        talk.note(str(error))
        return
    talk.say(f"drawn: {outcome.plot}")
