"""State of a drafter for each request, recognised by its text: vLLM passes rows without names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

Memory = TypeVar("Memory")


@dataclass
class _Known(Generic[Memory]):
    text: bytes  # up to the last step
    memory: Memory


class Requests(Generic[Memory]):
    """The memory, from `make`, of each request that got a token in the last step.

    What is forgotten is given to `ended`, before anything is made.

    A row belongs to the request whose text it continues: vLLM moves rows as others end, and a
    request that was preempted comes back in another. Two requests of one text may swap memories,
    which are then of the same text. Comparing 30,000 tokens takes some microseconds.
    """

    def __init__(
        self, make: Callable[[], Memory], ended: Callable[[Memory], None] = lambda memory: None
    ):
        self.make, self.ended = make, ended
        self._known: list[_Known[Memory]] = []

    def __len__(self) -> int:
        """Return how many requests are remembered."""
        return len(self._known)

    def of_rows(
        self, rows: list[int], lengths: np.ndarray, tokens: np.ndarray
    ) -> list[tuple[Memory, np.ndarray]]:
        """Return the memory of each row's request, and the tokens that are new to it.

        `rows` got a token in this step; `lengths` [B] count the tokens of each row's request, which
        are in `tokens` [B, max_model_len]. Requests that have no row here are forgotten.
        """
        known, found = self._known, list[tuple[bytes, _Known[Memory] | None]]()
        for row in rows:
            text = tokens[row, : lengths[row]].tobytes()  # compared at once, where arrays take long
            # Most often rows are as they were, and so the first one that is left is the right one.
            at = next((i for i, one in enumerate(known) if text.startswith(one.text)), None)
            found.append((text, None if at is None else known.pop(at)))
        for gone in known:
            self.ended(gone.memory)
        self._known, new = [], []
        for row, (text, own) in zip(rows, found, strict=True):
            size, memory = (0, self.make()) if own is None else (len(own.text), own.memory)
            self._known.append(_Known(text, memory))
            new.append((memory, tokens[row, size // tokens.itemsize : lengths[row]]))
        return new
