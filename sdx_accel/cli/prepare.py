"""From flags to a checked job with its input pictures and its destination, before any weights.

Everything that can be refused without loading a model is refused here.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sdx_accel.cli.adapter_flags import absolute, adapter_settings
from sdx_accel.cli.adapters import assemble, file_digests, name_embeddings, read_pictures
from sdx_accel.cli.defaults import DEFAULT_MODEL, fill_defaults
from sdx_accel.cli.flags import parse_device, parse_vram, refuse_unbuilt
from sdx_accel.cli.job import Job
from sdx_accel.cli.metadata import Recorded, read_record, versions
from sdx_accel.cli.pictures_in import InputPicture, read_mask, read_picture
from sdx_accel.cli.pictures_out import Destination, open_destination
from sdx_accel.errors import CheckpointError, PictureError, RefusedError
from sdx_accel.runtime.shipped import is_demo

__all__ = ["Prepared", "choose_destination", "prepare"]

# room for the metadata of a picture
_OVERHEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that may start.

    Args:
        job: the settings.
        description: the model's, from `describe`, with everything that the job adds to it.
        image: the picture to start from, or None.
        mask: what to repaint of it, or None.
        format: of the picture that is made again, or None.
        guides: the pictures that ControlNets follow, in their order.
        prompts: the pictures that are prompts to IP-Adapters, in their order.
        files: (flag, sha256) by path of the files that are added to the model.
        threads: of a CPU run that is made again as it was, or None.
    """

    job: Job
    description: Any
    image: InputPicture | None
    mask: InputPicture | None
    format: str | None
    guides: tuple[InputPicture, ...]
    prompts: tuple[InputPicture, ...]
    files: dict[str, tuple[str, str]]
    threads: int | None


def prepare(
    flags: dict[str, Any], note: Callable[[str], None], *, only_plan: bool = False
) -> Prepared:
    """Check everything that needs no weights.

    Args:
        flags: by name, None (or an empty list) where the user gave nothing.
        note: receives sentences that the user should read.
        only_plan: no picture will be made, so that those which change no memory may be missing.

    Raises:
        RefusedError: or one of its kinds, on anything that cannot work.
    """
    refuse_unbuilt(flags)
    given = _given(flags)
    recorded = read_record(given["replay"]) if "replay" in given else None
    if recorded is None and "prompt" not in given:
        raise RefusedError('no prompt: write sdx-accel generate "what the picture shows"')
    settings = _settings(given, recorded, only_plan)
    if recorded is not None:
        _check_inputs(recorded, given, settings)
    if "embedding" in given:
        said = (settings.get("prompt") or "", settings.get("negative") or "")
        # a plan has no prompt that a word could be missing from
        speak = _silent if only_plan else note
        settings["embeddings"] = name_embeddings(given["embedding"], said, speak)
    description = _describe(settings, note)
    image, mask = _pictures(settings, note)
    guides = read_pictures(settings.get("controlnets", ()), "--control-image", note)
    prompts = read_pictures(settings.get("ip_adapters", ()), "--ip-image", note)
    fill_defaults(settings, description, image, note, guides[0] if guides else None)
    job = Job.from_dict(settings)
    for guide in guides if image is not None else guides[1:]:
        if guide.picture.size != (job.width, job.height):
            was = " × ".join(map(str, guide.picture.size))
            note(f"{guide.path} is resized from {was} to {job.width} × {job.height}")
    for picture in prompts:
        if picture.picture.width != picture.picture.height:
            note(f"{picture.path} is not square: only its middle is the prompt")
    for path in dict.fromkeys(lora.path for lora in job.loras):
        scales = [lora.scale for lora in job.loras if lora.path == path]
        if len(scales) > 1:
            note(f"--lora {path} is given {len(scales)} times: it counts with {sum(scales):g}")
    _check_text(job)
    _check_kind(job, description)
    description = assemble(description, job)
    files = file_digests(job)
    format = threads = None
    if recorded is not None:
        pictures = [("image", image), ("mask", mask), *(("control-image", g) for g in guides)]
        pictures += [("ip-image", prompt) for prompt in prompts]
        found = [(flag, p.path, p.sha256) for flag, p in pictures if p is not None]
        found += [(flag, path, digest) for path, (flag, digest) in files.items()]
        _compare(recorded, given, job, found, note)
        format = recorded.format
        threads = recorded.ran.get("threads") if _is_same(job, recorded) else None
    return Prepared(job, description, image, mask, format, guides, prompts, files, threads)


def choose_destination(
    prepared: Prepared, flags: dict[str, Any], note: Callable[[str], None]
) -> Destination:
    """Where the pictures of a prepared job go, found writable.

    Args:
        prepared: from `prepare`.
        flags: the same flags.
        note: receives sentences that the user should read.

    Raises:
        PictureError: the place cannot be written.
    """
    job, given = prepared.job, _given(flags)
    format = given.get("format")
    if format is None and "output" not in given:
        format = prepared.format
    destination = open_destination(
        given.get("output"),
        format,
        bool(given.get("overwrite")),
        job.num * (job.width * job.height * 3 + _OVERHEAD_BYTES),
    )
    if job.kind == "inpaint" and destination.format != "png":
        note(f"{destination.format} is lossy: pixels outside the mask change a little; use png")
    return destination


