"""The demo model: a small SDXL that comes with this package and draws 128 × 128 pictures.

Knows where its files are and how they are loaded; how a pipeline runs is for the layers below.
What it was trained on and how it is judged: examples/train_demo_model and
docs/benchmarks/demo-model.md.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["load"]


def load(dtype: Any = None, device: Any = None) -> Any:
    """The demo model as a ready pipeline on the CPU, from files of this package alone.

    >>> pipe = sdx_accel.demo.load()
    >>> pipe("a red apple", num_inference_steps=20, guidance_scale=4).images[0]

    Args:
        dtype: ``"fp16"``, ``"bf16"``, ``"fp32"`` or a `torch.dtype`; ``"auto"`` is fp16 for a GPU
            and fp32 for a CPU; fp16 for a CPU becomes fp32. None: fp32, and ``"auto"`` where
            `device` is given.
        device: where it will run, which decides what ``"auto"`` means; nothing is moved there.

    Returns:
        A `diffusers.StableDiffusionXLPipeline`; pictures are best at its own 128 × 128 pixels.

    Raises:
        CheckpointError: a file of the package is missing or damaged.
        RefusedError: unknown dtype or device.
    """
    with _without_torchvision():
        from sdx_accel.runtime import checkpoints
        from sdx_accel.runtime.shipped import DEMO

        if dtype is None:
            dtype = "fp32" if device is None else "auto"
        return checkpoints.load(DEMO, dtype=dtype, device=device)


# diffusers imports these two for IP-Adapters, which bring an encoder of their own
_FALLBACK = re.compile(r"`(CLIP|Siglip)ImageProcessor` requires torchvision \(not installed\)")


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Drop the two lines on torchvision that importing SDXL's pipeline makes transformers print.

    Nobody who has installed this package as told has torchvision or needs it. Everything else that
    transformers says is kept.
    """

    def keep(record: logging.LogRecord) -> bool:
        return _FALLBACK.match(record.getMessage()) is None

    log = logging.getLogger("transformers.utils.import_utils")
    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)
