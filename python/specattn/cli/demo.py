"""``specattn demo``: continue a real file with the embedded target, plainly and speculatively."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specattn.cli.compare import CompareOptions, compare
from specattn.cli.terminal import write_line

_PROMPT_TOKENS = 5500


def demo(
    file: Annotated[
        Path | None,
        typer.Argument(help="Continue the end of this file [default: a module of Python's own]."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=2**31 - 1, help="Make this many new tokens.")
    ] = 160,
) -> None:
    """Continue a file with the embedded target, plainly and speculatively, and compare."""
    from concurrent.futures import _base  # was held out when the embedded target was trained

    if file is not None and not file.is_file():
        raise ValueError(f"FILE: {file} is not a file")
    options = CompareOptions(
        prompt_file=[file or Path(_base.__file__)],
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
        repetition_penalty=1.2,
        prompt_tokens=None if file else _PROMPT_TOKENS,
        last_tokens=_PROMPT_TOKENS if file else None,
        methods=["plain", "auto", "suffix"],
        repeats=2,
    )
    compare(**vars(options))
    write_line("Your own file: specattn demo FILE; your own model: specattn generate -h")
