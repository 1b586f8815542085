"""How the commands report errors of the user: in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors of the user into the one line that `specattn.cli.main` prints."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(" ".join(str(error).split())) from None
