"""Pre-allocates small tensors in bulk, because one call of torch for each is too slow.

Between two passes over a model's weights every call finds its code cold, and torch's take longest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Stock(Generic[T]):
    """Hands out, one by one, what ``make(count)`` returns."""

    def __init__(self, make: Callable[[int], list[T]], count: int):
        self._make, self._count = make, count
        self._left: list[T] = []

    def take(self) -> T:
        """Return one that was not returned before."""
        if not self._left:
            self._left = self._make(self._count)
        return self._left.pop()
