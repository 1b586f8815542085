"""The ``specattn`` command, one file per sub-command.

Importing a command imports neither transformers nor what needs it: that takes seconds, so a command
does it once it runs. What several commands share lies beside them.
"""

from __future__ import annotations

import os
import sys

import typer

from specattn.cli import compare, env, generate, plan, train, tune

__all__ = ["app", "main"]

app = typer.Typer(
    name="specattn",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Speculative decoding over long contexts, exact at every temperature.",
)
app.command()(generate.generate)
app.command()(compare.compare)
app.command()(plan.plan)
app.command()(env.env)
app.add_typer(train.app, name="train")
app.add_typer(tune.app, name="tune")


def main() -> None:
    """Run the command; a user error is one line on standard error and exit code 2."""
    try:
        code = app(standalone_mode=False) or 0
    except typer.TyperException as error:
        print(f"specattn: error: {error.format_message()}", file=sys.stderr)
        code = 2
    except typer.Abort:
        code = 130
    except BrokenPipeError:
        # The reader of the text has gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
