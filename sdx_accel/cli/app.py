"""The Typer application, and `main()`, which turns every error into a message and an exit code.

Knows the verbs and the error tree; knows nothing of models, pictures or torch.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import sdx_accel
from sdx_accel.cli.bench import bench
from sdx_accel.cli.doctor import doctor
from sdx_accel.cli.generate import generate
from sdx_accel.cli.json_errors import print_failure
from sdx_accel.cli.plan import plan
from sdx_accel.cli.verify import verify
from sdx_accel.errors import SdxError

__all__ = ["app", "main"]

app = typer.Typer(
    name="sdx-accel",
    help="Pictures with Hugging Face diffusers, fast and inside a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(plan)
app.command()(doctor)
app.command()(verify)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sdx-accel {sdx_accel.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Pictures with Hugging Face diffusers, fast and inside a memory budget."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        args: the arguments after the program's name; None takes them from `sys.argv`.

    Returns:
        The exit code: 0 done, 1 the work failed, 2 refused before any work, 130 Ctrl-C.
    """
    if args is None:
        _restart_in_utf8_mode()
    _never_fail_on_printing()
    command = typer.main.get_command(app)
    try:
        command.main(
            args=None if args is None else list(args),
            prog_name="sdx-accel",
            standalone_mode=True,
        )
    except SystemExit as stop:
        _say_usage(stop.__context__, sys.argv[1:] if args is None else args)
        # a benchmark stops with whether something failed
        return int(stop.code if isinstance(stop.code, int) else stop.code is not None)
    except KeyboardInterrupt:
        return 130
    except SdxError as error:
        return _say(error, str(error), error.exit_code)
    except Exception as error:
        name = type(error).__name__
        hint = "" if _debugging() else "\nSet SDX_DEBUG=1 to see where it came from."
        return _say(error, f"the work failed: {name}: {error}{hint}", 1)
    return 0


def _say(error: Exception, message: str, exit_code: int) -> int:
    if _debugging():
        traceback.print_exception(error)
    print(f"sdx-accel: {message}", file=sys.stderr)
    return exit_code


def _say_usage(error: BaseException | None, args: Sequence[str]) -> None:
    """Print what was wrong with the flags as JSON too: no verb has run that could have.

    Args:
        error: what Typer printed and stopped for, or None. Its class is Click's own or Typer's
            copy of it, depending on Typer's version, so it is told by its methods.
        args: the command line; after `--` nothing is a flag.
    """
    format_message = getattr(error, "format_message", None)
    flags = list(args)
    flags = flags[: flags.index("--")] if "--" in flags else flags
    if format_message is not None and "--json" in flags:
        print_failure(type(error).__name__, format_message(), getattr(error, "exit_code", 2))


def _debugging() -> bool:
    return os.environ.get("SDX_DEBUG", "") not in ("", "0")


def _restart_in_utf8_mode() -> None:
    """Start again in Python's UTF-8 mode where file names are not UTF-8.

    Under LC_ALL=C an argument such as "модель" arrives as bytes that Python cannot name, and the
    libraries below refuse such text. The flag cannot be set in a running process.
    """
    encoding = sys.getfilesystemencoding().replace("-", "").lower()
    if encoding == "utf8" or os.name == "nt" or sys.flags.utf8_mode or not sys.orig_argv[1:]:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, "PYTHONUTF8": "1"}
    command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execve(sys.executable, command, environment)


def _never_fail_on_printing() -> None:
    """A console that cannot show a character shows a stand-in instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
