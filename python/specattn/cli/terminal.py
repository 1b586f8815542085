"""What a user sees while a command runs: bars on standard error, text on standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specattn.cli.authors import Pieces

console = Console(stderr=True, highlight=False)


def say(line: str, **options: Any) -> None:
    """Print a line on standard error as it is: no markup, and no breaks but the terminal's."""
    console.print(line, soft_wrap=True, markup=False, **options)


def progress_bars(*, transient: bool = False) -> Progress:
    """Return bars that have no task yet; `transient` ones vanish at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=transient)


def write_pieces(pieces: Iterable[str], styles: Sequence[str] | None = None) -> None:
    """Write a text to standard output, in colours if that is a terminal with NO_COLOR unset."""
    if styles is None:
        for piece in pieces:
            sys.stdout.write(piece)
    else:
        coloured = Console(file=sys.stdout, highlight=False)
        for piece, style in zip(pieces, styles, strict=True):
            coloured.out(piece, style=style, end="")
    sys.stdout.flush()


@contextmanager
def streamed_text(
    tokenizer: Any, prompt_tokens: int, max_new_tokens: int, *, quiet: bool = False
) -> Iterator[tuple[Callable[[int, int], None], Callable[..., None]]]:
    """Show bars while there is no text to read, then the text as it is decoded, unless `quiet`.

    Yields ``on_prefill(done, total)`` and ``on_tokens(tokens, styles=None)``, which report those.
    """
    pieces = Pieces(tokenizer)
    text_is_seen = sys.stdout.isatty() and not quiet
    progress = progress_bars(transient=True)
    with progress if console.is_terminal else nullcontext():
        prefill = progress.add_task("prefill", total=prompt_tokens)
        decode = progress.add_task("decode", total=max_new_tokens, visible=False)

        def on_prefill(done: int, total: int) -> None:
            progress.update(prefill, completed=done, total=total)

        def on_tokens(tokens: list[int], styles: Sequence[str] | None = None) -> None:
            if text_is_seen and console.is_terminal:
                progress.stop()  # a bar and a growing line of text cannot share the screen
            progress.update(prefill, visible=False)
            progress.update(decode, advance=len(tokens), visible=True)
            if not quiet:
                write_pieces(map(pieces.next, tokens), styles)

        yield on_prefill, on_tokens
    if not quiet:
        print(flush=True)
