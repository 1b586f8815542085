"""Chooses before every round who drafts and how much: what gives the most tokens per second.

What passes and drafts take is known (`Costs`), what a draft brings is learned (`gains`). A `Pacer`
compares nothing, what was looked up, and every effort of its drafters, for the whole batch.

Whatever is chosen changes no text: it follows from clocks, the text so far and what drafters say of
it, before any of the round's tokens is drawn.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from specattn.decoding.drafting.calibrating import AGAIN, Calibrator, captured_sizes
from specattn.decoding.drafting.costs import PASS, Costs, Ledger, alike, file_of
from specattn.decoding.drafting.gains import NONE, SIZES, Effort, Lookups, sizes_up_to
from specattn.decoding.engine.contract import DraftContext, Verified
from specattn.decoding.model.model import Model

if TYPE_CHECKING:
    from specattn.decoding.drafting.pace import Share

ASKING = 0.015
"""Share of the time for lookups that find nothing of use."""

_UNTIMED, _GROWS = 4, 2.25  # on a CPU: rows chosen at first, and times the most rows so far
_HOLDS, _LOOKS = 8, 4  # rounds for which it holds that nothing pays; between looks beyond
_SETTLED = 32  # rounds for which what a capture takes is shared among as many tokens
_CAPTURE = 0.6  # seconds, of a CUDA graph on an H100, before one was captured; it ran from 0.15
_RESTS = 32  # rounds between looks for something to time, where there was nothing
_EXPECTED = 128  # tokens that a run goes on for at least, as far as its limit allows


class Choice(NamedTuple):
    """Who drafts (None: what was looked up, or nobody), how much, and what is expected of it.

    `tokens` of each request in the mean, in `seconds`; `alone` of one that it drafts for.
    """

    name: str | None
    effort: Effort
    rows: int
    tokens: float
    seconds: float
    alone: float = 0.0


class Pacer:
    """Chooses among nothing, lookups and drafters, for all requests of a run together."""

    def __init__(
        self, context: DraftContext, shares: Sequence[Share] = (), most_looked_up: int = 1
    ):
        self.target, self.sequences = context.target, context.sequences
        self.most_looked_up, self.shares = most_looked_up, list(shares)
        self.clock, self.model = self.target.clock(), Model.of(self.target.model)
        self.calibrator = Calibrator(self, context.calibrates)
        self.captures = self.target.runner.captures
        key = "pace", "ledger", threading.get_ident()
        self.ledger = self.model.recall(key, lambda: Ledger(_CAPTURE * self.captures))
        self.met: set[Any] = self.target.workspace.met  # shapes that are recorded or captured
        self.lookups, self.wants = Lookups(), 1  # rows that what was looked up had a use for
        self.saves: float | None = None  # seconds, by a lookup of late
        self.compared: tuple[Choice, Choice] | None = None  # the best, and nothing
        self.best_rate = 0.0
        self._asked, self._idle, self._held, self._turn, self._looked = 0.0, 0, 0, 0, 0
        self._calibrates = self._rests = _LOOKS  # the turn when something is timed, none at first
        self._took = dict[str, float]()  # parts of a lookup, in seconds
        self._of_lookups: tuple[Any, dict[int, float]] = None, {}
        self._place: tuple[int, int] | None = None
        self.costs = Costs()  # what is known of batches and lengths like these
        self._begun: tuple[Any, ...] | None = None
        self.last_ended: Any = None  # the moment when the last round ended
        self._unread = deque[tuple[Any, Callable[[], None]]]()  # moments, and what is read then

    def _turn_to(self, lengths: Sequence[int]) -> None:
        """Take what is known of such a batch and length; at first what is known of the last one."""
        place = alike(len(lengths), max(lengths))
        if place == self._place:
            return
        former, lockstep = self.costs if self._place else None, self.target.lockstep
        stored, how = str(self.target.cache.stored), self.target.runner.how
        whole = *place, stored, how, lockstep and lockstep.ranks.size
        file = file_of(self.target.model, whole) if lockstep is None else None
        key = "pace", "costs", whole, torch.get_num_threads(), threading.get_ident()
        self._place, self.costs = place, self.model.recall(key, lambda: Costs(file, former))

    @property
    def requests(self) -> int:
        """Running requests."""
        return len(self.sequences.active)

    @property
    def left(self) -> int:
        """Tokens that the run is taken to go on for: as many as it has, within its limit."""
        written = max(map(operator.sub, self.sequences.ends, self.sequences.generated_from))
        return max(1, min(self.sequences.draft_depth + 1, max(written, _EXPECTED)))

    def passes(self, kind: str, sizes: Any) -> Any:
        """Return seconds by rows of a request; infinity of those that are not to be chosen.

        On a CPU, where recording one takes little, rounds themselves tell: of ever more rows.
        """
        rows, beyond = sizes * self.requests, 1.0
        if not self.captures:
            beyond = _GROWS if len(self.costs.table(kind)[0]) > 1 else _UNTIMED
        found = self.costs.of_passes(kind, rows, beyond=beyond)
        return np.where((rows > self.target.runner.most_rows) & (sizes > 1), np.inf, found)

    def of_lookups(self) -> dict[int, float]:
        """Return seconds by the rows that may be looked up now, in graphs that are captured.

        What one lookup promises says nothing of the next, for which a graph would be captured.
        """
        known = self._known()
        if self._of_lookups[0] != known:
            most = self.most_looked_up
            sizes = captured_sizes(self.requests, most) if self.captures else sizes_up_to(most)
            found = zip(sizes, self.passes(PASS, np.array(sizes)).tolist(), strict=True)
            lacks = [n for n in sizes[1:] if (PASS, n * self.requests) not in self.met]
            lacks = lacks if self.captures else []
            timed = {n: s for n, s in found if s < np.inf and n not in lacks}
            self._of_lookups = known, timed or {1: 1.0}
        return self._of_lookups[1]

    def _known(self) -> Any:
        """Return what changes with what is known of costs, and with what has yet to be captured."""
        costs, met = self.costs, len(self.met)
        return id(costs), costs.news, met, self.requests, self._turn // _SETTLED

    def _to_capture(self, *shapes: tuple[str, Any]) -> float:
        """Return the seconds to capture, or record, those of some shapes that were not met."""
        return self.ledger.capture * sum(one not in self.met for one in shapes)

    def seconds(self, share: Share) -> Any:
        """Return what rounds of a drafter take, [efforts, sizes].

        With its share, by the tokens that the run has left, of what has yet to be captured.
        """
        costs, requests, known = self.costs, self.requests, self._known()
        if share.memo[0] == known:
            return share.memo[1]
        drafts = [(share.name, effort) for effort in share.efforts] if share.run else []
        taken = np.array([[costs.seconds.get(one, np.inf)] for one in drafts] or [[0.0]])
        found = taken + self.passes(share.kind, share.sizes)
        new = np.array([[self._to_capture(one)] for one in drafts] or [[0.0]])
        new = new + [self._to_capture((share.kind, requests * n)) for n in share.sizes.tolist()]
        found = found + new * (1 + share.gains.table) / self.left
        share.memo = known, found
        share.found.clear()
        return found

    def asks(self) -> bool:
        """Whether to look up: that saves more than it takes, or was not done for long."""
        waited = ASKING * (self.ledger.elapsed - self._asked)
        return self.saves is None or sum(self._took.values()) < max(self.saves, waited)

    def took(self, part: str, begun: Any) -> None:
        """Note that a part of a lookup that began at a moment has ended."""
        now = self.clock.now()

        def read() -> None:
            seconds = self.clock.seconds(begun, now)
            known = self._took.get(part, seconds)
            self._took[part] = min(seconds, known + (seconds - known) / 8)

        self._unread.append((now, read))

    def prepare(self, root: torch.Tensor, depth: int) -> None:
        """Read what has ended, and time what is due; a round begins behind `root` [B]."""
        while self._unread and self.clock.passed(self._unread[0][0]):
            self._unread.popleft()[1]()
        self._turn_to(self.sequences.active_lengths)
        self._turn += 1
        if self._turn < self._calibrates and not self.calibrator.everything:
            return
        if self.costs.plain(self.requests) < np.inf:
            found = self.calibrator.calibrate(root, depth)
            self._rests = _LOOKS if found else min(2 * self._rests, _RESTS)
        self._calibrates = self._turn + self._rests

    def best_rows(self, chances: Sequence[Sequence[float]]) -> int:
        """Return the rows with most tokens per second, of chains with these chances, descending."""
        seconds = self.of_lookups()
        gains = [list(accumulate(one, initial=0.0)) for one in chances]

        def rate(rows: int) -> float:
            return sum(1 + one[min(rows, len(one)) - 1] for one in gains) / seconds[rows]

        best = max((n for n in seconds if n <= max(map(len, gains))), key=lambda n: (rate(n), -n))
        self.wanted(best)
        return best

    def wanted(self, rows: int) -> None:
        """Note that what was looked up had a use for so many rows: for more, if none were timed."""
        sizes = [n for n in SIZES if n <= self.most_looked_up]
        self.wants = next((n for n in sizes if n > rows), rows) if rows > 1 else 1

    def choose(self, depth: int, rows: int = 1, promised: Sequence[float] = ()) -> Choice:
        """Return who drafts in the round that was prepared, no deeper than `depth`, and how much.

        `promised`, if something was looked up, are the tokens that each request is expected to get
        by it, in a pass of `rows` rows.
        """
        plain, of_use = self.costs.plain(self.requests), bool(promised) and rows > 1
        nothing = best = Choice(None, NONE, 1, 1.0, plain)
        if promised and not of_use:
            self._saved(0.0)
        if plain == np.inf or (self._held > 0 and not of_use):
            self._held -= 1
            return nothing
        for share in self.shares:
            best = max(best, self._best(share, depth, promised), key=_rate)
        if of_use:
            own = self.of_lookups()[rows]
            without, found = best, Choice(None, NONE, rows, fmean(promised), own)
            best = max(best, found, key=_rate)
            self._saved(best.tokens / _rate(without) - best.seconds)
        if depth > 0:
            self.compared, self.best_rate = (best, nothing), _rate(best)
        looks = self._turn - self._looked >= _LOOKS
        self._looked = self._turn if looks else self._looked
        for share in self.shares if looks else ():
            other = self._best(share, depth, promised, best if best.name == share.title else None)
            loss = (other.seconds - other.tokens / _rate(best)) * len(self.shares)
            shapes = (share.kind, other.rows * self.requests), (share.name, other.effort)
            loss += self._to_capture(*shapes)
            since = self.ledger.elapsed - self.ledger.tried.get(share.name, 0.0)
            if other.effort != NONE and loss < AGAIN * since:
                self.ledger.tried[share.name] = self.ledger.elapsed
                return other
        self._held = _HOLDS * (best is nothing)
        return best

    def _saved(self, seconds: float) -> None:
        """Note what a lookup saves."""
        self._asked = self.ledger.elapsed
        if self.saves is None and self._took:  # some lookups may be in vain at first
            self.saves = 2 * sum(self._took.values())
        if self.saves is not None:
            self.saves += (seconds - self.saves) / 8

    def _best(
        self, share: Share, depth: int, promised: Sequence[float] = (), below: Choice | None = None
    ) -> Choice:
        """Return the best that a drafter offers: beyond the effort of `below`, if that is given."""
        seconds, deep = self.seconds(share), min(depth, share.deepest)
        beyond = None if below is None else below.effort
        if (deep, beyond) not in share.found:
            share.found[deep, beyond] = self._fastest(share, seconds, deep, beyond)
        found = share.found[deep, beyond]
        if not promised or found.tokens < min(promised):
            return found
        # Requests to which more is promised draft that.
        return found._replace(tokens=fmean(max(found.alone, one) for one in promised))

    def _fastest(self, share: Share, seconds: Any, depth: int, beyond: Effort | None) -> Choice:
        """Return the best of a drafter's efforts that fit: of those beyond one, if it is given."""
        table = share.gains.table
        fits = share.depths <= max(depth, int(share.depths.min()))
        if beyond is not None:
            wider = [one.width > beyond.width or one.depth > beyond.depth for one in share.efforts]
            fits = fits & wider
        rates = np.where(fits[:, None] & (depth > 0), (1 + table) / seconds, 0.0)
        at, size = np.unravel_index(rates.argmax(), rates.shape)
        if not rates[at, size]:
            return Choice(share.title, NONE, 1, 0.0, 1.0)
        tokens, taken = 1 + float(table[at, size]), float(seconds[at, size])
        return Choice(share.title, share.efforts[at], int(share.sizes[size]), tokens, taken, tokens)

    def begin(self, rows: int, share: Share | None = None, effort: Effort = NONE) -> None:
        """Note that a pass of `rows` rows of each request begins, behind drafting an effort."""
        share = None if effort == NONE else share
        ends = {row: self.sequences.ends[row] for row in self.sequences.active}
        shape = PASS if share is None else share.kind, rows * len(ends)
        self._begun = share, effort, shape, self.clock.now(), ends
        self._idle += rows == 1

    def end(self, verified: Verified, own: Sequence[bool] | None = None) -> None:
        """Note that it has ended; its drafter learns of the requests that are its `own`."""
        if self._begun is None:
            self.last_ended = None
            return
        (share, effort, shape, begun, ends), self._begun = self._begun, None
        now, before, costs, met = self.clock.now(), self.last_ended, self.costs, self.met
        texts = self.sequences.host_rows
        emitted = [texts[row, at : self.sequences.ends[row]].tolist() for row, at in ends.items()]
        fresh, gained, draft = shape not in met, fmean(map(len, emitted)), None
        met.add(shape)
        if share is not None:
            mine, draft = own or [True] * len(emitted), (share.name, effort)
            met.add(draft)
            learnt = [text if yes else None for text, yes in zip(emitted, mine, strict=True)]
            share.learn(verified.draft.tree.max_depth, learnt)

        def read() -> None:
            seconds = self.clock.seconds(begun, now)
            drafting = 0.0 if before is None else self.clock.seconds(before, begun)
            if not fresh:
                costs.follow(shape, len(ends), seconds, self.ledger.elapsed)
            elif shape in costs.seconds:
                self.ledger.capture = max(0.0, seconds - costs.seconds[shape])
            if draft in costs.seconds and before is not None:
                costs.follow(draft, 0, drafting, self.ledger.elapsed)
            plain = costs.plain(len(ends))
            self.ledger.elapsed += seconds + drafting
            if plain < np.inf:
                self.ledger.saved += gained * plain - seconds - drafting

        self._unread.append((now, read))
        self.last_ended = now

    def details(self) -> dict[str, Any]:
        """Return what was found, for the statistics of the run."""
        if self._place is None:
            return {}
        milliseconds: Any = {}
        for (kind, size), seconds in sorted(self.costs.seconds.items(), key=str):
            of, named = kind, str(size)
            if isinstance(size, Effort):
                of, named = f"{kind}, width x depth", f"{size.width} x {size.depth}"
            milliseconds.setdefault(f"ms of a {of}", {})[named] = round(1e3 * seconds, 2)
        return {
            **milliseconds,
            "rounds without a draft": int(self._idle),
            "seconds of calibrating, all runs": round(self.ledger.spent, 3),
            **({"last choice": self._explained(*self.compared)} if self.compared else {}),
        }

    def _explained(self, best: Choice, nothing: Choice) -> str:
        plain = f"plain decoding 1 in {1e3 * nothing.seconds:.1f} ms"
        if best.rows == 1:
            return f"no draft: {plain}"
        said = f"{best.tokens:.1f} tokens expected in {1e3 * best.seconds:.1f} ms"
        return f"{best.name or 'looked up'}, {best.rows} rows: {said}; {plain}"


def _rate(choice: Choice) -> float:
    """Return tokens per second."""
    return choice.tokens / choice.seconds
