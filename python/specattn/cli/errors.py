"""How the commands report user errors: in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

# Which extra adds a package, where it is not the one of the command itself.
EXTRAS = {"accelerate": "train", "tensorboard": "train", "matplotlib": "bench", "triton": "cuda"}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn user errors into the one line that `specattn.cli.main` prints."""
    try:
        yield
    except BrokenPipeError:
        # The reader of the text has what it wanted; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None
    except (ValueError, OSError, ImportError) as error:
        text = str(error)
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            package = error.name.partition(".")[0]
            extra = EXTRAS.get(package, "cli")
            text = f"this command needs {package}: pip install 'specattn[{extra}]'"
        raise typer.BadParameter(" ".join(text.split())) from None


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Put the option's name before what is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
