"""The verb `doctor`: what is installed, what runs where and why, and what mends what is wrong."""

import json as json_format
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from sdx_accel.cli.json_errors import json_on_error

__all__ = ["doctor"]

STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    warm: Annotated[
        bool, typer.Option("--warm", help="Compile the kernels now, so that no run waits for it.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Check this model as well; named as in generate."),
    ] = None,
) -> None:
    """Say what is installed, what runs where and why, and the command that mends what is wrong.

    Exit codes: 0 nothing blocks, 1 something does, 2 the model cannot be used.
    """
    from sdx_accel.runtime.diagnosis import diagnose
    from sdx_accel.runtime.gathering import gather

    # a broken file is refused before the seconds that gathering takes
    with json_on_error(json):
        described = None if model is None else _describe(model)
    facts = gather()
    diagnosis = diagnose(facts)
    warmed = _warm() if warm else None
    if json:
        report: dict[str, Any] = {**diagnosis.to_dict(), "facts": asdict(facts)}
        report["model"] = described
        report["warmed"] = warmed
        typer.echo(json_format.dumps(report, indent=2, default=str))
        raise typer.Exit(diagnosis.exit_code)
    console = Console(soft_wrap=True, highlight=False)
    for row in diagnosis.rows:
        console.print(_line(row.level, row.subject, row.finding))
        if row.mend is not None:
            console.print(Text(f"{'':22}→ {row.mend}"))
    if described is not None:
        console.print(_line("OK", "model", described))
    if warmed is not None:
        console.print(_line("OK", "warm", warmed))
    console.print(Text(f"\n{_summary(len(diagnosis.blockers))}"))
    raise typer.Exit(diagnosis.exit_code)


def _line(level: str, subject: str, finding: str) -> Text:
    return Text.assemble((f"{level:<6}", STYLES[level]), (f"{subject:<16}", "bold"), finding)


def _summary(blockers: int) -> str:
    if blockers == 0:
        return "Nothing blocks."
    return (
        f"{blockers} blocker{'s' if blockers > 1 else ''}: mend what is marked FAIL, first first."
    )


def _describe(model: str) -> str:
    """One line about a model that can be used; refuses, with the reason, one that cannot."""
    from sdx_accel.runtime.checkpoints import describe

    found = describe(model)
    parts = ", ".join(found.components)
    size = f"{found.default_width}×{found.default_height}"
    return f"{model}: {found.pipeline_class}, default size {size}, made of {parts}"


def _warm() -> str:
    from sdx_accel.runtime.warm import warm_kernels

    return warm_kernels()
