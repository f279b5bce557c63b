"""The settings inside a picture: ours as JSON for replay, and the text that other tools read.

Knows PNG, JPEG and WEBP; knows nothing of how a picture is made. Everything is written so that a
viewer without any idea of this program shows the file as usual.
"""

import importlib.metadata
import json
import os
import platform
import warnings
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sdx_accel
from sdx_accel.cli.job import Job
from sdx_accel.errors import PictureError, RefusedError

if TYPE_CHECKING:
    from PIL.Image import Exif, Image

__all__ = ["Recorded", "encode_picture", "parameters_text", "read_record", "versions"]

KEY = "sdx_accel"
RECORD_FORMAT = 1
_IMAGE_DESCRIPTION = 0x010E
_EXIF_FOLDER = 0x8769
_USER_COMMENT = 0x9286
# a JPEG segment holds 65,533 bytes, EXIF header and tags included
_LARGEST_EXIF = 65_000
_PACKAGES = ("torch", "triton", "diffusers", "transformers", "accelerate", "peft")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a picture says about how it was made.

    Args:
        path: the picture.
        format: png, jpg or webp.
        job: the settings, for this one picture.
        inputs: sha256 by path of the input pictures and of the files added to the model.
        versions: by package, at that time.
        ran: device, dtype, scheduler, pipeline and CPU threads that were really used.
    """

    path: str
    format: str
    job: Job
    inputs: dict[str, str]
    versions: dict[str, str]
    ran: dict[str, Any]


def versions() -> dict[str, str]:
    """Installed versions by package, read from their metadata: nothing is imported."""
    found = {"sdx_accel": sdx_accel.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def parameters_text(job: Job, sampler: str) -> str:
    """The `parameters` text that other tools read: prompt, negative prompt, one settings line.

    Args:
        job: of a single picture.
        sampler: the scheduler's name.
    """
    pairs: dict[str, Any] = {
        "Steps": job.steps,
        "Sampler": sampler,
        "CFG scale": f"{job.guidance:g}",
        "Seed": job.seed,
        "Size": f"{job.width}x{job.height}",
        "Model": os.path.basename(job.model.rstrip("/\\")) or job.model,
    }
    if job.strength is not None:
        pairs["Denoising strength"] = f"{job.strength:g}"
    if job.loras:
        pairs["Lora"] = ", ".join(f"{Path(lora.path).stem}: {lora.scale:g}" for lora in job.loras)
    if job.embeddings:
        pairs["TI"] = ", ".join(part.token for part in job.embeddings)
    for index, net in enumerate(job.controlnets):
        pairs[f"ControlNet {index}"] = f"{Path(net.path).name}: {net.scale:g}"
    for index, adapter in enumerate(job.ip_adapters):
        pairs[f"IP-Adapter {index}"] = f"{Path(adapter.path).name}: {adapter.scale:g}"
    if job.refiner is not None:
        pairs["Refiner"] = os.path.basename(job.refiner.rstrip("/\\")) or job.refiner
        pairs["Refiner switch at"] = f"{job.refiner_start:g}"
    pairs["Version"] = f"sdx_accel {sdx_accel.__version__}"
    lines = [job.prompt]
    if job.negative:
        lines.append(f"Negative prompt: {job.negative}")
    lines.append(", ".join(f"{name}: {_quoted(value)}" for name, value in pairs.items()))
    return "\n".join(lines)


def encode_picture(
    picture: "Image", format: str, record: dict[str, Any], parameters: str
) -> tuple[bytes, str | None]:
    """The bytes of a picture file with its settings inside.

    Args:
        picture: RGB.
        format: png, jpg or webp.
        record: JSON-ready values with at least `settings`.
        parameters: from `parameters_text`.

    Returns:
        The file's bytes, and a sentence on what did not fit inside, or None.
    """
    from PIL.PngImagePlugin import PngInfo

    # ASCII JSON: every reader gets it right, whatever it takes the text's encoding to be
    text = json.dumps({"format": RECORD_FORMAT, **record})
    buffer = BytesIO()
    if format == "png":
        info = PngInfo()
        info.add_text("parameters", _printable(parameters))
        info.add_text(KEY, text)
        picture.save(buffer, "PNG", pnginfo=info)
        return buffer.getvalue(), None
    exif, note = _exif(picture, record, text, _printable(parameters))
    if format == "webp":
        picture.save(buffer, "WEBP", quality=95, method=4, exif=exif)
    else:
        picture.save(buffer, "JPEG", quality=95, subsampling=0, exif=exif)
    return buffer.getvalue(), note


def read_record(path: str) -> Recorded:
    """Read back what `encode_picture` wrote.

    Raises:
        PictureError: no such file, no picture, or a picture without usable settings.
    """
    text, other, format = _stored_text(path)
    if text is None:
        found = " (it has another tool's settings, which cannot be replayed)" if other else ""
        raise PictureError(
            f"--from {path}: the picture carries no sdx-accel settings{found}; give a PROMPT"
        )
    try:
        record = json.loads(text)
        if record["format"] > RECORD_FORMAT:
            raise PictureError(
                f"--from {path}: written by a newer sdx-accel; update this one to replay it"
            )
        job = Job.from_dict(record["settings"])
        return Recorded(
            path,
            format,
            job,
            inputs=dict(record.get("inputs", {})),
            versions=dict(record.get("versions", {})),
            ran=dict(record.get("ran", {})),
        )
    except PictureError:
        raise
    except (RefusedError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PictureError(f"--from {path}: its settings are damaged: {error}") from error


def _stored_text(path: str) -> tuple[str | None, bool, str]:
    """Our JSON or None, whether another tool's text is there, and the file's format."""
    from PIL import Image, UnidentifiedImageError

    try:
        # how large it is does not matter here: only its text is kept
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
            picture = Image.open(path)
        with picture:
            format = {"JPEG": "jpg", "WEBP": "webp"}.get(picture.format or "", "png")
            if picture.format == "PNG":
                picture.load()
                info: dict[Any, Any] = picture.info
                return info.get(KEY), "parameters" in info, format
            exif = picture.getexif()
            description = exif.get(_IMAGE_DESCRIPTION)
            ours = isinstance(description, str) and description.startswith("{")
            comment = exif.get_ifd(_EXIF_FOLDER).get(_USER_COMMENT)
            return description if ours else None, bool(comment), format
    except FileNotFoundError as error:
        raise PictureError(f"--from {path}: no such file") from error
    except UnidentifiedImageError as error:
        raise PictureError(f"--from {path} is not a picture") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise PictureError(f"--from {path} cannot be read: {error}") from error


def _exif(
    picture: "Image", record: dict[str, Any], text: str, parameters: str
) -> "tuple[Exif, str | None]":
    """Settings as EXIF; the plan, then the other tools' text, are left out where it is too much."""
    brief = json.dumps(
        {"format": RECORD_FORMAT, **{key: value for key, value in record.items() if key != "plan"}}
    )
    comment = b"UNICODE\0" + parameters.encode("utf-16-be")
    for description, extra, note in (
        (text, comment, None),
        (brief, comment, None),
        (brief, None, "the settings text for other tools did not fit into this format; use png"),
    ):
        exif = picture.__class__().getexif()
        exif[_IMAGE_DESCRIPTION] = description
        if extra is not None:
            exif.get_ifd(_EXIF_FOLDER)[_USER_COMMENT] = extra
        if len(exif.tobytes()) <= _LARGEST_EXIF:
            return exif, note
    empty = picture.__class__().getexif()
    return empty, "the settings did not fit into this format, so --from cannot replay it; use png"


def _quoted(value: Any) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(sign in text for sign in ',:"\n') else text


def _printable(text: str) -> str:
    """Lone surrogates, which no file format can hold, as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
