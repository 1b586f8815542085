"""``specattn demo``: continue a real file with the embedded target, plainly and speculatively."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specattn.cli.compare import CompareOptions, compare
from specattn.cli.errors import naming, one_of
from specattn.cli.options import at_most
from specattn.cli.terminal import preload, say, status, write_line

_PROMPT_TOKENS, _OF_WIDE = 5500, 1024  # a real body's prompt is not read in a moment


def demo(
    file: Annotated[
        Path | None,
        typer.Argument(
            help=r"Continue the end of this file \[default: a module of Python's own].",
            metavar="FILE",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            callback=at_most(2**31 - 1),
            help="Make this many new tokens.",
            metavar="N",
        ),
    ] = 160,
    wide: Annotated[
        str | None,
        typer.Option(
            help="Give the model the sizes of a real one, such as qwen3-0.6b (1 GB).",
            metavar="NAME",
        ),
    ] = None,
) -> None:
    """Continue a file with the embedded target, plainly and speculatively, and compare."""
    from concurrent.futures import _base  # was held out when the embedded target was trained

    if file is not None and not file.is_file():
        raise ValueError(f"FILE: {file} is not a file")
    tokens = _PROMPT_TOKENS if wide is None else _OF_WIDE
    options = CompareOptions(
        prompt_file=[file or Path(_base.__file__)],
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
        repetition_penalty=1.2,
        prompt_tokens=None if file else tokens,
        last_tokens=tokens if file else None,
        methods=["plain", "auto", "suffix"],
        repeats=3,
        model=None if wide is None else str(_widened(wide)),
        dtype="auto" if wide is None else "bf16",
    )
    compare(**vars(options))
    write_line("Your own file: specattn demo FILE; your own model: specattn generate -h")


def _widened(like: str) -> Path:
    """Return the embedded target in the sizes of a real model, kept among this package's caches."""
    preload("specattn.widening")
    from specattn import widening
    from specattn.files import cache_folder
    from specattn.planning import MODELS

    one_of("--wide", like, [shape.name for shape in MODELS.values() if not shape.experts])
    folder = cache_folder() / "wide"
    with status(f"making {folder / like}"), naming("--wide"):
        found = widening.widened_target(like, folder)
    say(f"The embedded target in the sizes of {like}, the same text and drafts: {found}")
    return found
