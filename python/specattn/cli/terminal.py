"""What a user sees while a command runs: messages and bars on standard error, text on the output.

All of it passes through here. Names, texts and a checkpoint's strings may hold sequences that steer
a terminal: they are shown as escapes, and only a file or a pipe gets a text as it is.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment, Segments
from rich.status import Status
from rich.text import Text

import specattn
from specattn.cli.errors import on_signals
from specattn.escaping import escaped
from specattn.pages.authors import Pieces


class _Output:
    """Standard output, whose reader may leave early, as ``head`` does.

    Then a command ends, for nobody is left to tell, unless it `outlives` its reader: there are
    files to write, or an exit code says something.
    """

    outlives = False

    def left(self) -> None:
        """Do what a command does whose reader has left: raise BrokenPipeError, or write nowhere."""
        write_nowhere(sys.stdout)
        if not self.outlives:
            raise BrokenPipeError


output = _Output()


def write_nowhere(stream: TextIO) -> None:
    """Let what a stream holds, and all that is written to it from now on, vanish."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Coloured(Console):
    """Standard output in colours."""

    def on_broken_pipe(self) -> None:
        """Leave it to `write_pieces`."""
        raise BrokenPipeError


class _Messages(Console):
    """Shows escaped what tables, bars and waiting lines are made of."""

    def on_broken_pipe(self) -> None:
        """Go on without messages where nobody reads them."""
        write_nowhere(sys.stderr)
        del self._buffer[:]

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for one in super().render(renderable, options):
            yield one if one.control else Segment(escaped(one.text), one.style)


# FORCE_COLOR would have bars in a file, too.
console = _Messages(stderr=True, force_terminal=sys.stderr.isatty(), highlight=False, emoji=False)


def say(line: str, **options: Any) -> None:
    """Print a line on standard error: no markup, and no breaks but the terminal's."""
    console.print(escaped(line), soft_wrap=True, markup=False, **options)


def status(line: str) -> Status:
    """Show a line while something takes time."""
    return console.status(Text(line))


def preload(module: str) -> None:
    """Import what takes seconds, and say so; a signal meanwhile ends the command at once.

    An exception of a handler might be swallowed inside an import, and nothing is to be kept.
    """
    with status("starting: importing torch and what needs it") as line:

        def end(number: int, *_: Any) -> None:
            line.stop()
            say("specattn: interrupted")
            os._exit(128 + number)

        with on_signals(end):
            _ = specattn.__all__  # the package itself, before parts of it
            importlib.import_module(module)


def room(stream: TextIO) -> int:
    """Return how many columns a stream has: a terminal's, and no end of them in a file or a pipe.

    COLUMNS alone makes no terminal: programs with readline, such as pytest, export it unasked.
    """
    return console.width if stream.isatty() else sys.maxsize


@contextmanager
def libraries_escaped() -> Iterator[None]:
    """Escape what libraries warn of and log: transformers quotes strings of a checkpoint."""
    warn, record = warnings.formatwarning, logging.getLogRecordFactory()

    def escaped_record(*given: Any, **options: Any) -> logging.LogRecord:
        made = record(*given, **options)
        made.msg, made.args = escaped(made.getMessage()), ()
        return made

    warnings.formatwarning = lambda *given, **options: escaped(warn(*given, **options))
    logging.setLogRecordFactory(escaped_record)
    try:
        yield
    finally:
        warnings.formatwarning = warn
        logging.setLogRecordFactory(record)


class _Rate(ProgressColumn):
    """How many of a unit a second."""

    def __init__(self, unit: str):
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """Return it, once it is known."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {self.unit}/s")


def progress_bars(unit: str | None = None, *, transient: bool = False) -> Progress:
    """Return bars that have no task yet, with rates of a unit; `transient` ones vanish at last."""
    label = TextColumn("{task.description}", markup=False)
    rates = () if unit is None else (_Rate(unit),)
    columns = (label, BarColumn(), MofNCompleteColumn(), *rates, TimeRemainingColumn())
    # A text that is redirected stays so beside a bar.
    return Progress(*columns, console=console, transient=transient, redirect_stdout=False)


def write_pieces(pieces: Iterable[str], styles: Sequence[str] | None = None) -> None:
    """Write a text to standard output, in colours if that is a terminal with NO_COLOR unset.

    BrokenPipeError: its reader has left, and the command does not outlive that.
    """
    try:
        _write_pieces(pieces, styles)
    except BrokenPipeError:
        output.left()


def _write_pieces(pieces: Iterable[str], styles: Sequence[str] | None) -> None:
    if sys.stdout.isatty():
        pieces = map(escaped, pieces)
    if styles is None:
        for piece in pieces:
            sys.stdout.write(piece)
    else:
        coloured = _Coloured(file=sys.stdout)
        each = zip(pieces, map(coloured.get_style, styles), strict=True)
        coloured.print(Segments(Segment(*one) for one in each), end="", soft_wrap=True)
    sys.stdout.flush()


def write_line(line: str = "", style: str | None = None) -> None:
    """Write a line to standard output."""
    write_pieces([line, "\n"], style and [style, ""])


@contextmanager
def streamed_text(
    tokenizer: Any, prompt_tokens: int, max_new_tokens: int, *, quiet: bool = False
) -> Iterator[tuple[Callable[[int, int], None], Callable[..., None]]]:
    """Show bars while there is no text to read, then the text as it is decoded, unless `quiet`.

    Yields ``on_prefill(done, total)`` and ``on_tokens(tokens, styles=None)``, which report those.
    """
    pieces = Pieces(tokenizer)
    text_is_seen = sys.stdout.isatty() and not quiet
    progress = progress_bars("tokens", transient=True)
    with progress if console.is_terminal else nullcontext():
        prefill = progress.add_task("reading the prompt", total=prompt_tokens)
        decode = progress.add_task("decoding", total=max_new_tokens, visible=False)

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
        write_line()
