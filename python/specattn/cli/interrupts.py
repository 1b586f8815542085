"""Ctrl-C and SIGTERM, which mean the same to every command: end here, and keep what there is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal has ended the command; like KeyboardInterrupt, no error that anyone handles.

    Attributes
    ----------
    exit_code : int
        128 and the number of the signal, as shells count: 130 of Ctrl-C, 143 of SIGTERM.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.exit_code = 128 + number


def interrupt(number: int, *_: Any) -> None:
    """Raise `Interrupted`; a handler for where there is nothing to finish."""
    raise Interrupted(number)


@contextmanager
def on_signals(handler: Callable[..., None]) -> Iterator[None]:
    """Let `handler` have both signals inside this context."""
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
