"""Reads input pictures of every common kind into plain RGB, and masks into plain grey.

Knows Pillow; knows nothing of models. A four-channel picture never leaves this file: diffusers
would take it for latents.
"""

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdx_accel.errors import PictureError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["InputPicture", "read_mask", "read_picture"]


@dataclass(frozen=True, slots=True)
class InputPicture:
    """A picture from a file.

    Args:
        path: where it came from.
        picture: mode RGB (picture) or L (mask), upright.
        sha256: of the file's bytes; a replay compares it.
        notes: what was changed on reading, one sentence each.
    """

    path: str
    picture: "Image"
    sha256: str
    notes: tuple[str, ...] = ()

    def resized(self, width: int, height: int) -> "Image":
        """The picture in that size; masks keep hard edges."""
        from PIL import Image

        if self.picture.size == (width, height):
            return self.picture
        how = Image.Resampling.NEAREST if self.picture.mode == "L" else Image.Resampling.LANCZOS
        return self.picture.resize((width, height), how)


def read_picture(path: str, flag: str = "--image") -> InputPicture:
    """Read any picture file as upright RGB; transparency is composited over white.

    Args:
        path: the file.
        flag: what named it, for messages.

    Raises:
        PictureError: the file is missing, broken, too large or no picture.
    """
    opened, digest = _open(path, flag)
    notes = _first_notes(opened, path)
    return InputPicture(path, _to_rgb(_upright(opened), path, notes), digest, tuple(notes))


def read_mask(path: str, image: InputPicture) -> InputPicture:
    """Read a mask of the same size as its picture: white is repainted, black is kept.

    Raises:
        PictureError: the file cannot be read, or its size differs from the picture's.
    """
    opened, digest = _open(path, "--mask")
    notes = _first_notes(opened, path)
    mask = _to_rgb(_upright(opened), path, notes).convert("L")
    if mask.size != image.picture.size:
        (width, height), (wanted_width, wanted_height) = mask.size, image.picture.size
        raise PictureError(
            f"--mask {path} is {width} × {height} pixels and --image {image.path} is "
            f"{wanted_width} × {wanted_height}: they have to be the same size"
        )
    if mask.getbbox() is None:
        notes.append(f"{path} is black all over: nothing is repainted")
    return InputPicture(path, mask, digest, tuple(notes))


def _open(path: str, flag: str) -> "tuple[Image, str]":
    from io import BytesIO

    from PIL import Image, UnidentifiedImageError

    try:
        data = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise PictureError(f"{flag} {path}: no such file") from error
    except OSError as error:
        raise PictureError(f"{flag} {path} cannot be read: {error.strerror}") from error
    try:
        with warnings.catch_warnings():
            # said as one of our notes instead
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(BytesIO(data))
            opened.load()
    except UnidentifiedImageError as error:
        raise PictureError(
            f"{flag} {path} is not a picture that can be read here; use PNG, JPEG or WEBP"
        ) from error
    except (Image.DecompressionBombError, MemoryError) as error:
        raise PictureError(f"{flag} {path} is too large a picture; make it smaller") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise PictureError(f"{flag} {path} is broken or cut short: {error}") from error
    return opened, hashlib.sha256(data).hexdigest()


def _first_notes(opened: "Image", path: str) -> list[str]:
    from PIL import Image

    notes = []
    if getattr(opened, "n_frames", 1) > 1:
        notes.append(f"{path} has several frames: the first one is used")
    if Image.MAX_IMAGE_PIXELS is not None and opened.width * opened.height > Image.MAX_IMAGE_PIXELS:
        notes.append(
            f"{path} is unusually large ({opened.width} × {opened.height} pixels) and takes "
            "memory and time to read"
        )
    return notes


def _upright(picture: "Image") -> "Image":
    from PIL import ImageOps

    return ImageOps.exif_transpose(picture)


def _to_rgb(picture: "Image", path: str, notes: list[str]) -> "Image":
    from PIL import Image

    if picture.mode.startswith(("I", "F")):
        return _deep_to_rgb(picture)
    transparent = "A" in picture.mode or "a" in picture.mode or "transparency" in picture.info
    if picture.mode == "LAB" or not transparent:
        return picture.convert("RGB")
    # premultiplied modes (La, RGBa) only convert to their plain twins
    plain = picture.convert("LA" if picture.mode == "La" else "RGBA").convert("RGBA")
    if plain.getchannel("A").getextrema() == (255, 255):
        return plain.convert("RGB")
    notes.append(f"{path} has transparent parts: they are shown over white")
    white = Image.new("RGBA", plain.size, "white")
    return Image.alpha_composite(white, plain).convert("RGB")


def _deep_to_rgb(picture: "Image") -> "Image":
    """16-bit, 32-bit and floating-point grey: Pillow's own conversion would clip it to white."""
    import numpy as np
    from PIL import Image

    values = np.asarray(picture).astype(np.float64)
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    if picture.mode == "F":
        scale = 255.0 if values.max(initial=0.0) <= 1.0 else 1.0
    elif picture.mode == "I" and values.max(initial=0.0) <= 255:
        # 32-bit integers that hold an 8-bit picture; a 16-bit file opens in another mode
        scale = 1.0
    else:
        # 0…65535 is what a 16-bit file holds, whatever Pillow calls the mode
        scale = 255.0 / 65535.0
    grey = np.clip(np.rint(values * scale), 0, 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")
