"""Chooses before every round who drafts and how much: what gives the most tokens per second.

What passes and drafts take is guessed and then known (`Costs`), what a draft brings is learned
(`gains`). A `Pacer` compares nothing, what was looked up, and every effort of its drafters, for the
whole batch. What was never tried is tried in rounds that count, where it promises so much that the
tokens that are left would pay for a few of them in vain.

Whatever is chosen changes no text: it follows from clocks, the text so far and what drafters say of
it, before any of the round's tokens is drawn.
"""

from __future__ import annotations

import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specattn.decoding.drafting.calibrating import calibrate, captured_sizes
from specattn.decoding.drafting.costs import PASS, Costs, Ledger, alike, file_of
from specattn.decoding.drafting.gains import NONE, Choice, Effort, Lookups, sizes_up_to
from specattn.decoding.engine.contract import DraftContext, Verified
from specattn.decoding.model.model import Model
from specattn.decoding.passes.attention import NO_CAPTURE

if TYPE_CHECKING:
    from specattn.decoding.drafting.pace import Share

ASKING = 0.015
"""Share of the time for lookups that find nothing of use, and for comparing in vain."""
AGAIN = 0.005
"""Share of the time for drafts that seem to lose."""

_UNTIMED, _GROWS = 17, 4.0  # on a CPU: rows chosen at first, and times the most rows so far
_CPU_ROW, _GPU_ROW = 0.1, 0.01  # what another row takes, of one, before several were met
_RESTS, _LOOKS = 16, 4  # most rounds in a row that ask for nothing; rounds between trials
_SETTLED = 32  # rounds for which what new shapes take is shared among as many tokens
_CAPTURE = 0.6  # seconds, of a CUDA graph on an H100, before one was captured; it ran from 0.15
_TRIES, _DOUBT = 3, 4.0  # rounds that tell what a draft takes; such tries for one that pays
_AT_ONCE = 4.0  # tokens that one lookup counts as, at most, in what lookups are trusted
_EXPECTED = 128  # tokens that a run goes on for at least, as far as its limit allows


