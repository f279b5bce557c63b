"""What a job adds to its model, checked before any weights are read.

Knows files and descriptions; nothing of flags' spelling, and loads no model.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sdx_accel.cli.adapter_flags import Lora, absolute, parse_embedding
from sdx_accel.cli.job import Job
from sdx_accel.cli.pictures_in import InputPicture, read_picture
from sdx_accel.errors import CheckpointError, RefusedError

__all__ = ["assemble", "file_digests", "in_canonical_order", "name_embeddings", "read_pictures"]


def read_pictures(
    parts: Iterable[dict[str, Any]], flag: str, note: Callable[[str], None]
) -> tuple[InputPicture, ...]:
    """The pictures of ControlNets or IP-Adapters, in their order.

    Args:
        parts: as in a job's settings; those without a picture (a plan needs none) are left out.
        flag: what named the pictures, for messages.
        note: receives sentences that the user should read.

    Raises:
        PictureError: one cannot be read.
    """
    paths = [part["image"] for part in parts if part["image"] is not None]
    pictures = tuple(read_picture(path, flag) for path in paths)
    for picture in pictures:
        for sentence in picture.notes:
            note(sentence)
    return pictures


def name_embeddings(
    texts: Iterable[str], prompts: Iterable[str], note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The parts of a job that --embedding asks for, each with its word.

    Args:
        texts: FILE or FILE:TOKEN.
        prompts: what the job says; a word that is in none of them changes nothing.
        note: receives sentences that the user should read.

    Raises:
        RefusedError: a file or word that cannot be used, or one word twice.
    """
    from sdx_accel.runtime.textual_inversion import embedding_token

    found: dict[str, str] = {}
    said = " ".join(prompts)
    for text in texts:
        path, wanted = parse_embedding(text)
        path = absolute(path)
        token = embedding_token(path, wanted)
        if token in found:
            raise RefusedError(
                f"--embedding {path} and {found[token]} are both called {token!r}; name one of "
                "them otherwise: --embedding FILE:TOKEN"
            )
        found[token] = path
        if token not in said:
            note(f"{token!r}, the word for {path}, is in neither prompt: it changes nothing")
    return [{"path": path, "token": token} for token, path in found.items()]


def assemble(description: Any, job: Job) -> Any:
    """The description of the model with everything that the job adds.

    Args:
        description: the model's own.
        job: the settings.

    Raises:
        CheckpointError: something is missing, broken, or was made for another model.
    """
    from sdx_accel.runtime.assembly import assembled
    from sdx_accel.runtime.loras import check_lora_file
    from sdx_accel.runtime.refiner import check_stages

    for lora in job.loras:
        check_lora_file(lora.path)
    description = assembled(
        description,
        loras=[lora.path for lora in in_canonical_order(job.loras)],
        embeddings=[part.path for part in job.embeddings],
        ip_adapters=[adapter.path for adapter in job.ip_adapters],
        refiner=job.refiner,
        controlnets=[net.path for net in job.controlnets],
        kind=job.kind,
    )
    if job.refiner_start is not None:
        check_stages(description, job.scheduler, job.steps, job.refiner_start)
    return description


def in_canonical_order(loras: tuple[Lora, ...]) -> list[Lora]:
    """LoRAs as they are loaded: by contents and scale, so that the flags' order changes no bit.

    A layer adds them up one after the other, and sums are rounded at each step.
    """
    from sdx_accel.runtime.loras import lora_file

    return sorted(loras, key=lambda lora: (_digest("--lora", lora_file(lora.path)), lora.scale))


def file_digests(job: Job) -> dict[str, tuple[str, str]]:
    """(flag, sha256) by path of every file that the job adds to its model.

    Raises:
        CheckpointError: one cannot be read.
    """
    from sdx_accel.runtime.ip_adapters import adapter_file
    from sdx_accel.runtime.loras import lora_file

    files = [("lora", lora.path, lora_file(lora.path)) for lora in job.loras]
    files += [("embedding", part.path, Path(part.path)) for part in job.embeddings]
    for adapter in job.ip_adapters:
        # random weights are no file
        if (path := adapter_file(adapter.path)) is not None:
            files.append(("ip-adapter", adapter.path, path))
    return {source: (flag, _digest(f"--{flag}", path)) for flag, source, path in files}


def _digest(flag: str, path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{flag} {path} cannot be read: {error}") from error
