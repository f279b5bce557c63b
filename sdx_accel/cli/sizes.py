"""Which picture sizes a model can do. Pure arithmetic."""

from sdx_accel.errors import SizeError

__all__ = ["check_size", "nearest_sizes"]

# the VAE halves a picture three times: anything that 8 does not divide would be rounded silently
MULTIPLE = 8
# above this, diffusers' 32-bit pixel offsets and every budget here are out of reach anyway
LARGEST = 16384


def nearest_sizes(pixels: int, multiple: int = MULTIPLE) -> tuple[int, ...]:
    """The nearest valid sizes below and above `pixels`; one where only one exists.

    Args:
        pixels: the size asked for.
        multiple: what a valid size is divisible by.
    """
    below = min(pixels // multiple, LARGEST // multiple) * multiple
    above = below if below == pixels else below + multiple
    return tuple(sorted({size for size in (below, above) if multiple <= size <= LARGEST})) or (
        multiple,
    )


def check_size(width: int, height: int, multiple: int = MULTIPLE, subject: str = "") -> None:
    """Refuse a size that the model cannot do.

    Args:
        width: pixels.
        height: pixels.
        multiple: what both must be divisible by.
        subject: what has the size, for instance the name of an input picture; "" = the flags.

    Raises:
        SizeError: naming the two nearest valid sizes of each side that is wrong.
    """
    wrong = [
        f"--{name} {' or '.join(str(size) for size in nearest_sizes(pixels, multiple))}"
        for name, pixels in (("width", width), ("height", height))
        if pixels % multiple or not 0 < pixels <= LARGEST
    ]
    if wrong:
        what = f"{subject} is {width} × {height} pixels" if subject else f"{width} × {height}"
        raise SizeError(
            f"{what}: a size has to be a multiple of {multiple}, at most {LARGEST}; "
            f"use {' and '.join(wrong)}"
        )
