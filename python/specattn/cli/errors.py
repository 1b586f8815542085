"""How the commands report user errors: in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn user errors into the one line that `specattn.cli.main` prints."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(" ".join(str(error).split())) from None
