"""Which drafter's turn it is, by what their rounds took and gave in this run and earlier ones.

It changes no text: who drafts is settled before any token of the round is drawn, by the clock and
by the text so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from specattn.decoding.drafting.costs import EXPLORING
from specattn.decoding.text.statistics import Clock

TRIAL = 3
"""Rounds that say what a drafter is worth."""

_PATIENCE = 12  # rounds of a trial at most: a drafter may find that it should draft nothing

_MOST_LOST = 3  # trials lost in a row, each of which halves the share for further ones

_KEPT = 8  # rounds by which a drafter's time is judged; twice as many for its tokens


class Worth:
    """What the last rounds of a drafter took, and what they gave.

    Parameters
    ----------
    passes, tokens : float
        What is assumed of a round before any has been seen: how many passes of one row it takes,
        and how many tokens it gives.

    Attributes
    ----------
    tokens : float
        Per request and round, the bonus token included.
    """

    def __init__(self, passes: float, tokens: float):
        self._guess = passes
        self._seconds = deque[float](maxlen=_KEPT)
        self._tokens = deque[float](maxlen=2 * _KEPT)
        self._cold: float | None = None
        self._median: float | None = None  # of the seconds
        self.tokens = tokens
        self.seen_at = 0.0  # of an account's time
        self.lost_trials = 0  # since it was the fastest

    def add(self, seconds: float, tokens: float, *, first: bool = False) -> None:
        """Book a round of `tokens` per request; the first of a run finds code and data cold."""
        if first:
            self._cold = seconds
        else:
            self._seconds.append(seconds)
            self._tokens.append(tokens)
            self._judge()

    def first_seconds(self, row_seconds: float) -> float:
        """Return what the first round of a run takes."""
        return 4 * self.seconds(row_seconds) if self._cold is None else self._cold

    def doubt(self) -> None:
        """Forget the time: it may have been chance, or another program's doing."""
        self._seconds.clear()
        self._median = None

    def give_up(self, row_seconds: float, now: float) -> None:
        """Take a drafter that does not come to drafting to be no more than a pass of one row."""
        self._seconds.extend([row_seconds] * TRIAL)
        self._tokens.extend([1.0] * TRIAL)
        self._judge()
        self.seen_at = now

    @property
    def known(self) -> bool:
        """Whether it has been seen often enough to judge."""
        return len(self._seconds) >= TRIAL

    def seconds(self, row_seconds: float) -> float:
        """Return what a round takes where a pass of one row takes `row_seconds`."""
        return self._guess * row_seconds if self._median is None else self._median

    def _judge(self) -> None:
        self._median, self.tokens = median(self._seconds), fmean(self._tokens)


@dataclass
class Account:
    """Seconds of decoding, and what trials have cost of them: over all runs of a model."""

    elapsed: float = 0.0
    lost: float = 0.0


class _Round(NamedTuple):
    name: str | None
    begin: Any
    speed: float  # tokens per second that were promised by the fastest
    trial: bool


