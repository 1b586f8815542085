"""What rounds take, by rows of the whole batch, and drafts, by effort: timed aside, then followed.

A shape, a pass of so many rows or a draft of an effort, is *calibrated* by being run behind the
committed text, as a draft that is rejected: once to record or capture it, once more where it was
captured, and twice timed. What real rounds take moves a figure by little each time, so that no
outlier decides.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import specattn
from specattn.decoding.drafting.gains import Effort
from specattn.decoding.text.statistics import Clock
from specattn.files import cache_named, keep

PASS = "pass"
"""The kind of passes that hand out nothing beside logits and features."""

ASIDE = "one row aside"
"""A pass of one row of each request that was timed as others are: rounds take a little more."""

_EARLY = 3  # rounds of which the fastest counts, before others move it
_NEWS = 1.05  # times that a figure changes by, from which on it is looked at again
_A_ROW = 0.1  # of the seconds of one row: what another takes, where one size alone was timed
_LEAST = 1e-9  # seconds
_FOLLOWS = 1 / 16  # power of two by which a round moves a figure at most
_ALIKE = 1.5  # lengths and batches whose passes are taken to cost the same
_log = logging.getLogger(__name__)


class Costs:
    """Seconds by kind and size: of passes by rows of the batch, of a drafter's drafts by effort.

    `confirmed` is when a figure was met last. With a `file`, those of an earlier process are the
    first guess.
    """

    def __init__(self, file: Path | None = None, former: Costs | None = None):
        self.file, self.changes, self.news = file, 0, 0
        self.seconds, self.confirmed = (dict[tuple[str, Any], float]() for _ in range(2))
        self._early, self._told = (
            dict[tuple[str, Any], list[float]](),
            dict[tuple[str, Any], float](),
        )
        self._tables = dict[str, tuple[int, Any, Any]]()
        if file is not None and os.path.exists(file):
            self._load(file)
        elif former is not None:
            self.seconds, self.confirmed = dict(former.seconds), dict(former.confirmed)

    def put(self, shape: tuple[str, Any], seconds: float, at: float, requests: int) -> None:
        """Note what was timed aside at some elapsed time, and keep it for later processes.

        Of passes it becomes what a round takes: that much more than one row of each request. What
        drafts take besides, in rounds, the first of these tell.
        """
        if isinstance(shape[1], Effort):
            self._early[shape] = []
        elif shape[0] != ASIDE:
            seconds = self.plain(requests) + max(0.0, seconds - self.seconds[ASIDE, requests])
        self._set(shape, seconds, at)
        if self.file is not None:
            rows = [[*shape, s] for shape, s in self.seconds.items()]
            cache = self.file.parent.parent
            keep(cache, self.file, lambda path: path.write_text(json.dumps(rows)))

    def plain(self, requests: int) -> float:
        """Return the seconds of a round that drafts nothing."""
        known = self.seconds.get((PASS, requests))
        return float(self.of_passes(PASS, np.array(requests))) if known is None else known

    def is_steady(self, requests: int) -> bool:
        """Whether rounds that draft nothing were met often enough."""
        shape = PASS, requests
        return shape in self.seconds and len(self._early.get(shape, [0.0] * _EARLY)) == _EARLY

    def follow(self, shape: tuple[str, Any], requests: int, seconds: float, at: float) -> None:
        """Let a measured time move what is known; of what is not, the fastest of three counts."""
        if shape not in self.seconds:
            self._early.setdefault(shape, [])
        early = self._early.get(shape)
        if early is None or len(early) == _EARLY:
            known = self.seconds[shape]
            self._set(shape, known * min(max(seconds / known, 0.5), 2.0) ** _FOLLOWS, at)
            return
        early.append(seconds)
        if shape[1] == requests or len(early) == _EARLY:
            self._set(shape, min(early), at)

    def _set(self, shape: tuple[str, Any], seconds: float, at: float) -> None:
        seconds = self.seconds[shape] = max(seconds, _LEAST)  # a clock may not see it
        self.confirmed[shape] = at
        self.changes += 1
        if not 1 / _NEWS < seconds / self._told.get(shape, math.inf) < _NEWS:
            self._told[shape], self.news = seconds, self.news + 1

    def table(self, kind: str) -> tuple[Any, Any]:
        """Return rows, ascending, and seconds of what is known of a kind of passes."""
        if kind not in self._tables or self._tables[kind][0] != self.changes:
            known = sorted((size, s) for (of, size), s in self.seconds.items() if of == kind)
            rows, seconds = zip(*known, strict=True) if known else ((), ())
            self._tables[kind] = self.changes, np.array(rows), np.array(seconds)
        return self._tables[kind][1:]

    def of_passes(self, kind: str, rows: Any, *, beyond: float = 1.0) -> Any:
        """Return seconds by rows: between sizes lines; of more than were timed infinity.

        The last line goes on up to `beyond` times the most rows that were timed; with 1 it does
        not, otherwise `PASS` stands for an unknown kind.
        """
        sizes, seconds = self.table(kind)
        if not len(sizes):
            other = beyond > 1 and kind != PASS
            return (
                self.of_passes(PASS, rows, beyond=beyond) if other else np.full(rows.shape, np.inf)
            )
        slope = _A_ROW * seconds[0] / sizes[0]
        if len(sizes) > 1:  # the last two may differ by noise alone
            far = (seconds[-1] - seconds[:-1]) / (sizes[-1] - sizes[:-1])
            slope = max(0.0, far[0], far[-1])
        more = np.where(rows > beyond * sizes[-1], np.inf, seconds[-1] + slope * (rows - sizes[-1]))
        return np.where(rows > sizes[-1], more, np.interp(rows, sizes, seconds))

    def guess(self, name: str, effort: Effort, level: float) -> float:
        """Return what a draft may take: in proportion to what was timed, or so much a level."""
        known = {e: s for (of, e), s in self.seconds.items() if of == name}
        if effort in known:
            return known[effort]
        each = [
            s * max(effort.depth / e.depth, _nodes(effort) / _nodes(e)) for e, s in known.items()
        ]
        return min(each, default=level * effort.depth)

    def _load(self, file: Path) -> None:
        """Read what an earlier process kept; of what is no such file nothing is taken."""
        try:
            for kind, size, seconds in json.loads(file.read_text()):
                given = Effort(*map(int, size)) if isinstance(size, list) else int(size)
                if not (math.isfinite(seconds) and seconds > 0):
                    raise ValueError(f"{seconds} seconds")
                self.seconds[str(kind), given] = float(seconds)
        except (OSError, ValueError, TypeError) as error:
            self.seconds = {}
            _log.warning("%s is no table of costs and is not used: %s", file, error)


def _nodes(effort: Effort) -> int:
    return 1 + effort.width * (effort.depth - 1)


class Ledger:
    """Seconds that all runs of a model have decoded, spent on calibrating, and saved by drafts.

    `capture` is what it took last to capture or record a shape, `tried` the time when a drafter was
    last tried that seemed to lose.
    """

    def __init__(self, capture: float) -> None:
        self.elapsed = self.spent = self.saved = 0.0
        self.tried = dict[str, float]()
        self.capture = capture


def timed_aside(run: Callable[[], Any], clock: Clock, colds: int) -> tuple[float, float, float]:
    """Return what a shape takes, what its first run took besides, and all that this took.

    The lesser of two runs counts, behind so many `colds` that record, capture or warm up.
    """
    times = []
    for _ in range(colds + 2):
        begin = clock.now()
        run()
        end = clock.now()
        clock.wait(end)
        times.append(clock.seconds(begin, end))
    seconds = min(times[colds:])
    return seconds, max(0.0, times[0] - seconds), sum(times)


def alike(requests: int, length: int) -> tuple[int, int]:
    """Return what batches and lengths have in common whose passes take about the same time."""
    return round(math.log(requests, _ALIKE)), round(math.log(length, _ALIKE))


def file_of(model: PreTrainedModel, place: Hashable) -> Path | None:
    """Return where costs are kept for other processes, if ``SPECATTN_CACHE`` names a folder."""
    if (folder := cache_named()) is None:
        return None
    where = str(model.dtype), str(model.device), torch.get_num_threads()
    facts = [_machine(), where, model.config.to_dict(), place]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return folder / "costs" / f"{key}.json"


@cache
def _machine() -> list[Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    isa = torch.backends.cpu.get_cpu_capability()
    return [device, isa, torch.__version__, specattn.__version__]
