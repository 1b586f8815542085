"""How large a draft pays: what verifying so many rows takes here, against what they would bring.

The run measures its own rounds. Nothing is tried that could cost much: sizes grow by doubling, as
long as the sizes measured so far say that more would pay.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch

from specattn.decoding.sequences import Sequences
from specattn.decoding.statistics import Clock
from specattn.decoding.target import Target

SIZES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65)
"""Rows of a pass, root included: few sizes, so that each is met again and its cost known."""

_KEPT = 8  # rounds of a size that say what it costs
_EXPLORING = 0.02  # of the time may go to sizes that were too slow: tried again
_ALIKE = 1.5  # lengths whose passes are taken to cost the same


class PassCosts:
    """Seconds of a round, its drafting apart, by the rows that a request verifies.

    Parameters
    ----------
    clock : Clock
        On CUDA a round's time is read when it has passed; nothing waits for it.
    """

    def __init__(self, clock: Clock):
        self.clock = clock
        self._seconds: dict[int, deque[float]] = {}
        self._measured_at: dict[int, float] = {}
        self._elapsed = 0.0
        self._met: set[int] = set()
        self._begun: tuple[int, Any] | None = None
        self._unread = deque[tuple[int, Any, Any]]()

    def begin(self, rows: int) -> None:
        """Note that a pass of `rows` rows per request begins."""
        self._begun = rows, self.clock.now()

    def end(self) -> None:
        """Note that it has ended."""
        if self._begun is None:
            return
        rows, begun = self._begun
        self._begun = None
        if rows in self._met:
            self._unread.append((rows, begun, self.clock.now()))
        self._met.add(rows)  # the first pass of a size finds code and data cold
        while self._unread and self.clock.passed(self._unread[0][2]):
            rows, begun, ended = self._unread.popleft()
            known = self._seconds.setdefault(rows, deque(maxlen=_KEPT))
            known.append(self.clock.seconds(begun, ended))
            self._elapsed += known[-1]
            self._measured_at[rows] = self._elapsed
        self._forget()

    def _forget(self) -> None:
        """Drop sizes that were left for so long that to try them again costs next to nothing.

        What they took may have been chance, another program's doing, or true of a shorter text.
        """
        for rows in sorted(self._seconds)[1:]:
            age = self._elapsed - self._measured_at[rows]
            if _EXPLORING * age > median(self._seconds[rows]):
                del self._seconds[rows]

    @property
    def measured(self) -> dict[int, float]:
        """Median seconds by rows, ascending, of the sizes measured; never less for more rows."""
        sizes = sorted(self._seconds)
        medians = [median(self._seconds[rows]) for rows in sizes]
        return dict(zip(sizes, accumulate(medians, max), strict=True))

    def estimates(self) -> dict[int, float]:
        """Return seconds by rows for every size that may be tried next.

        Between sizes that were measured lies a line. It goes on up to twice the largest of them;
        beyond, nobody knows. Without any measurement only one row may be tried.
        """
        known = self.measured
        if not known:
            return {1: 1.0}
        rows, seconds = list(known), list(known.values())
        allowed = [size for size in SIZES if size <= max(4, 2 * rows[-1])]
        return {size: _line(rows, seconds, size) for size in allowed}


def _line(rows: list[int], seconds: list[float], size: int) -> float:
    """Return the value at `size` of the line through measured points, continued at its end."""
    if size <= rows[0] or len(rows) == 1:
        return seconds[0]
    right = min(max(bisect_left(rows, size), 1), len(rows) - 1)
    left = right - 1
    slope = (seconds[right] - seconds[left]) / (rows[right] - rows[left])
    return seconds[left] + slope * (size - rows[left])


_of_models: WeakKeyDictionary[Any, dict[tuple[Any, ...], PassCosts]] = WeakKeyDictionary()


def costs_of(target: Target, sequences: Sequences) -> PassCosts:
    """Return what earlier runs of this process found for such a model, batch and length."""
    known = _of_models.setdefault(target.model, {})
    length = round(math.log(max(sequences.active_lengths), _ALIKE))
    ranks = target.lockstep and target.lockstep.ranks.size
    key = (len(sequences.active), length, target.device, torch.get_num_threads(), ranks)
    if key not in known:
        known[key] = PassCosts(target.clock())
    return known[key]


class Calibration:
    """How many drafted tokens are accepted for each that was expected, of late."""

    _PRIOR, _MOST = 4.0, 256.0

    def __init__(self) -> None:
        self.expected = self.accepted = self._PRIOR

    def add(self, expected: float, accepted: float) -> None:
        """Book a round."""
        self.expected += expected
        self.accepted += accepted
        if self.expected > self._MOST:
            self.expected, self.accepted = self.expected / 2, self.accepted / 2

    @property
    def factor(self) -> float:
        """Accepted tokens per expected one."""
        return self.accepted / self.expected


def best_size(
    costs: dict[int, float], probabilities: Sequence[Sequence[float]], factor: float
) -> int:
    """Return the rows, root included, with which a batch gains the most tokens per second.

    Parameters
    ----------
    costs : dict
        Seconds by rows of a request.
    probabilities : per request, the probabilities that its drafted tokens are accepted, descending
    factor : float
        What these are multiplied with.
    """
    gains = [list(accumulate(one, initial=0.0)) for one in probabilities]
    longest = max(map(len, gains))

    def rate(rows: int) -> float:
        tokens = sum(1 + factor * gain[min(rows, len(gain)) - 1] for gain in gains)
        return tokens / costs[rows]

    useful = [rows for rows in costs if rows <= longest]
    return max(useful, key=lambda rows: (rate(rows), -rows))
