"""The verb `bench`: how fast is it here? Hands over to the benchmarks, which are programs too."""

import importlib
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sdx_accel.errors import RefusedError

__all__ = ["bench"]


class What(StrEnum):
    """What is measured; each value but `ATTENTION` is a module of `sdx_accel.bench`."""

    PICTURES = "pictures"
    STEPS = "steps"
    DECODE = "decode"
    STREAMING = "streaming"
    ATTENTION = "attention"


_MODULES = {What.PICTURES: "gpu"}
# these run on the CPU, or measure nothing
_WITHOUT_GPU = {"--tiny", "--interpret", "--help", "-h"}


def bench(
    context: typer.Context,
    what: Annotated[What, typer.Argument(help="What to measure.")] = What.PICTURES,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Alone: time attention on this card (90 s) and use what is fastest from then on.",
        ),
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="A dry run on the CPU.")] = False,
) -> None:
    """Measure this machine: whole pictures, steps, the VAE, weights in a ring, attention.

    All that follows WHAT goes to that benchmark: `sdx-accel bench steps --rounds 2`; its options:
    `sdx-accel bench steps -- --help`. Results are printed and, but for attention, written as JSON
    into $OUT or the current folder, over an older file. Attention comes with the source tree alone.
    `--tune` writes into the user's cache folder, for this card, torch, triton and sdx_accel.
    Exit codes: 0 done, 1 a part failed, 2 refused.
    """
    given = [*(["--tiny"] if tiny else []), *context.args]
    if tune:
        _tune(context, tiny)
        return
    if not _WITHOUT_GPU & set(given):
        _check_gpu()
    if what is What.ATTENTION:
        program = _attention()
        with _arguments(str(program), given):
            # as Python does for a script, whose folder holds its other half
            runpy.run_path(str(program), run_name="__main__")
        return
    name = f"sdx_accel.bench.{_MODULES.get(what, what.value)}"
    module = importlib.import_module(name)
    with _arguments(f"python -m {name}", given):
        module.main()


def _tune(context: typer.Context, tiny: bool) -> None:
    source = context.get_parameter_source("what")
    if context.args or (source is not None and source.name == "COMMANDLINE"):
        raise RefusedError("--tune stands alone: `sdx-accel bench --tune`, without WHAT")
    from sdx_accel.bench import tune

    tune.run(tiny=tiny)


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise RefusedError(
            f"bench measures an NVIDIA GPU, and torch {torch.__version__} sees none here: "
            "`sdx-accel doctor` says why; `sdx-accel bench steps --tiny` is a dry run on the CPU"
        )


def _attention() -> Path:
    """The micro-benchmark beside the kernels' sources.

    Raises:
        RefusedError: this is an installed package, which has none.
    """
    import sdx_kernels

    found = Path(sdx_kernels.__file__).parents[1] / "bench" / "bench_attention.py"
    if not found.is_file():
        raise RefusedError(
            "the benchmark of attention is not part of the installed package: fetch the source "
            "tree and run it there (`make bench`)"
        )
    return found


@contextmanager
def _arguments(program: str, given: list[str]) -> Iterator[None]:
    """`given` as the command line that a program finds in sys.argv."""
    before = sys.argv
    sys.argv = [program, *given]
    try:
        yield
    finally:
        sys.argv = before
