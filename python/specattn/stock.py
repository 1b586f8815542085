"""What is handed out once each, made many at a time: one call of torch serves many small tensors.

Between two passes over a model's weights every call finds its code cold, and torch's take longest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Stock(Generic[T]):
    """Hands out what ``make(count)`` returns, `count` at a time.

    Parameters
    ----------
    make : callable
    count : int
    """

    def __init__(self, make: Callable[[int], list[T]], count: int):
        self._make, self._count = make, count
        self._left: list[T] = []

    def take(self) -> T:
        """Return one that nobody has."""
        if not self._left:
            self._left = self._make(self._count)
        return self._left.pop()
