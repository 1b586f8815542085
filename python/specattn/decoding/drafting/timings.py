"""Measures what passes and drafts take, by their size, and estimates sizes that were not tried.

A run measures its own rounds. Nothing is tried that could cost much: sizes grow by doubling, as
long as the sizes measured so far say that more would pay.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Sequence, Set
from statistics import median
from typing import Any, TypeVar

import torch

from specattn.decoding.engine.contract import DraftContext
from specattn.decoding.model.model import Model
from specattn.decoding.text.statistics import Clock

T = TypeVar("T")
Kind = TypeVar("Kind", bound="Timings")

SIZES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65)
"""Rows of a pass, root included: few sizes, so that each is met again and its cost known."""

EXPLORING = 0.02
"""Share of the time that may go to trying again what was too slow."""

_KEPT = 8  # times of a size that say what it takes
_JUDGED = 4  # so many more are seen before what they say is taken anew
_SAME = 0.02  # medians that differ by no more
_MOST_LOST = 3  # trials lost in a row, each of which halves the share for further ones
_ALIKE = 1.5  # lengths and batches whose passes are taken to cost the same


class Timings:
    """Median seconds of the last times that something of a size was done.

    On CUDA a time is read when it has passed; nothing waits for it.
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

    def note(self, size: Any, begun: Any, ended: Any, shape: Any = None) -> float:
        """Note the moments between which something was done; return the seconds read by this.

        Where a size stands for several shapes, `shape` tells them apart.
        """
        shape = size if shape is None else shape
        if shape in self._met:
            self._unread.append((size, begun, ended))
        self._met.add(shape)  # the first of a shape finds code and data cold
        read = 0.0
        while self._unread and self.clock.passed(self._unread[0][2]):
            size, begun, ended = self._unread.popleft()
            seconds = self.clock.seconds(begun, ended)
            known = self._seconds.setdefault(size, deque(maxlen=_KEPT))
            if self._is_old(size, seconds):
                known.clear()
                self._noted[size] = 0
            known.append(seconds)
            count = self._noted[size] = self._noted.get(size, 0) + 1
            if count <= _KEPT or count % _JUDGED == 0:
                self._found(size, median(known))
            read += seconds
            self.elapsed += seconds
            self._measured_at[size] = self.elapsed
        return read

    def _found(self, size: Any, seconds: float) -> None:
        self._medians[size] = seconds

    def _is_old(self, size: Any, seconds: float) -> bool:
        """Whether a size was left for so long that to try it again costs next to nothing.

        What it took may have been chance, another program's doing, or true of a shorter text.
        """
        return EXPLORING * (self.elapsed - self._measured_at.get(size, self.elapsed)) > seconds

    def doubt(self) -> None:
        """Let the next time of each size decide alone: other load may have disturbed the last."""
        self._seconds.clear()
        self._noted.clear()

    def copy(self: Kind) -> Kind:
        """Return what is known as a first guess for what may take a little longer."""
        copy = type(self)(self.clock)
        copy._medians = self.medians
        copy._seconds = {size: deque([s], _KEPT) for size, s in copy._medians.items()}
        copy.elapsed, copy._measured_at = self.elapsed, dict(self._measured_at)
        copy._met = set(self._met)
        return copy

    @property
    def sizes(self) -> Set[Any]:
        """What was measured."""
        return self._medians.keys()

    def seconds(self, size: Any) -> float:
        """Return the median of a size, 0 before it was measured."""
        return self._medians.get(size, 0.0)

    @property
    def medians(self) -> dict[Any, float]:
        """Median seconds by size, ascending, of the sizes measured."""
        return dict(sorted(self._medians.items()))


