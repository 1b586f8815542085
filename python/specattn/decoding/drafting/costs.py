"""What rounds take, by rows of the whole batch, and drafts, by effort: what real ones took.

A shape, a pass of so many rows or a draft of an effort, is guessed until a round had it. The round
that records or captures it does not count, nor, unless it is faster than was guessed, the next one,
which meets cold caches. The fastest of two more stands for it, and each later one moves it by a
little, however long it took: up by less than down, since what disturbs a round makes it slower.
Machines slow down and texts grow for all shapes alike, and those that are rarely met would else be
compared by times of another hour or text: so a round of what was met often moves the pace that all
are kept in, and its own shape less. No pass takes longer than one of more rows that was met as
often, nor, until it was met often itself, than several of fewer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import specattn
from specattn.decoding.drafting.gains import Effort
from specattn.files import cache_named, keep

PASS = "pass"
"""The kind of passes that hand out nothing beside logits and features."""

_EARLY, _SETTLED = 3, 16  # first rounds, of which the fastest counts; that say nothing of others
_DOWN, _UP = 0.08, 0.04  # logarithms by which a round moves what is known at most
_OWN = 1 / 8  # of which, once it is settled, its shape moves so much, and the pace the whole
_NEWS, _DRIFT = 0.05, 0.2  # logarithms that a figure moves by, and the pace, or they stay
_LEAST = 1e-9  # seconds
_LEVELS = 0.5  # of the one draft that is known: what its levels take
_FAR = 2.0**20  # rows behind the largest known size to which a line is drawn
_ALIKE = 1.5  # lengths and batches whose passes are taken to cost the same
_log = logging.getLogger(__name__)


class Costs:
    """Seconds by kind and size: of passes by rows of the batch, of a drafter's drafts by effort.

    With a `file`, those of an earlier process are the first guess. `changes` counts changes.
    """

    def __init__(self, file: Path | None = None, former: Costs | None = None):
        self.file, self.changes, self._kept = file, 0, 0
        self.seconds = dict[tuple[str, Any], float]()
        self._units = dict[tuple[str, Any], float]()  # logarithms, of a pace
        self._pace = self._told = 0.0  # its own logarithm, and of it in `seconds`
        self._counts = Counter[tuple[str, Any]]()  # rounds of each
        self._tables = dict[str, tuple[int, list[int], list[float]]]()
        if file is not None and os.path.exists(file):
            self._load(file)
        elif former is not None:
            self.seconds = dict(former.seconds)
        self._units = {shape: math.log(s) for shape, s in self.seconds.items()}
        self._counts.update(dict.fromkeys(self.seconds, _SETTLED))

    def put(self, shape: tuple[str, Any], seconds: float) -> None:
        """Note what was timed aside, until rounds tell what it takes in these."""
        self._counts[shape] = 0
        self._units[shape] = self._log(seconds)
        self._tell(shape)

    def keep(self) -> None:
        """Keep what is known for later processes, if there is a file for it."""
        if self.file is not None and self.changes != self._kept:
            rows = [[*shape, s] for shape, s in self.seconds.items()]
            cache, self._kept = self.file.parent.parent, self.changes
            keep(cache, self.file, lambda path: path.write_text(json.dumps(rows)))

    def plain(self, requests: int) -> float:
        """Return the seconds of a round that drafts nothing."""
        sizes, seconds = self.table(PASS)
        if requests in sizes:
            return seconds[sizes.index(requests)]
        return float(self.of_passes(PASS, np.array(requests)))

    def is_steady(self, requests: int) -> bool:
        """Whether rounds that draft nothing were met often enough."""
        return self._counts[PASS, requests] >= _EARLY

    def follow(self, shape: tuple[str, Any], seconds: float, guess: float = 0.0) -> None:
        """Let a measured time move what is known; of a draft nothing may be but a `guess`."""
        self._counts[shape] += 1
        rounds, known, units = self._counts[shape], self._units.get(shape), self._log(seconds)
        if known is None or rounds <= 2:  # what was timed aside, or met cold caches, says less
            known = units
        moved = min(max(units - known, -_DOWN), _UP)
        if rounds <= _EARLY:
            moved = min(units - known, 0.0)
        elif rounds > _SETTLED:
            self._pace, moved = self._pace + moved, _OWN * moved
        self._units[shape] = known + moved
        if rounds < _EARLY and shape[0].startswith(PASS):
            guess = float(self.of_passes(shape[0], np.array(shape[1])))
        if rounds >= _EARLY or seconds < guess:  # nothing that disturbs makes a round faster
            self._tell(shape)
        self.changes += rounds == _SETTLED  # no longer limited by passes of fewer rows

    def _log(self, seconds: float) -> float:
        return math.log(max(seconds, _LEAST)) - self._pace  # a clock may not see it

    def _tell(self, shape: tuple[str, Any]) -> None:
        """Let `seconds` say what is known of a shape, and of all once the pace is another."""
        drifted = abs(self._pace - self._told) > _DRIFT
        self._told = self._pace if drifted else self._told
        for one in {shape, *self.seconds} if drifted else [shape]:
            told = self._told + self._units[one]
            if abs(told - math.log(self.seconds.get(one, math.inf))) > _NEWS:
                self.seconds[one] = math.exp(told)
                self.changes += 1

    def table(self, kind: str) -> tuple[list[int], list[float]]:
        """Return rows, ascending, and seconds of what is known of a kind of passes."""
        if kind not in self._tables or self._tables[kind][0] != self.changes:
            known = sorted((size, s) for (of, size), s in self.seconds.items() if of == kind)
            met = [(min(self._counts[kind, n] or _SETTLED, _SETTLED), s) for n, s in known]
            # More rows take no less: what seems to was disturbed, if it was not met more often.
            least = [min(s for n, s in met[at:] if n >= met[at][0]) for at in range(len(met))]
            for at in range(1, len(met)):  # nor, as some rounds may say, more than passes of fewer
                if met[at][0] < _SETTLED:
                    passes = math.ceil(known[at][0] / known[at - 1][0])
                    least[at] = min(least[at], passes * least[at - 1])
            self._tables[kind] = self.changes, [size for size, _ in known], least
        return self._tables[kind][1:]

    def of_passes(self, kind: str, rows: Any, beyond: float = math.inf, a_row: float = 0.1) -> Any:
        """Return seconds by rows: on lines between sizes, and up to `beyond` times the largest.

        Of more rows infinity. Of an unknown kind `PASS` stands for it; where one size alone is
        known, another row takes `a_row` of what one of these does.
        """
        sizes, seconds = self.table(kind)
        if not len(sizes):
            unknown = np.full(rows.shape, np.inf)
            return unknown if kind == PASS else self.of_passes(PASS, rows, beyond, a_row)
        slope = a_row * seconds[0] / sizes[0]
        if len(sizes) > 1:
            # The lesser: what is too low is mended by a round, what is too high never.
            ways = ((seconds[-1] - seconds[n]) / (sizes[-1] - sizes[n]) for n in (0, -2))
            slope = max(0.0, min(ways))
        far = sizes[-1] + _FAR
        found = np.interp(rows, [*sizes, far], [*seconds, seconds[-1] + slope * _FAR])
        return np.where(rows > beyond * sizes[-1], np.inf, found)

    def of_drafts(
        self, name: str, efforts: Sequence[Effort], level: float, a_row: float
    ) -> tuple[Any, bool]:
        """Return the seconds of drafts, and whether one of them is known.

        By nodes, of which another of a level takes `a_row` of the first: on lines between known
        ones, less in proportion, more by the flattest line to the largest known one: what is
        guessed too low is mended by a round. Where none is known a level takes `level`.
        """

        def weight(one: Effort) -> float:
            return one.depth * (1 + a_row * (one.width - 1))

        known = {one: s for (of, one), s in self.seconds.items() if of == name}
        weights = np.array([weight(one) for one in efforts])
        if not known:
            return level * weights, False
        met = sorted((weight(one), s) for one, s in known.items())
        found = np.interp(weights, [n for n, _ in met], [s for _, s in met])
        least, (most, last) = met[0][0], met[-1]
        slopes = [(last - s) / (most - n) for n, s in met if n < most] or [_LEVELS * last / most]
        found += max(0.0, min(slopes)) * np.maximum(weights - most, 0)
        found *= np.minimum(weights / least, 1)
        found = [known.get(one, s) for one, s in zip(efforts, found.tolist(), strict=True)]
        return np.array(found), not known.keys().isdisjoint(efforts)

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


class Ledger:
    """What all runs of a model by the same drafters share: `elapsed`, the seconds they decoded.

    `capture` is what it took last to capture or record a shape, `tried` the time when a drafter, an
    effort of it or any (`NONE`), was last tried that seemed to lose.
    """

    def __init__(self, capture: float) -> None:
        self.elapsed = 0.0
        self.tried = dict[tuple[str, Effort], float]()
        self.capture = capture


def alike(requests: int, length: int) -> tuple[int, int]:
    """Return what batches and lengths have in common whose passes take about the same time."""
    return round(math.log(requests, _ALIKE)), round(math.log(length, _ALIKE))


def file_of(model: PreTrainedModel, place: Hashable) -> Path | None:
    """Return where costs are kept for other processes, if ``SPECATTN_CACHE`` names a folder."""
    if (folder := cache_named()) is None:
        return None
    where = str(model.dtype), str(model.device), torch.get_num_threads()
    facts = [_machine(model.device), where, model.config.to_dict(), place]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return folder / "costs" / f"{key}.json"


@cache
def _machine(device: torch.device) -> list[Any]:
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor()
    isa = torch.backends.cpu.get_cpu_capability()
    return [name, isa, torch.__version__, specattn.__version__]
