"""How large a draft pays: what verifying so many rows takes here, against what they would bring.

The run measures its own rounds. Nothing is tried that could cost much: sizes grow by doubling, as
long as the sizes measured so far say that more would pay.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from statistics import median
from typing import Any, TypeVar

import torch

from specattn.decoding.engine.target import Target
from specattn.decoding.model.model import Model
from specattn.decoding.text.sequences import Sequences
from specattn.decoding.text.statistics import Clock

T = TypeVar("T")
Kind = TypeVar("Kind", bound="Timings")

SIZES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65)
"""Rows of a pass, root included: few sizes, so that each is met again and its cost known."""

EXPLORING = 0.02
"""Share of the time that may go to trying again what was too slow."""

_KEPT = 8  # rounds of a size that say what it costs
_JUDGED = 4  # so many more are seen before what they say is taken anew
_SAME = 0.02  # medians that differ by no more
_ALIKE = 1.5  # lengths whose passes are taken to cost the same


class Timings:
    """Seconds that something of some size took of late.

    Parameters
    ----------
    clock : Clock
        On CUDA a time is read when it has passed; nothing waits for it.

    Attributes
    ----------
    elapsed : float
        Seconds of all that was measured.
    """

    def __init__(self, clock: Clock):
        self.clock = clock
        self.elapsed = 0.0
        self._seconds: dict[Any, deque[float]] = {}
        self._medians: dict[Any, float] = {}
        self._measured_at: dict[Any, float] = {}
        self._noted: dict[Any, int] = {}
        self._met: set[Any] = set()
        self._unread = deque[tuple[Any, Any, Any]]()

    def note(self, size: Any, begun: Any, ended: Any) -> None:
        """Note the moments between which something of that size was done."""
        if size in self._met:
            self._unread.append((size, begun, ended))
        self._met.add(size)  # the first of a size finds code and data cold
        while self._unread and self.clock.passed(self._unread[0][2]):
            size, begun, ended = self._unread.popleft()
            seconds = self.clock.seconds(begun, ended)
            known = self._seconds.setdefault(size, deque(maxlen=_KEPT))
            if self.is_old(size, seconds):
                known.clear()
                self._noted[size] = 0
            known.append(seconds)
            count = self._noted[size] = self._noted.get(size, 0) + 1
            if count <= _KEPT or count % _JUDGED == 0:
                self._found(size, median(known))
            self.elapsed += seconds
            self._measured_at[size] = self.elapsed

    def _found(self, size: Any, seconds: float) -> None:
        self._medians[size] = seconds

    def is_old(self, size: Any, seconds: float) -> bool:
        """Whether a size was left for so long that to try it again costs next to nothing.

        What it took may have been chance, another program's doing, or true of a shorter text.
        """
        return EXPLORING * (self.elapsed - self._measured_at.get(size, self.elapsed)) > seconds

    def copy(self: Kind) -> Kind:
        """Return what is known as a first guess for what may take a little longer."""
        copy = type(self)(self.clock)
        copy._medians = self.medians
        copy._seconds = {size: deque([s], _KEPT) for size, s in copy._medians.items()}
        copy.elapsed, copy._measured_at = self.elapsed, dict(self._measured_at)
        copy._met = set(self._met)
        return copy

    @property
    def medians(self) -> dict[Any, float]:
        """Median seconds by size, ascending, of the sizes measured."""
        return dict(sorted(self._medians.items()))


class PassCosts(Timings):
    """Seconds of a round, its drafting apart, by the rows that a request verifies."""

    def __init__(self, clock: Clock):
        super().__init__(clock)
        self._begun: tuple[int, Any] | None = None
        self._known: dict[int, float] | None = None
        self._forgets_at = 0.0
        self._estimates: dict[tuple[int, ...], dict[int, float]] = {}

    def begin(self, rows: int) -> None:
        """Note that a pass of `rows` rows per request begins."""
        self._begun = rows, self.clock.now()

    def end(self) -> None:
        """Note that it has ended."""
        if self._begun is None:
            return
        rows, begun = self._begun
        self._begun = None
        self.note(rows, begun, self.clock.now())
        if self.elapsed > self._forgets_at:
            self._forgets_at = (1 + EXPLORING / 4) * self.elapsed
            for size, seconds in list(self._medians.items()):
                if size > 1 and self.is_old(size, seconds):
                    del self._seconds[size], self._medians[size]
                    self._noted.pop(size, None)
                    self._known = None

    def _found(self, size: Any, seconds: float) -> None:
        """Keep what is known where it is about the same: what follows from it stays."""
        known = self._medians.get(size, 0.0)
        if abs(seconds - known) > _SAME * known:
            self._medians[size], self._known = seconds, None

    @property
    def measured(self) -> dict[int, float]:
        """Median seconds by rows, ascending, of the sizes measured; never less for more rows.

        Where two contradict each other, the one that was measured later is believed.
        """
        if self._known is None:
            self._estimates.clear()
            placed = dict[int, float]()
            for size in sorted(self._medians, key=self._measured_at.__getitem__, reverse=True):
                least = max((s for other, s in placed.items() if other < size), default=0.0)
                most = min((s for other, s in placed.items() if other > size), default=math.inf)
                placed[size] = min(max(self._medians[size], least), most)
            self._known = dict(sorted(placed.items()))
        return self._known

    def estimates(self, sizes: Sequence[int] = SIZES) -> dict[int, float]:
        """Return seconds by rows for every size of `sizes` that may be tried next.

        Between sizes that were measured lies a line. It goes on up to twice the largest of them, or
        up to the next size; beyond, nobody knows. Without any measurement one row may be tried.
        """
        known, key = self.measured, tuple(sizes)
        if not known:
            return {1: 1.0}
        if key not in self._estimates:
            rows, seconds = list(known), list(known.values())
            allowed = growing(key, rows[-1])
            self._estimates[key] = {size: _line(rows, seconds, size) for size in allowed}
        return self._estimates[key]


def growing(sizes: Sequence[int], largest: int) -> list[int]:
    """Return those of ascending `sizes` that may be tried when `largest` is the largest measured.

    They grow by doubling, from 4 on, or by one size.
    """
    beyond = [size for size in sizes if size > largest]
    most = max(4, 2 * largest, min(beyond, default=0))
    return [size for size in sizes if size <= most]


def _line(rows: list[int], seconds: list[float], size: int) -> float:
    """Return the value at `size` of the line through measured points, continued at its end."""
    if size <= rows[0] or len(rows) == 1:
        return seconds[0]
    right = min(max(bisect_left(rows, size), 1), len(rows) - 1)
    left = right - 1
    slope = (seconds[right] - seconds[left]) / (rows[right] - rows[left])
    return seconds[left] + slope * (size - rows[left])


def alike(target: Target, sequences: Sequences) -> tuple[Any, ...]:
    """Return what passes of a model have in common that take about the same time."""
    length = round(math.log(max(sequences.active_lengths), _ALIKE))
    machine = target.device, torch.get_num_threads(), threading.get_ident()
    ranks = target.lockstep and target.lockstep.ranks.size
    return len(sequences.active), length, ranks, *machine


def recalled(target: Target, sequences: Sequences, kind: Hashable, make: Callable[[Clock], T]) -> T:
    """Return what earlier runs of this process made of such a model, batch and length.

    Parameters
    ----------
    target : Target
    sequences : Sequences
    kind : hashable
        What it is, and of which method.
    make : callable
        Makes a new one with the clock of the target's device.
    """
    key = "pace", kind, *alike(target, sequences)
    return Model.of(target.model).recall(key, lambda: make(target.clock()))


def costs_of(target: Target, sequences: Sequences, kind: Hashable = "passes") -> PassCosts:
    """Return the costs of passes of a kind, as earlier runs of this process found them."""
    return recalled(target, sequences, kind, PassCosts)


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

    def forget(self) -> None:
        """Weigh what is known less: a round passed without a draft."""
        keep = max(1 - 1 / 32, min(1.0, self._PRIOR / self.expected))
        self.expected, self.accepted = keep * self.expected, keep * self.accepted

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