class Chooser:
    """Says before every round who shall draft: what was looked up, or one of some drafters.

    Drafters that are not the fastest are tried as long as that costs no more than a small share of
    the time: the smaller, the more trials in a row they have lost.

    Parameters
    ----------
    clock : Clock
        On CUDA a round's time is read when it has passed; nothing waits for it.
    worths : dict of str to Worth
        Of the drafters that must run to know what they draft. May be exchanged between rounds.
    account : Account

    Attributes
    ----------
    lost : float
        Seconds that trials of this run have cost.
    fastest : str or None
        The fastest when `choose` was last called: a drafter, or None for what was looked up.
    """

    def __init__(self, clock: Clock, worths: dict[str, Worth], account: Account):
        self.clock, self.worths, self.account = clock, worths, account
        self.lost = 0.0
        self.fastest: str | None = None
        self._met = set[str]()  # who has drafted in this run
        self._speed = 0.0
        self._looked_up_at = account.elapsed
        self._trial, self._left = "", 0
        self._current: _Round | None = None
        self._unread = deque[tuple[_Round, Any, float, float]]()

    def choose(
        self, promised: Sequence[float], seconds: float, row_seconds: float | None
    ) -> str | None:
        """Return the name of a drafter, or None for what was looked up.

        Parameters
        ----------
        promised : sequence of float
            Tokens that each request is expected to gain from what was looked up.
        seconds : float
            That a pass over it is expected to take.
        row_seconds : float or None
            That a pass of one row takes; None while nothing has been measured.
        """
        best = self.fastest = None
        looked_up = self._speed = sum(promised) / seconds
        if row_seconds is None:
            return None
        for name, worth in self.worths.items():
            # Requests to which what was looked up promises more draft that, unless all would.
            tokens = sum(max(worth.tokens, other) for other in promised)
            if worth.tokens < min(promised):
                tokens = worth.tokens * len(promised)
            if worth.known and (speed := tokens / worth.seconds(row_seconds)) > self._speed:
                best, self._speed = name, speed
        self.fastest = best
        if best is not None:
            self.worths[best].lost_trials = 0
        if self._left == 1 and not (worth := self.worths[self._trial]).known:
            worth.give_up(row_seconds, self.account.elapsed)
            worth.lost_trials += 1
            self._left = 0
        if self._left:
            return self._trial
        for name, worth in self.worths.items():
            if name != best and self._affords(name, len(promised), row_seconds):
                worth.doubt()
                self._trial, self._left = name, _PATIENCE
                return name
        # What passes without a drafter take may have been chance too, and one round costs little.
        since = self.account.elapsed - self._looked_up_at
        if seconds * (1 - looked_up / self._speed) <= EXPLORING / 4 * since:
            self._looked_up_at = self.account.elapsed
            return None
        return best

    def _affords(self, name: str, requests: int, row_seconds: float) -> bool:
        """Whether a trial may be made, of one that is known when it has not drafted for a while."""
        worth = self.worths[name]
        gain = worth.tokens * requests / self._speed
        loss = TRIAL * max(0.0, worth.seconds(row_seconds) - gain)
        if name not in self._met:
            loss += max(0.0, worth.first_seconds(row_seconds) - gain)
        since = self.account.elapsed - (worth.seen_at if worth.known else 0.0)
        share = EXPLORING / 2 ** min(worth.lost_trials, _MOST_LOST)
        return loss <= min(EXPLORING * self.account.elapsed - self.account.lost, share * since)

    def keeps(self, name: str, row_seconds: float | None) -> bool:
        """Whether a drafter may be chosen soon: it is on trial, or faster than no draft."""
        worth = self.worths[name]
        on_trial = self._left > 0 and self._trial == name
        faster = row_seconds and worth.tokens * row_seconds > worth.seconds(row_seconds)
        return bool(on_trial or (worth.known and faster))

    def begin(self, name: str | None) -> None:
        """Note who drafts in the round that begins: who was chosen, or None if it is not ready."""
        trial = self._left > 0 and name == self._trial
        self._left -= trial
        self._current = _Round(name, self.clock.now(), self._speed, trial)

    def drafts_nothing(self) -> None:
        """Note that its drafter drafts nothing in this round: it says nothing of the drafter."""
        assert self._current is not None
        self._current = self._current._replace(name=None)

    def end(self, total: float, each: float) -> None:
        """Note that the round gave `total` tokens, and `each` request of its drafter's so many."""
        assert self._current is not None
        self._unread.append((self._current, self.clock.now(), total, each))
        self._current = None
        while self._unread and self.clock.passed(self._unread[0][1]):
            self._book(*self._unread.popleft())

    def _book(self, round: _Round, end: Any, total: float, each: float) -> None:
        """Learn from a round whose end has passed."""
        seconds = self.clock.seconds(round.begin, end)
        self.account.elapsed += seconds
        if round.name is None:
            self._looked_up_at = self.account.elapsed
        else:
            worth = self.worths[round.name]
            worth.add(seconds, each, first=round.name not in self._met)
            self._met.add(round.name)
            worth.seen_at = self.account.elapsed
            if round.trial and worth.known:
                self._left = 0
                worth.lost_trials += 1
        if round.trial and round.speed:
            lost = max(0.0, seconds - total / round.speed)
            self.lost += lost
            self.account.lost += lost
