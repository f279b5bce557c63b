"""One picture job: every setting that decides the pixels, checked, frozen, JSON in and out.

Knows values and their limits; knows nothing of files, models or how a job is run.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from sdx_accel.cli.adapter_flags import PARTS, ControlNet, Embedding, IpAdapter, Lora
from sdx_accel.cli.flags import Dtype, parse_device, parse_ram, parse_vram, refuse_unbuilt
from sdx_accel.cli.sizes import check_size
from sdx_accel.errors import RefusedError

__all__ = ["Job"]

LARGEST_SEED = 2**63 - 1
# the training schedule of every model built here has 1000 timesteps
MOST_STEPS = 1000
# a limit that does not hang on the seed, which is often drawn by chance
MOST_PICTURES = 1_000_000


@dataclass(frozen=True, slots=True)
class Job:
    """What to make.

    Args:
        prompt: what the picture shows.
        model: spec, folder, hub id or single file.
        width: pixels, a multiple of 8.
        height: pixels, a multiple of 8.
        steps: denoising steps, 1…1000.
        guidance: classifier-free guidance; 1 or less means none, and no negative prompt then.
        seed: of the first picture; picture i has seed + i.
        num: how many pictures, 1…1000000, made one after the other.
        negative: what the picture shall not show; "" = none.
        loras: LoRA files with their scales.
        controlnets: ControlNets with their scales and pictures.
        ip_adapters: IP-Adapters with their scales and pictures.
        embeddings: textual inversions and their words.
        image: absolute path of the picture to start from, or None.
        mask: absolute path of the mask (white = repaint), or None.
        strength: how much of `image` is replaced, above 0 and at most 1; None without `image`.
        refiner: SDXL refiner that does the last steps, or None.
        refiner_start: how much of the noise its base removes, between 0 and 1; None without it.
        dtype: auto, fp16, bf16 or fp32.
        device: auto, cpu, cuda or cuda:N.
        scheduler: a scheduler's name, None = the model's own.
        vram: the budget as text, None = auto on a GPU.
        quality: exact or near.
        config: configuration folder for a single-file model, or None.
        ram: host memory that weights may take, as text; None = not limited.

    Raises:
        RefusedError: a value is outside its range; SizeError for a size.
    """

    prompt: str
    model: str
    width: int
    height: int
    steps: int
    guidance: float
    seed: int
    num: int = 1
    negative: str = ""
    loras: tuple[Lora, ...] = ()
    controlnets: tuple[ControlNet, ...] = ()
    ip_adapters: tuple[IpAdapter, ...] = ()
    embeddings: tuple[Embedding, ...] = ()
    image: str | None = None
    mask: str | None = None
    strength: float | None = None
    refiner: str | None = None
    refiner_start: float | None = None
    dtype: str = "auto"
    device: str = "auto"
    scheduler: str | None = None
    vram: str | None = None
    quality: str = "exact"
    config: str | None = None
    ram: str | None = None

    def __post_init__(self) -> None:
        check_size(self.width, self.height)
        _check_range("--steps", self.steps, 1, MOST_STEPS)
        _check_range("--seed", self.seed, 0, LARGEST_SEED)
        _check_range("--num", self.num, 1, MOST_PICTURES)
        if self.seed + self.num - 1 > LARGEST_SEED:
            raise RefusedError(
                f"--num {self.num} counts the seed {self.seed} up past {LARGEST_SEED}; use --seed "
                f"{LARGEST_SEED - self.num + 1} or less"
            )
        if not (math.isfinite(self.guidance) and self.guidance >= 0):
            raise RefusedError(f"--guidance {self.guidance}: use a number from 0 up, such as 5")
        if self.dtype not in tuple(Dtype):
            raise RefusedError(f"--dtype {self.dtype!r} is not one of {', '.join(Dtype)}")
        refuse_unbuilt({"quality": self.quality})
        parse_device(self.device)
        if self.vram is not None:
            parse_vram(self.vram)
        if self.ram is not None:
            parse_ram(self.ram)
        self._check_pictures()
        self._check_refiner()

    def _check_pictures(self) -> None:
        if self.image is None:
            if self.mask is not None:
                raise RefusedError("--mask says where to repaint a picture; give --image too")
            if self.strength is not None:
                raise RefusedError("--strength says how much of a picture to replace; give --image")
            return
        if self.strength is None or not 0 < self.strength <= 1:
            raise RefusedError(f"--strength {self.strength}: use a number above 0, at most 1")
        if int(self.steps * self.strength) < 1:
            raise RefusedError(
                f"--steps {self.steps} with --strength {self.strength:g} leaves no step to do; "
                f"use --steps {math.ceil(1 / self.strength)} or more"
            )

    def _check_refiner(self) -> None:
        if self.refiner is None:
            if self.refiner_start is not None:
                raise RefusedError("--refiner-start belongs to --refiner; give --refiner too")
            return
        if self.refiner_start is None or not 0 < self.refiner_start < 1:
            raise RefusedError(
                f"--refiner-start {self.refiner_start}: use a number between 0 and 1, such as 0.8"
            )
        if self.image is not None:
            raise RefusedError(
                "--refiner finishes pictures that are made from a prompt; leave --image or "
                "--refiner out"
            )
        if self.controlnets:
            raise RefusedError(
                "--refiner with --controlnet is not built yet; built: --refiner with --lora, "
                "--embedding and --ip-adapter, or --controlnet alone"
            )

    @property
    def kind(self) -> str:
        """`text`, `image` or `inpaint`: which pipeline makes it."""
        if self.image is None:
            return "text"
        return "image" if self.mask is None else "inpaint"

    @property
    def guided(self) -> bool:
        """Whether the UNet runs twice a step; diffusers counts 1 and less as no guidance."""
        return self.guidance > 1

    def single(self, index: int) -> "Job":
        """The job that makes picture `index` alone, pixel for pixel."""
        return replace(self, seed=self.seed + index, num=1)

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON-ready values."""
        values = asdict(self)
        return {**values, **{name: list(values[name]) for name in PARTS}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Job":
        """Inverse of `to_dict`; keys of newer versions are ignored.

        Raises:
            RefusedError: a value has the wrong type, or a setting is missing or out of range.
        """
        if not isinstance(values, dict):
            raise RefusedError("the settings are no table of names and values")
        known = {field.name: field.type for field in fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        for name, value in kept.items():
            if name not in PARTS and not _is_a(value, str(known[name])):
                raise RefusedError(f"the setting {name} cannot be {value!r}")
        try:
            parts = {
                name: tuple(_part(kind, part) for part in kept.get(name, ()))
                for name, kind in PARTS.items()
            }
            return cls(**{**kept, **parts})
        except (TypeError, KeyError) as error:
            raise RefusedError(f"the settings are incomplete: {error}") from error


def _part(kind: type[Any], values: Any) -> Any:
    """A LoRA, ControlNet, … from its JSON values; all but those with a default are needed."""
    if not isinstance(values, dict):
        raise TypeError(f"{kind.__name__} that is {values!r}")
    known = {field.name: str(field.type) for field in fields(kind)}
    kept = {name: value for name, value in values.items() if name in known}
    for name, value in kept.items():
        if not _is_a(value, known[name]):
            raise TypeError(f"{kind.__name__} with {name} {value!r}")
    if "scale" in known:
        kept["scale"] = float(kept["scale"])
    return kind(**kept)


def _check_range(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RefusedError(f"{flag} {value}: use a whole number from {low} to {high}")


def _is_a(value: Any, annotation: str) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "float": (int, float),
        "None": (type(None),),
    }
    allowed = [kind for part in _annotation_parts(annotation) for kind in kinds[part]]
    return not isinstance(value, bool) and isinstance(value, tuple(allowed))


def _annotation_parts(annotation: str) -> list[str]:
    # a plain class prints as "<class 'int'>", a union as "str | None"
    if annotation.startswith("<class '"):
        return [annotation[len("<class '") : -2]]
    return annotation.split(" | ")
