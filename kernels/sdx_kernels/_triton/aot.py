"""Every kernel compiled for GPUs that are not here: tensor cores, spills, shared memory.

It knows which kernels there are; it must not run anything or ask a device. Triton cannot compile
in a process that interprets, so run it in one without TRITON_INTERPRET:
`python -m sdx_kernels._triton.aot 86 90` prints a JSON line for every launch configuration, and
`86:forward` those of one family; `--first` only the first of each family.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdx_kernels._triton.aot_compile import Launch, compile_launch
from sdx_kernels._triton.attention_bwd_aot import backward_launches
from sdx_kernels._triton.attention_fwd_aot import forward_launches
from sdx_kernels._triton.attention_special_aot import short_launches, tma_launches, wide_launches
from sdx_kernels.tuning.attention import SHARED_MEMORY

__all__ = ["ARCHITECTURES", "FAMILIES", "facts", "launches"]

#: cards whose kernels are checked; sm_75 has no tensor-core path in Triton and is refused
ARCHITECTURES = (80, 86, 89, 90, 100, 120)

FAMILIES: dict[str, Callable[[int], Iterator[Launch]]] = {
    "forward": forward_launches,
    "backward": backward_launches,
    "wide": wide_launches,
    "short": short_launches,
    "tma": tma_launches,
}


def launches(architecture: int, families: tuple[str, ...] = ()) -> Iterator[Launch]:
    """What dispatch may launch on an architecture, by family; default: all of them."""
    for family in families or FAMILIES:
        yield from FAMILIES[family](architecture)


def facts(launch: Launch, architecture: int) -> dict[str, Any]:
    """What a launch becomes, and whether it is clean: no spill, and within the card's limits."""
    made = compile_launch(launch, architecture)
    clean = (
        (bool(made.tensor_core) or not launch.tensor_core)
        and made.spill_bytes == 0
        and made.shared_bytes <= SHARED_MEMORY[divmod(architecture, 10)]
        and (launch.family != "tma" or made.descriptor_loads > 0)
    )
    return {"family": launch.family, **launch.key, **asdict(made), "clean": clean}


def main(arguments: list[str]) -> None:
    """Prints a JSON line for every launch that the arguments name."""
    first = "--first" in arguments
    for argument in (a for a in arguments if a != "--first"):
        number, _, family = argument.partition(":")
        seen: set[str] = set()
        for launch in launches(int(number), (family,) if family else ()):
            if not (first and launch.family in seen):
                print(json.dumps(facts(launch, int(number))), flush=True)
            seen.add(launch.family)


def source_files() -> list[Path]:
    """The files that decide what is compiled: kernels, launchers and tables."""
    here = Path(__file__).parent
    return sorted([*here.glob("attention_*.py"), *(here.parent / "tuning").glob("attention*.py")])


if __name__ == "__main__":
    main(sys.argv[1:])
