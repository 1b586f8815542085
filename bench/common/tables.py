"""Tables, and progress on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence


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


def in_rows(count: int, kind: str = "") -> str:
    """Return how many rows a call has, of a kind (`chain` or `tree`) where it is given."""
    of = f"{kind} of " if kind else ""
    return f"{of}{count} row{'s' if count > 1 else ''}"


def or_dash(value: float | None, form: str = "{:.2f}", scale: float = 1) -> str:
    """Return a figure as text, and a dash where there is none."""
    return "-" if value is None else form.format(scale * value)


class Progress:
    """One line on a terminal, which says what runs, how much is done and how long all will take."""

    def __init__(self, total: float, mark: Callable[[str], str] = str):
        self.total, self.mark = total, mark
        self.done, self.running, self.start = 0.0, 0.0, time.perf_counter()

    def show(self, name: str, weight: float = 1) -> None:
        """Say what begins now; all that began before it is done. Nothing where no terminal is."""
        self.done, self.running = self.done + self.running, weight
        share, seconds = self.done / self.total, time.perf_counter() - self.start
        left = f", {seconds * (1 / share - 1):.0f} s left" if share else ""
        if sys.stderr.isatty():
            line = self.mark(f"{share:4.0%}{left}: {name}")
            print(f"\r\033[K{line[:79]}", end="\r", file=sys.stderr, flush=True)