def _silent(text: str) -> None:
    """For notes that do not apply."""


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value not in (None, [], ())}


def _describe(settings: dict[str, Any], note: Callable[[str], None]) -> Any:
    """The description of the job's model, from its configurations; fills in the default model.

    Raises:
        CheckpointError: there is no such model, or it is broken.
    """
    from sdx_accel.runtime.checkpoints import describe

    if settings.get("model") is None:
        settings["model"] = DEFAULT_MODEL
        note(
            f"no model given: {DEFAULT_MODEL}, the small model of this package, which draws single "
            "things in the style of emoji; --model names another one"
        )
    return describe(settings["model"], config=settings.get("config"))


def _check_text(job: Job) -> None:
    for flag, text in (("the prompt", job.prompt), ("--negative", job.negative)):
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise RefusedError(
                f"{flag} has bytes that are not UTF-8; set the terminal to UTF-8 (for instance "
                "LC_ALL=C.UTF-8) or write it again"
            )


def _check_kind(job: Job, description: Any) -> None:
    """Refuse a job without the pictures that the model was made to start from."""
    name = description.pipeline_class
    if "ControlNet" in name:
        raise RefusedError(
            f"{job.model} is a model with its ControlNet ({name}): give the model alone with "
            "--model, and this one with --controlnet"
        )
    if "Inpaint" in name and job.kind != "inpaint":
        raise RefusedError(f"{job.model} repaints pictures ({name}): give --image and --mask")
    if "Img2Img" in name and job.image is None:
        raise RefusedError(f"{job.model} starts from a picture ({name}): give --image")


def _settings(given: dict[str, Any], recorded: Recorded | None, only_plan: bool) -> dict[str, Any]:
    """The job's fields known from the flags, then from the replayed picture."""
    for name in ("image", "mask", "config", "refiner"):
        if name in given and not str(given[name]).strip():
            raise RefusedError(f"--{name} is empty; name a file or leave it out")
    names = Job.__dataclass_fields__
    settings = {
        name: str(value) if isinstance(value, StrEnum) else value
        for name, value in given.items()
        if name in names
    }
    settings |= adapter_settings(given, recorded.job if recorded else None, only_plan)
    if "vram" in settings:
        settings["vram"] = parse_vram(settings["vram"])
    if "device" in settings:
        settings["device"] = parse_device(settings["device"])
    for name in ("image", "mask", "model", "config", "refiner"):
        # a replay may start in another folder; a model can also be a spec or a hub id
        if name == "model" and is_demo(settings.get(name)):
            continue
        if name in settings and (name in ("image", "mask") or os.path.exists(settings[name])):
            settings[name] = absolute(settings[name])
    if recorded is None:
        return settings
    replayed = recorded.job.to_dict()
    if "image" in settings:
        # another picture: its own size and mask, not those of the recorded one
        for name in ("width", "height", "mask"):
            del replayed[name]
    return {**replayed, **settings}


def _pictures(
    settings: dict[str, Any], note: Callable[[str], None]
) -> tuple[InputPicture | None, InputPicture | None]:
    if settings.get("image") is None:
        return None, None
    image = read_picture(settings["image"])
    mask = None if settings.get("mask") is None else read_mask(settings["mask"], image)
    for sentence in (*image.notes, *(mask.notes if mask else ())):
        note(sentence)
    return image, mask


def _check_inputs(recorded: Recorded, given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse a replay whose inputs are gone, with the flag that says where they are now."""
    single = [(name, settings.get(name)) for name in ("image", "mask")]
    parts = [
        (flag, part[key])
        for field, flag, key in (
            ("controlnets", "control-image", "image"),
            ("ip_adapters", "ip-image", "image"),
            ("ip_adapters", "ip-adapter", "path"),
            ("loras", "lora", "path"),
            ("embeddings", "embedding", "path"),
        )
        for part in settings.get(field, ())
    ]
    for flag, path in (*single, *parts):
        # only what was recorded as a file: random weights are none
        if path not in recorded.inputs or flag.replace("-", "_") in given or os.path.exists(path):
            continue
        kind = PictureError if flag.endswith(("image", "mask")) else CheckpointError
        raise kind(
            f"--from {recorded.path}: {path} is not there any more; give --{flag} with its "
            "new place"
        )


def _compare(
    recorded: Recorded,
    given: dict[str, Any],
    job: Job,
    found: list[tuple[str, str, str]],
    note: Callable[[str], None],
) -> None:
    """Say what would make a replay differ; refuse when an input file is another one.

    Args:
        found: (flag, path, sha256) of every file that the job reads.
    """
    for name, path, digest in found:
        if name.replace("-", "_") not in given and recorded.inputs.get(path, digest) != digest:
            kind = PictureError if name.endswith(("image", "mask")) else CheckpointError
            raise kind(
                f"--from {recorded.path}: {path} has changed since, so the result would "
                f"differ; give --{name} to use it as it is now"
            )
    now = versions()
    changed = [
        f"{name} {was} → {now.get(name, 'absent')}"
        for name, was in recorded.versions.items()
        if now.get(name) != was
    ]
    if changed and _is_same(job, recorded):
        note(f"versions differ from the recorded run ({', '.join(changed)}): pixels may too")


def _is_same(job: Job, recorded: Recorded) -> bool:
    return replace(job, num=1) == recorded.job
