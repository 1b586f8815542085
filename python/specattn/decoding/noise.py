"""Randomness that belongs to a position in a text, and not to the moment at which it is used.

The token at a position is the argmax of ``p / E``, with E exponential noise over the vocabulary: a
sample of p (the Gumbel-max trick). E follows from (seed, request, position) alone, by a
counter-based generator. So a text does not depend on what was drafted, on a clock or on how often
randomness was used before; and a draft that is drawn with the same noise, ``argmax(q / E)``, is the
target's own token where q is close to p (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

_KEPT_BYTES = 2**27  # a draft and its verification use the same noise


class PositionNoise:
    """Exponential noise over the vocabulary for every request and position.

    Parameters
    ----------
    seed : int
    """

    def __init__(self, seed: int):
        self.seed = seed % 2**64
        self._noise = lru_cache(maxsize=None)(self._make)

    def at(
        self, rows: Sequence[int], positions: Sequence[int], vocabulary: int, device: torch.device
    ) -> torch.Tensor:
        """Return the noise of requests `rows` [n] at `positions` [n]: float64 [n, V], positive."""
        pairs = zip(rows, positions, strict=True)
        return torch.stack([self.one(*pair, vocabulary) for pair in pairs]).to(device)

    def one(self, row: int, position: int, vocabulary: int) -> torch.Tensor:
        """Return the noise of one request and position: float64 [V] on the host, to be read."""
        if self._noise.cache_info().currsize * 8 * vocabulary > _KEPT_BYTES:
            self._noise.cache_clear()
        return self._noise(row, position, vocabulary)

    def _make(self, row: int, position: int, vocabulary: int) -> torch.Tensor:
        counter = [0, position, 0, 0]  # the generator itself counts in the first word
        philox = np.random.Philox(key=[self.seed, row], counter=counter)
        # float64: noise of exactly 0, which float32 can round to, would win whatever p is.
        return torch.from_numpy(np.random.Generator(philox).standard_exponential(vocabulary))
