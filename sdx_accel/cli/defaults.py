"""Settings that the user left out: taken from the model, from the input picture, or by chance.

Knows numbers and sizes; reads no files.
"""

import secrets
from collections.abc import Callable
from typing import Any

from sdx_accel.cli.pictures_in import InputPicture
from sdx_accel.cli.sizes import check_size, nearest_sizes
from sdx_accel.runtime.schedulers import FEW_STEPS, check_steps
from sdx_accel.runtime.shipped import DEMO, is_demo

__all__ = ["DEFAULT_MODEL", "fill_defaults"]

DEFAULT_MODEL = DEMO
DEFAULT_STRENGTH = 0.6
# the share that the refiner's authors leave to it
DEFAULT_REFINER_START = 0.8
DEFAULT_STEPS = 20
# the tiny model shows noise after any number of steps
TINY_STEPS = 4
# what the authors of LCM, SDXL-Lightning and SDXL-Turbo show: more steps change little
FEW, MOST_OF_FEW = 4, 8
NO_GUIDANCE = 1.0
# judged best by docs/benchmarks/demo-model.md: above 5.5 the white border suffers
GUIDANCE_DEMO = 4.0
# what the pipelines of diffusers take by themselves, by a part of their names
GUIDANCE = {"XL": 5.0, "Flux": 3.5, "StableDiffusion3": 7.0, "PixArt": 4.5}
GUIDANCE_OTHER = 7.5


def fill_defaults(
    settings: dict[str, Any],
    description: Any,
    image: InputPicture | None,
    note: Callable[[str], None],
    guide: InputPicture | None = None,
) -> None:
    """Complete the settings with what depends on the model or on the input picture.

    Args:
        settings: the job's fields by name; completed in place.
        description: the model's.
        image: the picture to start from, or None.
        guide: the picture that a ControlNet follows, or None: without `image` it gives the size.
        note: receives sentences that the user should read.

    Raises:
        SizeError: the picture's own size is one that the model cannot do.
        RefusedError: an unknown scheduler, or more steps than it can do.
    """
    flag = "--image" if guide is None or image is not None else "--control-image"
    _fill_size(settings, description, image or guide, flag, note)
    _demo_size_note(settings, description, note)
    scheduler = str(settings.get("scheduler") or "").strip().lower()
    # of the models that embed their guidance, LCM's need few steps and Flux's the usual number
    few = scheduler in FEW_STEPS or (
        description.embeds_guidance and "Flux" not in description.pipeline_class
    )
    if settings.get("steps") is None:
        tiny = str(settings["model"]).endswith("-tiny")
        settings["steps"] = FEW if few else TINY_STEPS if tiny else DEFAULT_STEPS
    if settings.get("scheduler") is not None:
        check_steps(scheduler, settings["steps"])
    if scheduler in FEW_STEPS and not description.embeds_guidance:
        if settings.get("guidance") is None:
            settings["guidance"] = NO_GUIDANCE
        _few_step_notes(settings, scheduler, FEW_STEPS[scheduler], note)
    elif settings.get("guidance") is None:
        settings["guidance"] = _usual_guidance(str(settings["model"]), description)
    if settings.get("seed") is None:
        settings["seed"] = secrets.randbelow(2**32)
    settings["guidance"] = float(settings["guidance"])
    if image is not None and settings.get("strength") is None:
        settings["strength"] = DEFAULT_STRENGTH
    if settings.get("refiner") is not None and settings.get("refiner_start") is None:
        settings["refiner_start"] = DEFAULT_REFINER_START
    if settings["guidance"] <= 1 and settings.get("negative"):
        note(
            f"guidance {settings['guidance']:g} means no guidance, so the negative prompt is "
            "ignored; use --guidance above 1"
        )
        settings["negative"] = ""
    if description.embeds_guidance and settings.get("negative"):
        note(
            "this model has its guidance distilled into it, so the negative prompt is ignored; "
            "leave it out"
        )
        settings["negative"] = ""


def _usual_guidance(model: str, description: Any) -> float:
    if is_demo(model):
        return GUIDANCE_DEMO
    kind = description.pipeline_class
    return next((value for part, value in GUIDANCE.items() if part in kind), GUIDANCE_OTHER)


def _few_step_notes(
    settings: dict[str, Any], scheduler: str, most: float, note: Callable[[str], None]
) -> None:
    """Say where settings are not what models of this kind were distilled for."""
    if settings["guidance"] > most:
        usual = "without guidance" if most <= 1 else f"with a guidance of 1 to {most:g}"
        note(
            f"--guidance {settings['guidance']:g} with --scheduler {scheduler}: such models are "
            f"made to run {usual}, and above 1 every step takes two predictions; use --guidance 1"
        )
    if settings["steps"] > MOST_OF_FEW:
        note(
            f"--steps {settings['steps']} with --scheduler {scheduler}: such models are made for "
            f"{FEW} to {MOST_OF_FEW} steps"
        )


def _fill_size(
    settings: dict[str, Any],
    description: Any,
    image: InputPicture | None,
    flag: str,
    note: Callable[[str], None],
) -> None:
    width: Any = settings.get("width")
    height: Any = settings.get("height")
    if image is None:
        settings["width"] = description.default_width if width is None else width
        settings["height"] = description.default_height if height is None else height
        return
    own_width, own_height = image.picture.size
    if width is None and height is None:
        check_size(own_width, own_height, subject=f"{flag} {image.path}")
        width, height = own_width, own_height
    elif width is None:
        width = _nearest(own_width * height / own_height)
    elif height is None:
        height = _nearest(own_height * width / own_width)
    if (width, height) != (own_width, own_height):
        note(f"{image.path} is resized from {own_width} × {own_height} to {width} × {height}")
    settings["width"], settings["height"] = width, height


def _demo_size_note(
    settings: dict[str, Any], description: Any, note: Callable[[str], None]
) -> None:
    """The demo model has seen one size only; at 256 × 256 an apple is a red square with lugs."""
    own = description.default_width, description.default_height
    size = settings["width"], settings["height"]
    if is_demo(settings["model"]) and size != own:
        note(
            f"the demo model was trained at {own[0]} × {own[1]} alone: at {size[0]} × {size[1]} "
            f"shapes stretch or repeat; use --width {own[0]} --height {own[1]}"
        )


def _nearest(pixels: float) -> int:
    return min(nearest_sizes(round(pixels)), key=lambda size: abs(size - pixels))
