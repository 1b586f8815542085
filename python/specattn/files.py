"""Writing files that are whole at every moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write all of a file, or leave what was there.

    A process may be killed at any time, and several may write to the same folder.

    Parameters
    ----------
    path : Path
        In a folder that exists. A file of that name is replaced.
    write : callable
        ``write(partial)`` makes the file under another name in the same folder. What it raises is
        raised, and nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        partial.replace(path)
    except OSError as error:
        if error.filename == str(partial):  # which the user has never heard of
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
