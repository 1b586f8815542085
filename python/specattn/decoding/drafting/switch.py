"""Whether drafting pays, by the clock of the run itself.

Drafting with the target pays when decoding is bound by KV-cache bandwidth: from some length on,
which depends on model, machine and text. So a run times rounds with and without drafts, keeps to
the faster kind, and re-times both when lengths or batch have changed.

It changes no distribution: the kind of a round is settled before any of its tokens is drawn, by the
clock and by the text so far; given these a round has the target's distribution, with a draft or
without.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median
from typing import Any, NamedTuple

from specattn.decoding.text.statistics import Clock

TRIAL = 4
"""Rounds that say what a kind costs, after one that finds code and data cold."""

REMEMBERED = 32
"""Rounds over which time and acceptance are averaged at most, and the fewest between two trials."""

SAME = 1.25
"""Lengths, and numbers of requests, are alike while they differ by less than this factor."""


class _Round(NamedTuple):
    drafting: bool
    counts: bool  # the one before was of the same kind
    begin: Any
    requests: int
    emitted: int  # until it began


class _Costs:
    """What rounds of one kind took since the last trial, and what the last ones gave."""

    def __init__(self) -> None:
        self.seconds = deque[float](maxlen=REMEMBERED)
        self.tokens = deque[float](maxlen=REMEMBERED)  # per request

    @property
    def per_token(self) -> float | None:
        """Seconds in which every request gains one token."""
        return median(self.seconds) / fmean(self.tokens) if self.seconds else None


class Switch:
    """Says before every round whether it shall draft.

    Parameters
    ----------
    clock : Clock
        On CUDA a round's time is read when it has passed; nothing waits for it.
    """

    def __init__(self, clock: Clock):
        self.clock = clock
        self.drafting = True
        self._costs = {False: _Costs(), True: _Costs()}
        self._rounds = {False: 0, True: 0}
        self._current: _Round | None = None
        self._unread = deque[tuple[_Round, Any, float]]()  # with its end and tokens per request
        # Twice as many with drafts: what they are worth varies more than what they cost.
        self._trial = deque([True] * (1 + 2 * TRIAL) + [False] * (1 + TRIAL))
        self._undecided = True
        self._decided_requests = self._decided_round = 0
        self._again_at = 0.0  # tokens
        self._plain_up_to: int | None = None
        self._drafting_from: int | None = None

    def choose(self, *, length: int, requests: int, emitted: int) -> bool:
        """Say whether the round that begins now shall draft.

        Parameters
        ----------
        length : int
            Tokens of the longest running request.
        requests : int
            Running requests.
        emitted : int
            Tokens given to all requests so far, finished ones included.
        """
        now = self.clock.now()
        self._read_clock(now, emitted)
        if self._undecided and not self._trial:
            self._decide(length, requests)
        elif not self._undecided and self._needs_retiming(length, requests):
            self._try_both()
        drafting = self._trial.popleft() if self._trial else self.drafting
        counts = self._current is not None and self._current.drafting == drafting
        self._current = _Round(drafting, counts, now, requests, emitted)
        self._rounds[drafting] += 1
        return drafting

    def details(self) -> dict[str, Any]:
        """Return what was found, for the statistics of the run."""
        plain, drafting = (self._costs[kind].per_token for kind in (False, True))
        return {
            "drafting, ms per token": drafting and drafting * 1e3,
            "plain, ms per token": plain and plain * 1e3,
            "drafting was faster from, tokens": self._drafting_from,
            "plain was faster up to, tokens": self._plain_up_to,
            "rounds without a draft": self._rounds[False],
        }

    def _read_clock(self, now: Any, emitted: int) -> None:
        """Book the rounds whose end has passed."""
        if self._current is not None and self._current.counts:
            tokens = (emitted - self._current.emitted) / self._current.requests
            self._unread.append((self._current, now, tokens))
        while self._unread and self.clock.passed(self._unread[0][1]):
            done, end, tokens = self._unread.popleft()
            costs = self._costs[done.drafting]
            costs.seconds.append(self.clock.seconds(done.begin, end))
            costs.tokens.append(tokens)

    def _decide(self, length: int, requests: int) -> None:
        """Keep to the kind that is faster now, and note when to ask again."""
        plain, drafting = (self._costs[kind].per_token for kind in (False, True))
        if plain is None or drafting is None:
            return  # no round has passed yet: the device is far behind
        self._undecided = False
        self.drafting = drafting < plain
        self._decided_requests = requests
        self._decided_round = sum(self._rounds.values())
        if self.drafting:
            self._drafting_from = min(length, self._drafting_from or length)
        else:
            self._plain_up_to = max(length, self._plain_up_to or length)
            # A plain round's time grows at most as the length does: before that it cannot pay.
            self._again_at = length * max(SAME, drafting / plain)

    def _try_both(self) -> None:
        """Time the other kind, then this one again: one slow round may have been chance."""
        self._undecided = True
        for kind in (not self.drafting, self.drafting):
            self._trial.extend([kind] * (1 + TRIAL))
            self._costs[kind].seconds.clear()

    def _needs_retiming(self, length: int, requests: int) -> bool:
        """Whether the other kind may be faster by now."""
        if not self.drafting and length >= self._again_at:
            return True
        if sum(self._rounds.values()) < self._decided_round + REMEMBERED:
            return False
        if self.drafting and requests * SAME <= self._decided_requests:
            return True
        own, other = (self._costs[kind].per_token for kind in (self.drafting, not self.drafting))
        return (own or 0.0) > (other or 0.0)
