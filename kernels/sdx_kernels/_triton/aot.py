"""Every kernel compiled for GPUs that are not here: tensor cores, spills, shared memory.

It knows which kernels there are; it must not run anything or ask a device. Triton cannot compile
in a process that interprets, so run it in one without TRITON_INTERPRET:
`python -m sdx_kernels._triton.aot 86 90` prints a JSON line for every launch configuration, and
`86:forward` those of one family; `--first` only the first of each. `--record FILE` also writes
what was found into a file that tests hold against the sources.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton

from sdx_kernels._triton.aot_compile import Launch, compile_launch
from sdx_kernels._triton.attention_bwd_aot import backward_launches
from sdx_kernels._triton.attention_fwd_aot import forward_launches
from sdx_kernels._triton.attention_special_aot import short_launches, tma_launches, wide_launches
from sdx_kernels._triton.attention_tma_bwd_aot import tma_backward_launches
from sdx_kernels.tuning.attention import SHARED_MEMORY

__all__ = ["ARCHITECTURES", "DESCRIPTORS", "FAMILIES", "digest", "facts", "launches", "record"]

#: cards whose kernels are checked; sm_75 has no tensor-core path in Triton and is refused
ARCHITECTURES = (80, 86, 89, 90, 100, 120)

FAMILIES: dict[str, Callable[[int], Iterator[Launch]]] = {
    "forward": forward_launches,
    "backward": backward_launches,
    "wide": wide_launches,
    "short": short_launches,
    "tma": tma_launches,
    "attention-tma-bwd": tma_backward_launches,
}

#: families that load through tensor descriptors, and so have nothing below sm_90
DESCRIPTORS = ("tma", "attention-tma-bwd")

#: the device code of a family, relative to this file
SOURCES: dict[str, tuple[str, ...]] = {
    "forward": ("attention_fwd*.py", "attention_parts.py"),
    "backward": ("attention_bwd*.py", "attention_parts.py"),
    "wide": ("attention_wide*.py",),
    "short": ("attention_short.py",),
    "tma": ("attention_tma.py",),
    "attention-tma-bwd": ("attention_tma_bwd*.py", "attention_bwd_parts.py"),
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
        and (
            launch.family not in DESCRIPTORS or not launch.tensor_core or made.descriptor_loads > 0
        )
    )
    return {"family": launch.family, **launch.key, **asdict(made), "clean": clean}


def digest(family: str, architecture: int) -> str:
    """Sixteen hex digits of all that decides what a family's launches compile to on a card.

    The code, and each launch with its compile-time arguments: a table's new step for one card asks
    for nothing on the others.
    """
    everything = hashlib.sha256()
    for pattern in SOURCES[family]:
        found = sorted(Path(__file__).parent.glob(pattern))
        assert found, pattern
        for file in found:
            everything.update(file.name.encode() + file.read_bytes())
    for launch in launches(architecture, (family,)):
        source = launch.source
        parts = (launch.key, source.signature, source.constants, source.attrs)
        limit = f" {launch.registers}" if launch.registers else ""
        everything.update(f"{parts} {launch.num_warps} {launch.num_stages}{limit}".encode())
    return everything.hexdigest()[:16]


def record(file: Path, found: list[dict[str, Any]]) -> None:
    """Adds complete runs of families to a record, with Triton's version and the sources' digest.

    Args:
        file: JSON, made where it is missing.
        found: facts of every launch of one or more (architecture, family) pairs.
    """
    known = json.loads(file.read_text()) if file.exists() else {}
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for fact in found:
        runs.setdefault((fact["family"], str(fact["architecture"])), []).append(fact)
    for (family, architecture), facts_of_run in runs.items():
        known.setdefault(family, {})[architecture] = {
            "triton": triton.__version__,
            "sources": digest(family, int(architecture)),
            "launches": len(facts_of_run),
            "not_clean": [fact for fact in facts_of_run if not fact["clean"]],
        }
    file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main(arguments: list[str]) -> None:
    """Prints a JSON line for every launch that the arguments name."""
    first = "--first" in arguments
    file = arguments[arguments.index("--record") + 1] if "--record" in arguments else None
    found = []
    for argument in (a for a in arguments if not a.startswith("--") and a != file):
        number, _, family = argument.partition(":")
        seen: set[str] = set()
        for launch in launches(int(number), (family,) if family else ()):
            if not (first and launch.family in seen):
                found.append(facts(launch, int(number)))
                print(json.dumps(found[-1]), flush=True)
            seen.add(launch.family)
    if file is not None and not first:
        record(Path(file), found)


if __name__ == "__main__":
    main(sys.argv[1:])
