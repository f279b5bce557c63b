"""Every kernel compiled for GPUs that are not here: tensor cores, spills, shared memory.

It knows which kernels there are; it must not run anything or ask a device. Triton cannot compile
in a process that interprets, so run it in one without TRITON_INTERPRET:
`python -m sdx_kernels._triton.aot 86 90` prints a JSON line for every launch configuration of
attention, and `86:group-norm` those of one family; `--first` only the first of each family,
`--kernels` of each kernel, and `--sample N` as many drawn once and for all. `--record FILE` also
writes what was found into a file that tests hold against the sources.
"""

import argparse
import ast
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton

from sdx_kernels._triton.aot_compile import Launch, compile_launch
from sdx_kernels._triton.attention_bwd_aot import backward_launches
from sdx_kernels._triton.attention_fwd_aot import forward_launches
from sdx_kernels._triton.attention_special_aot import short_launches, tma_launches, wide_launches
from sdx_kernels._triton.attention_tma_bwd_aot import tma_backward_launches
from sdx_kernels._triton.group_norm_aot import group_norm_launches
from sdx_kernels.tuning.attention import SHARED_MEMORY

__all__ = [
    "ARCHITECTURES",
    "ATTENTION",
    "DESCRIPTORS",
    "ELEMENTWISE",
    "FAMILIES",
    "architectures",
    "digest",
    "facts",
    "first_of_kernels",
    "launches",
    "record",
    "sample",
]

#: cards whose attention kernels are checked; sm_75 has no tensor-core path in Triton and is refused
ARCHITECTURES = (80, 86, 89, 90, 100, 120)

FAMILIES: dict[str, Callable[[int], Iterator[Launch]]] = {
    "forward": forward_launches,
    "backward": backward_launches,
    "wide": wide_launches,
    "short": short_launches,
    "tma": tma_launches,
    "attention-tma-bwd": tma_backward_launches,
    "group-norm": group_norm_launches,
}

#: families that load through tensor descriptors, and so have nothing below sm_90
DESCRIPTORS = ("tma", "attention-tma-bwd")

#: families that multiply no matrices, and so serve Turing too
ELEMENTWISE = ("group-norm",)

#: what a card's number alone asks for
ATTENTION = tuple(family for family in FAMILIES if family not in ELEMENTWISE)

#: the device code of a family, relative to this file
SOURCES: dict[str, tuple[str, ...]] = {
    "forward": ("attention_fwd*.py", "attention_parts.py"),
    "backward": ("attention_bwd*.py", "attention_parts.py"),
    "wide": ("attention_wide*.py",),
    "short": ("attention_short.py",),
    "tma": ("attention_tma.py",),
    "attention-tma-bwd": ("attention_tma_bwd*.py", "attention_bwd_parts.py"),
    "group-norm": ("group_norm*.py",),
}


def architectures(family: str) -> tuple[int, ...]:
    """The cards that a family's kernels run on: no other card has launches of it."""
    if family in ELEMENTWISE:
        return 75, *ARCHITECTURES
    return tuple(a for a in ARCHITECTURES if a >= 90 or family not in DESCRIPTORS)


def launches(architecture: int, families: tuple[str, ...] = ()) -> Iterator[Launch]:
    """What dispatch may launch on an architecture, by family; default: all of them."""
    for family in families or FAMILIES:
        if architecture in architectures(family):
            yield from FAMILIES[family](architecture)


def first_of_kernels(of: Iterable[Launch]) -> Iterator[Launch]:
    """The first launch of every kernel of every family."""
    return _firsts(of, lambda launch: (launch.family, launch.source.fn.__name__))


def _firsts(of: Iterable[Launch], kind: Callable[[Launch], object]) -> Iterator[Launch]:
    seen: set[object] = set()
    for launch in of:
        if kind(launch) not in seen:
            seen.add(kind(launch))
            yield launch


def sample(architecture: int, of: Iterable[Launch], number: int) -> list[Launch]:
    """So many launches, others on each card, and the same in every run over the same tables."""
    found = list(of)
    return random.Random(architecture).sample(found, min(number, len(found)))


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
    names = {"family": launch.family, "function": launch.source.fn.__name__}
    return {**names, **launch.key, **asdict(made), "clean": clean}


def _device_code(file: Path) -> str:
    """The text of a module's jitted functions and constants."""
    text = file.read_text(encoding="utf-8")
    lines, kept = text.splitlines(), []
    for node in ast.parse(text).body:
        first = node.lineno
        if isinstance(node, ast.FunctionDef):
            marks = [mark for mark in node.decorator_list if "jit" in ast.unparse(mark)]
            if not marks:
                continue
            first = min(mark.lineno for mark in marks)
        elif not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) == "__all__":
            continue
        kept += lines[first - 1 : node.end_lineno]
    return "\n".join(kept)


def digest(family: str, architecture: int) -> str:
    """Sixteen hex digits of all that decides what a family's launches compile to on a card.

    Functions that Triton compiles, constants beside them, and each launch with its compile-time
    arguments: a table's new step for one card asks for nothing on the others, and how a launch is
    made on the host for nothing at all.
    """
    everything = hashlib.sha256()
    for pattern in SOURCES[family]:
        found = sorted(Path(__file__).parent.glob(pattern))
        assert found, pattern
        for file in found:
            everything.update((file.name + _device_code(file)).encode())
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
    parser = argparse.ArgumentParser(description="Compiles kernels for GPUs that are not here.")
    parser.add_argument("cards", nargs="+", metavar="ARCHITECTURE[:FAMILY]")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--first", action="store_true", help="only the first of each family")
    some.add_argument("--kernels", action="store_true", help="only the first of each kernel")
    some.add_argument("--sample", type=int, metavar="N", help="only N, the same ones every time")
    some.add_argument("--record", type=Path, metavar="FILE", help="keep what was found")
    asked = parser.parse_args(arguments)
    found = []
    for card in asked.cards:
        number, _, family = card.partition(":")
        chosen: Iterable[Launch] = launches(int(number), (family,) if family else ATTENTION)
        if asked.first:
            chosen = _firsts(chosen, lambda launch: launch.family)
        elif asked.kernels:
            chosen = first_of_kernels(chosen)
        elif asked.sample is not None:
            chosen = sample(int(number), chosen, asked.sample)
        for launch in chosen:
            found.append(facts(launch, int(number)))
            print(json.dumps(found[-1]), flush=True)
    if asked.record is not None:
        record(asked.record, found)


if __name__ == "__main__":
    main(sys.argv[1:])
