"""Files that are there whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, and rename it when it is whole.

    Parameters
    ----------
    path : Path
        Replaced at once: a reader sees what was there before, or all that is new.
    write : callable
        Is given the path of the file to make.
    """
    partial = path.with_name(path.name + ".partial")
    write(partial)
    partial.replace(path)
