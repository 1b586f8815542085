"""Tables and progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def aligned(header: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> str:
    """Return columns of even width; the header pairs names with ``<`` or ``>``."""
    names = [name for name, _ in header]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    sides = [side for _, side in header]
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in (names, *rows)
    )


def size(tokens: int) -> str:
    """Return a number of tokens as people write it."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


@contextmanager
def progress(
    total: float, mark: Callable[[str], str] = str
) -> Iterator[Callable[[str, float], None]]:
    """Yield a function of what runs now and its weight, which shows how long all will take.

    On standard error, which is left alone where it is no terminal or ``rich`` is missing; ``mark``
    makes the line that is shown of a name.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda name, weight: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%, left:"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("", total=total)
        pending = 0.0

        def advance(name: str, weight: float) -> None:
            nonlocal pending
            bar.update(task, advance=pending, description=mark(name))
            pending = weight  # done when the next one starts

        yield advance
