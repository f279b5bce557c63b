"""Which device a job runs on. The only place of the command line that asks torch for devices."""

from sdx_accel.errors import RefusedError

__all__ = ["pick_device"]


def pick_device(requested: str) -> str:
    """The device for auto, cpu, cuda or cuda:N.

    Args:
        requested: as checked by `flags.parse_device`.

    Returns:
        "cpu" or "cuda:N".

    Raises:
        RefusedError: there is no such device; the message says what there is.
    """
    import torch

    if requested == "cpu":
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "auto":
        return f"cuda:{torch.cuda.current_device()}" if count else "cpu"
    if not count:
        raise RefusedError(
            f"--device {requested}: torch sees no NVIDIA GPU here; leave --device out to use the "
            "CPU, or run `sdx-accel doctor` to see why"
        )
    number = int(requested.partition(":")[2] or torch.cuda.current_device())
    if number >= count:
        there = ", ".join(f"cuda:{index}" for index in range(count))
        raise RefusedError(f"--device {requested}: there is no such GPU; there is {there}")
    return f"cuda:{number}"
