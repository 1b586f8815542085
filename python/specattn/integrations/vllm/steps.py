"""Times vLLM's steps by rows of the whole batch, and drafts of the target by their length.

vLLM has captured its sizes before it serves, so nothing is run aside to be timed: a step goes from
the end of one call of the drafter to the beginning of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from specattn.decoding.drafting.costs import PASS, Costs, alike
from specattn.decoding.text.statistics import Clock

_DRAFTS = "drafts"
_ROOMS = np.array([0, 1, *(n << power for power in range(16) for n in (2, 3))])


class Steps:
    """What steps take at batches and lengths like those of the last one.

    `elapsed` are the seconds of all steps, `waited` those that were skipped since the last lookup,
    and `took` those that looking up and choosing take.
    """

    def __init__(self, clock: Clock):
        self.clock, self.elapsed, self.waited, self.took = clock, 0.0, 0.0, 0.0
        self.costs, self.requests = Costs(), 1
        self._place, self._known = (0, 0), dict[tuple[int, int], Costs]()
        self._begun: tuple[Any, ...] = ()
        self._unread = deque[tuple[Any, ...]]()

    def end(self, now: Any, lengths: Sequence[int], counts: bool) -> None:
        """Note that a step has ended `now`, whose time may count, with such texts."""
        self.waited = 0.0
        if self._begun and counts:
            self._unread.append((*self._begun, now))
        elif self.plain < np.inf:
            self.elapsed += self.plain
        while self._unread and self.clock.passed(self._unread[0][-1]):
            self._read(*self._unread.popleft())
        self._begun = ()
        if lengths:
            former, place = self._place, alike(len(lengths), max(lengths))
            if place not in self._known:
                near = former[0] == place[0] and abs(former[1] - place[1]) == 1
                self._known[place] = Costs(former=self.costs if near else None)
            self.requests, self._place, self.costs = len(lengths), place, self._known[place]

    def skip(self) -> None:
        """Note that a step has ended, and one begins, which are not timed."""
        self._begun = ()
        self.waited += self.plain
        self.elapsed += self.plain

    def begin(self, drafted: int, depth: int, asked: Any, chosen: Any) -> None:
        """Note that all is drafted, `drafted` tokens in all, chains of `depth` by the target.

        `asked` and `chosen` are moments: of the beginning of the call, and of its choice.
        """
        rows = int(self.rows(np.array(drafted)))
        self._begun = self.costs, rows, self.requests, depth, asked, chosen, self.clock.now()

    def _read(self, costs: Costs, rows: int, requests: int, depth: int, *moments: Any) -> None:
        """Book a step whose moments have passed."""
        between = zip(moments[:-1], moments[1:], strict=True)
        took, drafting, step = (self.clock.seconds(*two) for two in between)
        self.took = min(took, self.took + (took - self.took) / 8) if self.took else took
        self.elapsed += took + drafting + step
        costs.follow((PASS, rows), step)
        if depth:
            costs.follow((_DRAFTS, depth), drafting)

    @property
    def plain(self) -> float:
        """What a step takes that drafts nothing; infinity before one was timed."""
        return self.costs.plain(self.requests)

    def rooms(self, most: int) -> Any:
        """Return few numbers of tokens that all requests draft, from 0 to `most` or so."""
        rooms = _ROOMS[(_ROOMS == 0) | (self.requests <= 16 * _ROOMS)]
        return rooms[: np.searchsorted(rooms, most) + 1]

    def rows(self, drafted: Any) -> Any:
        """Return the rows of the whole batch as which steps with drafted tokens are timed."""
        rooms = self.rooms(np.max(drafted))
        return self.requests + rooms[np.searchsorted(rooms, drafted)]

    def seconds(self, rows: Any) -> Any:
        """Return what steps take; infinity where one has more than twice the rows of any so far.

        The first of `rows` is the fewest that there may be, and always allowed.
        """
        most = max(*(2 * size for size in self.costs.table(PASS)[0]), 0, rows[0])
        return np.where(rows > most, np.inf, self.costs.of_passes(PASS, rows))

    def drafts(self, depths: Any, share: float) -> Any:
        """Return what the target takes to draft chains: at first `share` of a step for a token."""
        sizes, seconds = self.costs.table(_DRAFTS)
        if not len(sizes):
            return share * self.plain * depths
        within = np.interp(depths, [0, *sizes], [0.0, *seconds])
        return within * np.maximum(1.0, depths / sizes[-1])
