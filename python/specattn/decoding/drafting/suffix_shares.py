"""What suffix decoding in Python learns of how often something holds: shares, and corrections."""

from __future__ import annotations

from typing import Any

import numpy as np

_F = np.float32


class Share:
    """How often something held, of late."""

    def __init__(self, prior: float):
        self.hits, self.tries = 4 * prior, 4.0

    def add(self, hit: bool) -> None:
        """Note one more try."""
        self.hits, self.tries = self.hits + hit, self.tries + 1
        if self.tries > 512:
            self.hits, self.tries = self.hits / 2, self.tries / 2

    @property
    def value(self) -> Any:
        """The share, float32."""
        return _F(self.hits / self.tries)


class Correction:
    """What chances came to, of late: of ranges of them, happened for each that was expected."""

    def __init__(self) -> None:
        self._ranges = [[4.0, 4.0] for _ in range(4)]

    def _of(self, chance: Any) -> list[float]:
        return self._ranges[sum(chance >= _F(below) for below in (0.3, 0.6, 0.9))]

    def add(self, chance: Any, happened: bool) -> None:
        """Note whether something happened that was thought so likely."""
        own = self._of(chance)
        own[0], own[1] = own[0] + float(chance), own[1] + happened
        if own[0] > 256:
            own[0], own[1] = own[0] / 2, own[1] / 2

    def corrected(self, chance: Any) -> Any:
        """Return what such a chance comes to, float32."""
        expected, happened = self._of(chance)
        return min(_F(float(chance) * happened / expected), max(chance, _F(0.995)))
