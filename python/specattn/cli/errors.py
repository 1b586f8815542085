"""How the commands end early: user errors are one line; signals keep what there is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer

from specattn.choices import unknown

# Which extra adds a package, where it is not the one of the command itself.
EXTRAS = {"accelerate": "train", "tensorboard": "train", "matplotlib": "bench", "triton": "cuda"}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn user errors into the one line that `specattn.cli.main` prints."""
    try:
        yield
    except BrokenPipeError:
        raise typer.Exit from None  # the reader of the text has what it wanted
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        text = str(error) or type(error).__name__  # Python's own MemoryError says nothing
        if isinstance(error, RuntimeError) and "tried to allocate" not in text.lower():
            raise  # a defect; but what asks for too much memory is in the options
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            package = error.name.partition(".")[0]
            extra = EXTRAS.get(package, "cli")
            text = f"this command needs {package}: pip install 'specattn[{extra}]'"
        raise typer.BadParameter(" ".join(text.split())) from None


@contextmanager
def naming(what: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Put an option's name before what is wrong with it, or that of a file which a library reads.

    Such a library may raise any `kind` of error; what is no ValueError is named.
    """
    try:
        yield
    except kind as error:
        said = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{what}: {said}{error}") from error


def one_of(option: str, given: str, known: Collection[str]) -> str:
    """Return `given` if it is known."""
    if given in known:
        return given
    raise ValueError(f"{option}: {unknown(given, known)}")


def numbers(option: str, text: str, kind: type = int) -> tuple:
    """Return the numbers that ``2,4,6`` names."""
    with suppress(ValueError):
        if kind is not int or text.replace(",", "").isdecimal():
            return tuple(map(kind, text.split(",")))
    raise ValueError(f"{option}: expected numbers such as 2,4,6, got {text!r}")


class Interrupted(BaseException):
    """A signal has ended the command; like KeyboardInterrupt, no error that anyone handles."""

    def __init__(self, number: int):
        super().__init__(number)
        self.exit_code = 128 + number  # as shells count


def interrupt(number: int, *_: Any) -> None:
    """Raise `Interrupted`; a handler for where there is nothing to finish."""
    raise Interrupted(number)


@contextmanager
def on_signals(handler: Callable[..., None]) -> Iterator[None]:
    """Let `handler` have both signals inside this context."""
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