class PassCosts(Timings):
    """Seconds of a round, its drafting apart, by the rows that a request verifies."""

    def __init__(self, clock: Clock):
        super().__init__(clock)
        self._known: dict[int, float] | None = None
        self._forgets_at = 0.0
        self._estimates: dict[tuple[int, ...], dict[int, float]] = {}

    def note(self, size: int, begun: Any, ended: Any, shape: Any = None) -> float:
        """Note a pass of `size` rows per request; forget sizes that are cheap to try again."""
        read = super().note(size, begun, ended, shape)
        if self.elapsed > self._forgets_at:
            self._forgets_at = (1 + EXPLORING / 4) * self.elapsed
            plain = min(self._medians)
            for rows, seconds in list(self._medians.items()):
                if rows > plain and self._is_old(rows, seconds):
                    del self._medians[rows]
                    self._seconds.pop(rows, None)
                    self._noted.pop(rows, None)
                    self._known = None
        return read

    def _found(self, size: int, seconds: float) -> None:
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

    def estimates(self, sizes: tuple[int, ...] = SIZES) -> dict[int, float]:
        """Return seconds by rows for every size of `sizes` that may be tried next.

        Between sizes that were measured lies a line. It goes on up to twice the largest of them, or
        up to the next size; beyond, nobody knows. Without any measurement one row may be tried.
        """
        known = self.measured
        if not known:
            return {1: 1.0}
        if sizes not in self._estimates:
            rows, seconds = list(known), list(known.values())
            allowed = growing(sizes, rows[-1])
            self._estimates[sizes] = {size: _line(rows, seconds, size) for size in allowed}
        return self._estimates[sizes]


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


class Trials:
    """Says when what seems to lose may be tried again: when that costs a small share of the time.

    `elapsed` are the seconds that were measured, over all runs of a model.
    """

    def __init__(self) -> None:
        self.elapsed = self.lost = 0.0
        self._tried_at: dict[Hashable, float] = {}
        self._in_vain: dict[Hashable, int] = {}  # in a row

    def is_due(self, what: Hashable, loss: float, share: float = EXPLORING / 2) -> bool:
        """Whether something may be tried that is thought to lose so many seconds."""
        share /= 2 ** min(self._in_vain.get(what, 0), _MOST_LOST)
        since = self.elapsed - self._tried_at.get(what, 0.0)
        return loss < min(share * since, EXPLORING * self.elapsed - self.lost)

    def tried(self, what: Hashable) -> None:
        """Note that something was tried now."""
        self._tried_at[what] = self.elapsed

    def judge(self, what: Hashable, *, won: bool, lost: float) -> None:
        """Book the seconds that a trial lost; if it did not win, the next waits longer."""
        self.tried(what)
        self.lost += lost
        self._in_vain[what] = 0 if won else self._in_vain.get(what, 0) + 1


class Memory:
    """Recalls what was measured for batches and lengths alike, by earlier runs too.

    ``lengths()`` returns the tokens of every running request; `machine` is what else decides how
    long a pass takes.
    """

    def __init__(
        self,
        clock: Clock,
        lengths: Callable[[], Sequence[int]],
        model: Model,
        machine: tuple[Hashable, ...] = (),
    ):
        self.clock, self.lengths, self.model, self.machine = clock, lengths, model, machine
        self._alike: tuple[Hashable, ...] = ()
        self._holds = 0, 0, 0  # for such a batch, from one length to another

    @classmethod
    def of(cls, context: DraftContext) -> Memory:
        """Return that of a run."""
        target, sequences = context.target, context.sequences
        machine = target.device, target.lockstep and target.lockstep.ranks.size
        lengths = lambda: sequences.active_lengths  # noqa: E731
        return cls(target.clock(), lengths, Model.of(target.model), machine)

    def alike(self) -> tuple[Hashable, ...]:
        """Return what texts have in common whose passes take about the same time."""
        lengths = self.lengths()
        requests, longest = len(lengths), max(lengths)
        known, begin, end = self._holds
        if requests != known or not begin <= longest < end:  # else it is asked too often for logs
            batch, length = (round(math.log(n, _ALIKE)) for n in (requests, longest))
            threads = torch.get_num_threads(), threading.get_ident()
            self._alike = batch, length, *threads, *self.machine
            self._holds = requests, longest, longest + longest // 64 + 1
        return self._alike

    def recall(self, kind: Hashable, make: Callable[[], T]) -> T:
        """Return what was kept of a kind for texts like these, or what `make` makes."""
        return self.model.recall(("pace", kind, *self.alike()), make)
