"""What rounds take, by rows of the whole batch, and drafts, by effort: what real ones took.

A shape, a pass of so many rows or a draft of an effort, is guessed until a round had it; the one
that records or captures it does not count, nor does a first one that took far longer than was
guessed. The fastest of its first three rounds stands for it, and later the middle of five, so that
no outlier decides and three rounds tell it anew. No pass takes longer than one of more rows that
was met as often; and what one or two disturbed rounds say of a size, or of a draft, has a limit, or
it would not be met again. Machines slow down and texts grow for all shapes alike, and those that
are rarely met would else be compared by times of another hour or text: so times are kept in units
of a pace. Passes of the fewest rows, which are the most frequent, tell it, by the fourth fastest of
nine, since what disturbs a round makes it slower.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import specattn
from specattn.decoding.drafting.gains import Effort
from specattn.files import cache_named, keep

PASS = "pass"
"""The kind of passes that hand out nothing beside logits and features."""

_EARLY, _RECENT = 3, 5  # rounds of which the fastest counts, and then the middle one
_PACING = 9  # rounds that tell the pace
_NEWS = 1.05  # times that a figure moves by, or it stays
_DOUBT = 1.3  # times what was guessed of a pass that its first round may take
_MOST = 8.0  # times what was guessed that a draft may take by a few rounds
_LEAST = 1e-9  # seconds
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
        # When it was, in rounds (0 elsewhere: an earlier process, another length), and units.
        self._recent = dict[tuple[str, Any], deque[tuple[int, float]]]()
        self._known = dict[tuple[str, Any], tuple[int, float]]()  # what follows from these
        self._rounds, self._pace = 0, 1.0  # of so many seconds a unit
        self._counts = Counter[tuple[str, Any]]()  # rounds of each
        self.cold = False  # whether first rounds of a size may be slow: then three are awaited
        self._tables = dict[str, tuple[int, list[int], list[float]]]()
        if file is not None and os.path.exists(file):
            self._load(file)
        elif former is not None:
            self.seconds = dict(former.seconds)
        for shape, seconds in self.seconds.items():  # three rounds tell otherwise
            self._known[shape] = 0, seconds
            self._recent[shape] = deque([(0, seconds)] * _RECENT, _PACING)

    def put(self, shape: tuple[str, Any], seconds: float) -> None:
        """Note what was timed aside, until rounds tell what it takes in these."""
        self._recent[shape] = deque(maxlen=_PACING)
        self._set(shape, seconds / self._pace)

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
        return len(self._recent.get((PASS, requests), ())) >= _EARLY

    def follow(self, shape: tuple[str, Any], seconds: float) -> None:
        """Let a measured time move what is known."""
        self._rounds += 1
        self._counts[shape] += 1
        now, recent = self._rounds, self._recent.setdefault(shape, deque(maxlen=_PACING))
        passes, known = self.table(PASS)[0], shape in self.seconds
        recent.append((now, seconds / self._pace))
        if len(recent) == _EARLY:  # the first may have compiled or met cold caches
            recent.extend([(now, min(s for _, s in recent))] * _EARLY)
        times, paces = [s for _, s in recent], shape == (PASS, *passes[:1])
        is_full, units = len(times) == _PACING, min(times)
        if len(times) >= _RECENT:
            units = sorted(times)[3] if paces and is_full else median_low(times[-_RECENT:])
        if not known and self._awaits(shape, seconds, len(recent)):
            return
        moved, since = self._set(shape, units), recent[0][0]
        # Its own first rounds say nothing of others.
        if paces and moved != 1 and (since == 0 or self._counts[shape] > 2 * _PACING):
            self._keep_pace(shape, moved, since)

    def _awaits(self, shape: tuple[str, Any], seconds: float, rounds: int) -> bool:
        """Whether first rounds of a shape, the last of so many seconds, say nothing by themselves.

        A slow one of a pass, for it would not be met again; where all may be slow, two.
        """
        if self.cold or rounds > 1:
            return self.cold and bool(self.seconds) and rounds < _EARLY
        kind, size = shape
        guess = self.of_passes(kind, np.array(size)) if kind.startswith(PASS) else math.inf
        return seconds > _DOUBT * float(guess)

    def _set(self, shape: tuple[str, Any], units: float) -> float:
        """Set what a shape takes; return how many times what it took before."""
        units = max(units, _LEAST)  # a clock may not see it
        _, before = self._known.get(shape, (0, units))
        moved = units / before
        if shape in self.seconds and 1 / _NEWS < moved < _NEWS:
            units, moved = before, 1.0
        else:
            self.changes += 1
        self._known[shape], self.seconds[shape] = (self._rounds, units), units * self._pace
        return moved

    def _keep_pace(self, shape: tuple[str, Any], moved: float, since: int) -> None:
        """Let the pace move with a shape; what was met `since` then was timed at this one."""
        self._pace *= moved
        for other, (at, units) in self._known.items():
            self._known[other] = at, units / moved if at > since or other == shape else units
            self.seconds[other] = self._known[other][1] * self._pace
            recent = self._recent[other]
            times = [(n, s / moved if n > since else s) for n, s in recent]
            self._recent[other] = deque(times, _PACING)

    def _few(self, kind: str, size: Any) -> bool:
        """Whether one or two rounds say what a shape takes, which all may have been disturbed."""
        return 0 < len(self._recent[kind, size]) < _RECENT

    def table(self, kind: str) -> tuple[list[int], list[float]]:
        """Return rows, ascending, and seconds of what is known of a kind of passes."""
        if kind not in self._tables or self._tables[kind][0] != self.changes:
            known = sorted((size, s) for (of, size), s in self.seconds.items() if of == kind)
            met = [(len(self._recent[kind, size]) or _PACING, seconds) for size, seconds in known]
            # More rows take no less: what seems to was disturbed, if it was not met more often.
            least = [min(s for n, s in met[at:] if n >= met[at][0]) for at in range(len(met))]
            for at in range(1, len(met)):  # nor does a row take more, as few rounds may say
                if self._few(kind, known[at][0]):
                    most = least[at - 1] * known[at][0] / known[at - 1][0]
                    least[at] = min(least[at], most)
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

        Others are in proportion to what those took, or so much a level; another node of a level
        takes `a_row` of the first.
        """

        def weight(one: Effort) -> float:
            return one.depth * (1 + a_row * (one.width - 1))

        def most(one: Effort) -> float:  # as few rounds may say
            return _MOST * level * weight(one) if self._few(name, one) else math.inf

        known = {one: min(s, most(one)) for (of, one), s in self.seconds.items() if of == name}
        least = min((s / weight(one) for one, s in known.items()), default=level)
        found = [known.get(one) or least * weight(one) for one in efforts]
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
