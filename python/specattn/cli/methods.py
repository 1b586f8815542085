"""``specattn methods``: what ``--method`` takes."""

from __future__ import annotations

from typing import Annotated

import typer

from specattn.cli.errors import one_of
from specattn.cli.terminal import write_line


def methods(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Of these alone.")
    ] = None,
) -> None:
    """List the methods and their options, as --method takes them, with types and defaults."""
    from specattn.decoding import METHODS
    from specattn.decoding.methods.spelling import options_of

    for name in [one_of("NAME", name, METHODS) for name in names or METHODS]:
        write_line(name)
        for option, spelled in options_of(METHODS[name]).items():
            write_line(f"  {option}={spelled.default_text:<{22 - len(option)}} {spelled.takes}")
