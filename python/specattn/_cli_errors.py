"""How the commands say what a user can mend: in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what a user can mend into the one line that `specattn.cli.main` prints."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(" ".join(str(error).split())) from None