class Pacer:
    """Chooses among nothing, lookups and drafters, for all requests of a run together."""

    def __init__(
        self, context: DraftContext, shares: Sequence[Share] = (), most_looked_up: int = 1
    ):
        self.target, self.sequences = context.target, context.sequences
        self.most_looked_up, self.shares = most_looked_up, list(shares)
        self.clock, self.model = self.target.clock(), Model.of(self.target.model)
        self.calibrates = context.calibrates
        self.captures = self.target.runner.captures
        names = tuple(share.name for share in shares)
        key = "pace", "ledger", names, threading.get_ident()
        self.ledger = self.model.recall(key, lambda: Ledger(_CAPTURE * self.captures))
        self.a_row = _GPU_ROW if self.captures else _CPU_ROW
        self.met: set[Any] = self.target.workspace.met  # shapes that are recorded or captured
        self.lookups = Lookups(at_once=_AT_ONCE)
        self.compared: tuple[Choice, Choice] | None = None  # the best, and nothing
        self._idle, self._turn = 0, 0
        self._asking, self._vain = 0.0, 0  # seconds of asking in vain; such rounds, of late
        self.resting, self._rest = False, 0  # whether this round does, and how many are to come
        self._prepared: Any = None  # the moment when the round began
        self._of_lookups: tuple[Any, dict[int, float]] = None, {}
        self._first = dict[str | None, tuple[Any, Any]]()  # passes that are recorded, by share
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

    def together(self, tokens: Any) -> Any:
        """Return how many `tokens` a round that gets so many in the mean is worth to a batch.

        It ends with its last request: with N tokens left in rounds of t, requests end about
        sqrt((t - 1) / N) of that time apart, and the last of B is sqrt(log B) such parts late.
        """
        if self.requests == 1:
            return tokens
        apart = np.sqrt(np.maximum(tokens - 1, 0.0) / self.left)
        return tokens / (1 + math.sqrt(math.log(self.requests)) * apart)

    def passes(self, kind: str, sizes: Any) -> Any:
        """Return seconds by rows of a request; infinity of those that are not to be chosen.

        On a CPU rows grow with what rounds have shown: beyond there is more to compute.
        """
        rows, beyond = sizes * self.requests, np.inf
        if not self.captures:
            beyond = _GROWS if len(self.costs.table(kind)[0]) > 1 else _UNTIMED
        found = self.costs.of_passes(kind, rows, beyond, self.a_row)
        return np.where((rows > self.target.runner.most_rows) & (sizes > 1), np.inf, found)

    def of_lookups(self) -> dict[int, float]:
        """Return seconds by the rows that may be looked up now, with their share of captures.

        As if each of a lookup's rows became a token, and so did those of its like to come.
        """
        known = self._known()
        if self._of_lookups[0] != known:
            most = self.most_looked_up
            found = captured_sizes(self.requests, most) if self.captures else sizes_up_to(most)
            sizes = np.array(found)
            new = self.ledger.capture * self._recorded(sizes)
            seconds = (self.passes(PASS, sizes) + new * sizes / self.left).tolist()
            timed = zip(found, seconds, strict=True)
            self._of_lookups = known, {n: s for n, s in timed if s < math.inf} or {1: 1.0}
        return self._of_lookups[1]

    def _known(self) -> Any:
        """Return what changes with what is known of costs, and with what has yet to be captured."""
        costs, met = self.costs, len(self.met)
        return id(costs), costs.changes, met, self.requests, self._turn // _SETTLED

    def _records(self, rows: int, share: Share | None = None) -> bool:
        """Whether a pass of so many rows of each request is recorded or captured first."""
        if (share.kind if share else PASS, rows * self.requests) in self.met:
            return False
        capture = share.capture(rows) if share and share.capture else NO_CAPTURE
        return self.target.captured_rows(rows, capture) is None

    def _recorded(self, sizes: Any, share: Share | None = None) -> Any:
        """Return which passes are recorded or captured first, by rows of each request."""
        name, known = share.name if share else None, (len(self.met), self.requests)
        if self._first.get(name, (None, None))[0] != known:
            first = [(n > 1 or not share) and self._records(n, share) for n in sizes.tolist()]
            self._first[name] = known, np.array(first)
        return self._first[name][1]

    def _new(self, name: str, effort: Effort) -> float:
        """Return the seconds that a draft takes besides, if it is new: to record or capture."""
        return 0.0 if effort == NONE or (name, effort) in self.met else self.ledger.capture

    def seconds(self, share: Share) -> Any:
        """Return what rounds of a drafter take, [efforts, sizes].

        With its share, by the tokens that the run has left, of what new shapes take besides.
        """
        now = self._known()
        if share.memo[0] == now:
            return share.memo[1]
        taken = new = np.zeros(len(share.efforts))
        if share.run is not None:
            level = share.level * self.costs.plain(self.requests)
            taken, known = self.costs.of_drafts(share.name, share.efforts, level, self.a_row)
            new = np.array([self._new(share.name, effort) for effort in share.efforts])
            if not known:  # some drafters are tried in vain
                new = _DOUBT * (new + _TRIES * taken)
        besides = new[:, None] + self.ledger.capture * self._recorded(share.sizes, share)
        found = taken[:, None] + self.passes(share.kind, share.sizes)
        found += besides * (1 + share.gains.table) / self.left
        share.memo = now, found
        share.found.clear()
        return found

    def prepare(self, root: torch.Tensor) -> None:
        """Read what has ended, and time everything if that is due; a round begins behind `root`.

        Or rest: where nothing paid of late a round drafts nothing unasked, for that takes time too.
        """
        self.resting = self._rest > 0
        if self.resting:
            self._rest -= 1
            return
        self._prepared = self.clock.now()
        while self._unread and self.clock.passed(self._unread[0][0]):
            self._unread.popleft()[1]()
        self._turn_to(self.sequences.active_lengths)
        self._turn += 1
        if self.calibrates and self.costs.is_steady(self.requests):
            calibrate(self, root)
            self.calibrates, self.last_ended = False, None

    def best_rows(self, chances: Sequence[Sequence[float]]) -> int:
        """Return the rows with most tokens per second, of chains with these chances, descending."""
        seconds = self.of_lookups()

        def rate(rows: int) -> float:
            return sum(1 + sum(one[: rows - 1]) for one in chances) / seconds[rows]

        longest = 1 + max(map(len, chances))
        least = min((n for n in seconds if n >= longest), default=longest)  # that holds them all
        return max((n for n in seconds if n <= least), key=lambda n: (rate(n), -n))

    def choose(self, depth: int, rows: int = 1, promised: Sequence[float] = ()) -> Choice:
        """Return who drafts in the round that was prepared, no deeper than `depth`, and how much.

        `promised`, if something was looked up, are the tokens that each request is expected to get
        by it, in a pass of `rows` rows.
        """
        plain = self.costs.plain(self.requests)
        nothing = Choice(None, NONE, 1, 1.0, plain)
        if self.resting or self.calibrates or plain == np.inf:
            return nothing
        offers = [self._best(share, depth, promised) for share in self.shares]
        if promised and rows > 1:
            tokens = sum(promised) / len(promised)
            offers.append(Choice(None, NONE, rows, tokens, self.of_lookups()[rows]))
        best = max([nothing, *offers], key=self._rate)
        rate = self._rate(best)
        if depth > 0:
            self.compared = best, nothing
        for share in () if self._turn % _LOOKS else self.shares:
            if other := self._due(share, depth, best, rate):
                return other
        loss, since = plain - 1 / rate, self.ledger.elapsed - self.ledger.tried.get(("", NONE), 0.0)
        if best.rows > 1 and loss < AGAIN * since:  # what no draft takes has to be known too
            self.ledger.tried["", NONE] = self.ledger.elapsed
            return nothing
        if best.rows == 1:
            # At most half as long as that was so.
            self._rest = min(_RESTS, self._vain // 2, int(self._asking / (ASKING * plain)))
            self.ledger.elapsed += self._rest * plain
        return best

    def _best(self, share: Share, depth: int, promised: Sequence[float] = ()) -> Choice:
        """Return the best that a drafter offers."""
        offers = self._offers(share, depth)
        found = offers[0] if offers else Choice(share.title, NONE, 1, 0.0, 1.0)
        if not promised or found.tokens < min(promised):
            return found
        # Requests to which more is promised draft that.
        tokens = sum(max(found.alone, one) for one in promised) / len(promised)
        return found._replace(tokens=tokens)

    def _offers(self, share: Share, depth: int) -> list[Choice]:
        """Return a drafter's efforts that fit, each with the rows that suit it best: best first."""
        seconds, depth = self.seconds(share), min(depth, share.deepest)
        if depth not in share.found:
            table, depths = share.gains.table, share.depths
            sizes = (self.together(1 + table) / seconds).argmax(1).tolist()
            fits = np.flatnonzero(depths <= max(depth, depths.min())) if depth > 0 else ()
            offers = [
                Choice(share.title, share.efforts[n], int(share.sizes[size]), tokens, taken, tokens)
                for n in fits
                for size, tokens in [(sizes[n], 1 + float(table[n, sizes[n]]))]
                if (taken := float(seconds[n, size])) < np.inf
            ]
            share.found[depth] = sorted(offers, key=self._rate, reverse=True)
        return share.found[depth]

    def _due(self, share: Share, depth: int, best: Choice, rate: float) -> Choice | None:
        """Return a draft that seems to lose and is due again: the one that waits longest.

        Of the drafter that is best those that are wider or deeper, which tell of it too.
        """
        tried, now = self.ledger.tried, self.ledger.elapsed
        is_best = best.name == share.title
        within = best.effort if is_best else Effort(-1, -1)

        def may(one: Choice) -> bool:
            if one.effort.width <= within.width and one.effort.depth <= within.depth:
                return False
            since = now - tried.get((share.name, NONE), 0.0)
            if is_best:  # what is tried at little cost does not keep others from being tried
                since = min(2 * since, now - tried.get((share.name, one.effort), 0.0))
            loss, share_of = (one.seconds - one.tokens / rate) * len(self.shares), AGAIN * since
            if loss >= share_of:
                return False
            new = self._new(share.name, one.effort)
            return loss + new + self.ledger.capture * self._records(one.rows, share) < share_of

        found = filter(may, self._offers(share, depth))
        other = min(found, key=lambda one: tried.get((share.name, one.effort), 0.0), default=None)
        if other is not None:
            tried[share.name, NONE] = tried[share.name, other.effort] = now
        return other

    def begin(self, rows: int, share: Share | None = None, effort: Effort = NONE) -> None:
        """Note that a pass of `rows` rows of each request begins, behind drafting an effort."""
        self._idle += rows == 1
        self._vain = self._vain + 1 if rows == 1 else 0
        if self.resting:
            return
        share = None if effort == NONE else share
        shape = PASS if share is None else share.kind, rows * self.requests
        fresh = self._records(rows, share)
        asked = self._prepared if rows == 1 and share is None else None
        self._begun = share, effort, shape, fresh, asked, self.clock.now()

    def end(self, verified: Verified, own: Sequence[bool] | None = None) -> None:
        """Note that it has ended; its drafter learns of the requests that are its `own`."""
        if self._begun is None:
            self.last_ended = None
            return
        (share, effort, shape, fresh, asked, begun), self._begun = self._begun, None
        now, before, costs, met = self.clock.now(), self.last_ended, self.costs, self.met
        draft, new, requests = None, False, self.requests
        met.add(shape)
        if share is not None:
            draft, emitted = (share.name, effort), self.sequences.emitted
            new = share.run is None or draft not in met
            met.add(draft)
            came = [emitted[row] for row in self.sequences.active]
            mine = zip(came, own or [True] * len(came), strict=True)
            learnt = [text if yes else None for text, yes in mine]
            share.learn(verified.draft.tree.max_depth, learnt)

        def read() -> None:
            seconds = self.clock.seconds(begun, now)
            drafting = 0.0 if before is None else self.clock.seconds(before, begun)
            if asked is not None:
                self._asking = _follow(self._asking, self.clock.seconds(asked, begun))
            if not fresh:
                costs.follow(shape, seconds)
            elif (known := float(costs.of_passes(shape[0], np.array(shape[1])))) < np.inf:
                self.ledger.capture = max(0.0, seconds - known)
            if draft is not None and before is not None and not new:
                level = share.level * costs.plain(requests)
                guess, _ = costs.of_drafts(share.name, [effort], level, self.a_row)
                costs.follow(draft, drafting, float(guess[0]))
            self.ledger.elapsed += seconds + drafting

        self._unread.append((now, read))
        self.last_ended = now

    def details(self) -> dict[str, Any]:
        """Return what was found, for the statistics of the run."""
        if self._place is None:
            return {}
        self.costs.keep()
        milliseconds: Any = {}
        for (kind, size), seconds in sorted(self.costs.seconds.items(), key=str):
            of, named = kind, str(size)
            if isinstance(size, Effort):
                of, named = f"{kind}, width x depth", f"{size.width} x {size.depth}"
            milliseconds.setdefault(f"ms of a {of}", {})[named] = round(1e3 * seconds, 2)
        return {
            **milliseconds,
            "rounds without a draft": int(self._idle),
            **({"last choice": self._explained(*self.compared)} if self.compared else {}),
        }

    def _explained(self, best: Choice, nothing: Choice) -> str:
        plain = f"plain decoding 1 in {1e3 * nothing.seconds:.1f} ms"
        if best.rows == 1:
            return f"no draft: {plain}"
        said = f"{best.tokens:.1f} tokens expected in {1e3 * best.seconds:.1f} ms"
        return f"{best.name or 'looked up'}, {best.rows} rows: {said}; {plain}"

    def _rate(self, choice: Choice) -> float:
        """Return tokens per second, of each request in the mean."""
        return float(self.together(choice.tokens)) / choice.seconds


def _follow(known: float, seconds: float) -> float:
    """Return what something takes by one more time: what disturbs it makes it slower."""
    return min(seconds, known + (seconds - known) / 8) if known else seconds
