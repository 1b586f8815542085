"""The ``specattn`` command, one file per sub-command.

Importing a command imports neither transformers nor what needs it: that takes seconds, so a command
does it once it runs. What several commands share lies beside them.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from specattn._version import __version__
from specattn.choices import unknown
from specattn.cli import (
    compare,
    conform,
    demo,
    env,
    generate,
    gpu_check,
    methods,
    plan,
    quantize,
    train,
    tune,
    widen,
)
from specattn.cli.errors import Interrupted, interrupt, on_signals, one_line_errors
from specattn.cli.options import App
from specattn.cli.terminal import libraries_escaped, output, say, write_line

__all__ = ["app", "main"]

# The names of its help are those of all commands.
app = App(name="specattn", context_settings={"help_option_names": ["-h", "--help"]})


def _print_version(asked: bool) -> None:
    if asked:
        write_line(f"specattn {__version__}")
        raise typer.Exit


_Version = typer.Option(
    "--version",
    callback=_print_version,
    is_eager=True,
    help="Print the version and exit.",
)


@app.callback()
def _specattn(version: Annotated[bool, _Version] = False) -> None:
    """Speculative decoding over long contexts, exact at every temperature."""


for _command in (
    demo.demo, generate.generate, compare.compare, methods.methods, plan.plan, env.env,
    gpu_check.gpu_check, quantize.quantize, widen.widen, conform.conform,
):  # fmt: skip
    app.command()(one_line_errors()(_command))
app.add_typer(train.app, name="train")
app.add_typer(tune.app, name="tune")


def _told(error: typer.TyperException) -> str:
    """Return what is wrong, in one line."""
    if getattr(error, "possibilities", None):
        name: str = error.option_name  # type: ignore[attr-defined]
        return unknown(name, error.possibilities)  # type: ignore[attr-defined]
    told = error.format_message().removeprefix("Invalid value: ").removesuffix(".")
    for one in getattr(error.__cause__, "errors", list)():  # pydantic's, which may not say it
        if (given := repr(one["input"])) not in told:
            told += f", got {given}"
    return told


def main() -> None:
    """Run the command; a user error is one line on standard error and exit code 2."""
    output.outlives = False
    try:
        with on_signals(interrupt), libraries_escaped():
            code = app(standalone_mode=False) or 0
    except typer.TyperException as error:
        # Without a sub-command the help is printed, which is no error.
        if type(error).__name__ != "NoArgsIsHelpError":
            say(f"specattn: error: {_told(error)}")
        code = 2
    except typer.Abort:
        code = 130
    except Interrupted as stop:
        say("specattn: interrupted")
        code = stop.exit_code
    except Exception:  # a defect: all of it is told, but steers no terminal
        say(traceback.format_exc(), end="")
        code = 1
    sys.exit(code)
