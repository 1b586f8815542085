"""``specattn demo``: continue a real file with the embedded target, plainly and speculatively."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specattn.cli.compare import compare
from specattn.cli.errors import one_line_errors
from specattn.cli.options import DecodingOptions

_PROMPT_TOKENS = 5500
_NEW_TOKENS = 160
_METHODS = "plain,auto,suffix"


def demo(
    file: Annotated[
        Path | None,
        typer.Argument(help="Continue the end of this file [default: a module of Python's own]."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Make this many new tokens.")
    ] = _NEW_TOKENS,
) -> None:
    """Continue a file with the embedded target, plainly and speculatively, and compare."""
    with one_line_errors():
        from specattn.embedded import EMBEDDED_TARGET

        if file is not None and not file.is_file():
            raise ValueError(f"FILE: {file} is not a file")
        options = DecodingOptions(
            prompt_file=[file or _unseen_file()],
            model=EMBEDDED_TARGET,
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            repetition_penalty=1.2,
            prompt_tokens=None if file else _PROMPT_TOKENS,
            last_tokens=_PROMPT_TOKENS if file else None,
        )
    compare(**vars(options), methods=_METHODS, repeats=2, json_file=None, html=None)
    print("Your own file: specattn demo FILE; your own model: specattn generate -h")


def _unseen_file() -> Path:
    """Return a module that was held out when the embedded target was trained."""
    from concurrent.futures import _base

    return Path(_base.__file__)
