"""The verb `verify`: are the kernels sound on cards that are not here?"""

import json as json_format
from typing import Annotated, Any

import typer

from sdx_accel.cli.json_errors import json_on_error
from sdx_accel.errors import RefusedError

__all__ = ["verify"]


def verify(
    aot: Annotated[
        bool, typer.Option("--aot", help="Compile the kernels ahead of time; needs no GPU.")
    ] = False,
    arch: Annotated[
        list[int] | None,
        typer.Option(help="Compute capability without the dot, e.g. 86; repeatable. Default: all."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every configuration; takes some ten minutes a card.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Compile the kernels for cards that are not here and check what the assembler made of them.

    A configuration is clean when it uses tensor cores, spills no register and fits the card's
    shared memory. Exit codes: 0 all are clean, 1 some are not, 2 refused.
    """
    from sdx_accel.runtime.ahead_of_time import ARCHITECTURES, compiled
    from sdx_kernels.target import triton_status

    with json_on_error(json):
        if not aot:
            raise RefusedError("verify has one check so far: sdx-accel verify --aot")
        chosen = tuple(arch or ARCHITECTURES)
        for number in chosen:
            if number not in ARCHITECTURES:
                old = ": torch's kernels run there" if number < min(ARCHITECTURES) else ""
                known = ", ".join(map(str, ARCHITECTURES))
                raise RefusedError(
                    f"--arch {number} has no kernels of ours{old}; there are: {known}"
                )
        works, reason = triton_status()
        if not works:
            raise RefusedError(f"nothing can be compiled: {reason}")
        found: dict[int, list[dict[str, Any]]] = {}
        for number in chosen:
            found[number] = []
            for fact in compiled(number, everything=everything):
                found[number].append(fact)
            if not json:
                typer.echo(_line(number, found[number]))
    unclean = [fact for facts in found.values() for fact in facts if not fact["clean"]]
    if json:
        values = {f"sm_{number}": facts for number, facts in found.items()}
        typer.echo(json_format.dumps({"clean": not unclean, "architectures": values}))
    for fact in () if json else unclean:
        typer.echo(f"not clean: {json_format.dumps(fact)}")
    raise typer.Exit(1 if unclean else 0)


def _line(architecture: int, facts: list[dict[str, Any]]) -> str:
    families: dict[str, int] = {}
    for fact in facts:
        families[fact["family"]] = families.get(fact["family"], 0) + 1
    clean = sum(fact["clean"] for fact in facts)
    counts = ", ".join(f"{name} {n}" for name, n in families.items())
    cores = sorted({fact["tensor_core"] for fact in facts} - {""})
    return f"sm_{architecture}: {clean} of {len(facts)} clean ({counts}; {', '.join(cores)})"
