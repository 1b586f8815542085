"""The rounds of a run: who drafted, what became of it, and how long it took.

One record for all that shows rounds: what listens while a run goes on, and what looks back on it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

Source = Literal["drafted", "corrected", "own"]
"""Where a token comes from: an accepted draft; the target, where the draft had other tokens for the
position; the target, where nothing was drafted."""

NOBODY = "none"
"""Stands for who drafted in a round that drafted nothing."""


class Round(NamedTuple):
    """What one verification pass gave one request.

    The n-th round of a request is the n-th pass of the run: requests begin together.

    Attributes
    ----------
    drafted : int
        Drafted tokens that were verified: all nodes of the tree but the root.
    depth : int
        Levels of the tree below the root.
    accepted : int
        Drafted tokens that were accepted.
    tokens : list of int
        What was emitted: the accepted tokens and the target's own behind them, up to the token that
        ended the request.
    drafter : str or None
        Who drafted, by name, where several take turns (`Auto`); None: the method itself, or nobody.
    """

    drafted: int
    depth: int
    accepted: int
    tokens: list[int]
    drafter: str | None = None

    @property
    def sources(self) -> list[Source]:
        """Where each of `tokens` comes from."""
        last: Source = "corrected" if self.depth > self.accepted else "own"
        found: list[Source] = [*["drafted"] * self.accepted, last]  # type: ignore[list-item]
        return found[: len(self.tokens)]

    def named(self, method: str) -> str:
        """Return who drafted: a name, `NOBODY` if nothing was, else the `method` itself."""
        return (self.drafter or method) if self.drafted else NOBODY


class PassTimes(NamedTuple):
    """Seconds of one pass of a run: before, in and behind verification, as `Statistics` has them.

    `learn` is what the drafter makes of the outcome; part of `Statistics.draft_seconds`.
    """

    draft: float
    target: float
    accept: float
    learn: float

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return sum(self)


def pass_times(laps: Sequence[tuple[str, float]]) -> list[PassTimes]:
    """Return the times of every pass of `run_rounds`, of a stopwatch's laps with their seconds."""
    seconds = [time for part, time in laps if part != "prefill_seconds"]
    return [PassTimes(*seconds[n : n + 4]) for n in range(0, len(seconds), 4)]


def by_drafter(
    histories: Iterable[Sequence[Round]], times: Sequence[PassTimes], method: str
) -> dict[str, Any]:
    """Return rounds, tokens and times by drafter, ready for JSON; `method` drafted the unnamed.

    "rounds by drafter" is a line; by drafter, "rounds" are those of all requests, "tokens per
    round" count the bonus token, and "ms per round" are of the whole pass.
    """
    rounds, tokens, seconds = Counter[str](), Counter[str](), defaultdict[str, float](float)
    for history in histories:
        for one, time in zip(history, times, strict=False):
            name = one.named(method)
            rounds[name] += 1
            tokens[name] += one.accepted + 1
            seconds[name] += time.seconds
    counts = dict(rounds.most_common())
    total = sum(counts.values()) or 1
    return {
        "rounds by drafter": ", ".join(
            f"{name} {100 * count / total:.0f}%" for name, count in counts.items()
        ),
        "rounds": counts,
        "tokens per round": {name: round(tokens[name] / n, 2) for name, n in counts.items()},
        "ms per round": {name: round(1e3 * seconds[name] / n, 2) for name, n in counts.items()},
    }
