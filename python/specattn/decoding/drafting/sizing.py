"""How much to draft, for every method alike: what gains most tokens per second by measured times.

A round takes what its drafting takes and what its pass takes; it gives a token, and with each
drafted node the chance that it is accepted. Before a round a `Sizer` chooses the *effort* of its
drafting, and behind it, where the drafter knows probabilities, how many of its nodes are verified.
Nothing is drafted where that gives the most.

Whatever is chosen changes no text: it is settled by clocks, by the text so far and by what drafters
say of it, before any of the round's tokens is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from specattn.decoding.drafting.costs import (
    EXPLORING,
    SIZES,
    Calibration,
    PassCosts,
    Timings,
    best_size,
    growing,
    recalled,
)
from specattn.decoding.engine.contract import DraftContext, Verified
from specattn.decoding.text.statistics import Clock

_REMEMBERED = 32  # rounds over which acceptance is averaged
_DOUBT = 2.0  # rounds that an average weighs at least: what comes next may differ
_GUESS = 0.8  # chance that a drafted token is accepted, before any was
_HOPE = 1.15  # times what is known of less effort: what more is taken to bring before it was tried


class Effort(NamedTuple):
    """How much is drafted: levels below the root, or tokens of a chain, and nodes of each."""

    width: int
    depth: int

    @property
    def rows(self) -> int:
        """Rows of the drafter's own passes: the root's, and those of all levels but the last."""
        return 1 + self.width * (self.depth - 1) if self.depth else 0


NONE = Effort(0, 0)
"""Nothing is drafted."""


def chains(most: int) -> list[Effort]:
    """Return the efforts of chains: few lengths, of which `most` is the longest."""
    return [NONE, *(Effort(1, size - 1) for size in sizes_up_to(most + 1) if size > 1)]


def beams(width: int, depth: int) -> list[Effort]:
    """Return the efforts of trees: up to `depth` levels of 1, 4, 16, ... and `width` nodes."""
    widths = sorted({min(4**n, width) for n in range(width.bit_length())})
    return [NONE, *(Effort(one, level) for one in widths for level in range(1, depth + 1))]


def sizes_up_to(most: int) -> list[int]:
    """Return the rows of a pass, root included, that are chosen from: few, the last is `most`."""
    return [*(size for size in SIZES if size < most), most]


class Gains(Protocol):
    """What efforts bring."""

    def learn(self, drafted: int, counts: Sequence[int]) -> None:
        """Book a round with paths of at most `drafted` tokens: requests accepted `counts`."""

    def table(self) -> Any:
        """Return the tokens accepted per round and request, float [efforts, sizes]."""


class ChainGains:
    """What chains bring, by how often tokens of each depth were accepted of late.

    Parameters
    ----------
    efforts : sequence of Effort
    sizes : sequence of int
        Rows of a pass.
    """

    def __init__(self, efforts: Sequence[Effort], sizes: Sequence[int]):
        deepest = max(effort.depth for effort in efforts)
        # Tokens offered behind accepted ones, by depth.
        self.offered = np.full(deepest, _DOUBT)
        self.accepted = _GUESS * self.offered
        # All that is drafted is verified: no effort goes with fewer rows.
        depths = np.array([effort.depth for effort in efforts])[:, None]
        self._reached = np.where(depths < np.array(sizes), depths, deepest + 1)

    def learn(self, drafted: int, counts: Sequence[int]) -> None:
        """Book a round of chains of `drafted` tokens; without any, what is known weighs less."""
        keep = np.maximum(1 - 1 / _REMEMBERED, np.minimum(1, _DOUBT / self.offered))
        self.offered *= keep
        self.accepted *= keep
        for count in counts if drafted else ():
            self.offered[: min(count + 1, drafted)] += 1
            self.accepted[:count] += 1

    @property
    def probabilities(self) -> Any:
        """That a token of each depth is accepted, float [depth]."""
        return np.cumprod(self.accepted / self.offered)

    def table(self) -> Any:
        """Return what each effort brings."""
        return np.concatenate([[0.0], np.cumsum(self.probabilities), [-np.inf]])[self._reached]


class TreeGains:
    """What trees bring, by the probabilities that drafters gave to their nodes of late.

    A tree that was grown tells what all trees within it would have brought.

    Parameters
    ----------
    efforts : sequence of Effort
    sizes : sequence of int
        Rows of a pass: so many of the most probable nodes are verified.
    """

    def __init__(self, efforts: Sequence[Effort], sizes: Sequence[int]):
        self.efforts, self.sizes = list(efforts), np.array(sizes)
        chance = np.cumsum(_GUESS ** np.arange(1, max(sizes) + 1))
        self._curves = np.stack(
            [
                np.concatenate([[0.0], chance])[np.minimum(effort.depth, self.sizes - 1)]
                for effort in efforts
            ]
        )
        self._seen = np.array([effort == NONE for effort in efforts])
        rows = np.array([effort.rows for effort in efforts])
        self._less = rows[:, None] > rows

    def add(self, effort: Effort, probabilities: Any, place: Any) -> None:
        """Book a tree that was grown with an effort.

        Parameters
        ----------
        effort : Effort
        probabilities : array [B, n]
            Of the drafted nodes, whether they are verified or not.
        place : array, int [2, n]
            Level of each node from 1 on, and its rank in it.
        """
        within = [
            number
            for number, one in enumerate(self.efforts)
            if one != NONE and one.width <= effort.width and one.depth <= effort.depth
        ]
        limits = np.array([self.efforts[number] for number in within])
        inside = (place[0] <= limits[:, 1:]) & (place[1] < limits[:, :1])
        best = -np.sort(-(probabilities[:, None] * inside), -1)
        sums = np.cumsum(np.pad(best, ((0, 0), (0, 0), (1, 0))), -1)
        found = sums[..., np.minimum(self.sizes - 1, sums.shape[-1] - 1)].mean(0)
        weight = np.where(self._seen[within], 4 / _REMEMBERED, 1.0)[:, None]
        self._curves[within] += weight * (found - self._curves[within])
        self._seen[within] = True

    def learn(self, drafted: int, counts: Sequence[int]) -> None:
        """Do nothing: what was accepted is the calibration's part."""

    def table(self) -> Any:
        """Return what each effort brings; of those not seen yet, what is hoped."""
        if not self._seen[1:].any():
            return self._curves
        seen = np.where(self._seen[:, None], self._curves, 0.0)
        hoped = _HOPE * np.where(self._less[..., None], seen, 0.0).max(1)
        return np.where(self._seen[:, None], self._curves, hoped)


class _Times:
    """What rounds took: their passes by rows, and their drafting by effort."""

    def __init__(self, passes: PassCosts, drafts: Timings):
        self.passes, self.drafts = passes, drafts
        self.tried_at: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        """Seconds of all that was measured."""
        return self.passes.elapsed + self.drafts.elapsed

    def drafting(self, efforts: Sequence[Effort]) -> dict[Effort, float]:
        """Return the seconds of every effort that may be tried next.

        One that was not measured is taken to cost in proportion to what was.
        """
        known = self.drafts.medians
        idle = known.pop(NONE, 0.0)
        rows = sorted({effort.rows for effort in efforts})
        allowed = growing(rows, max((one.rows for one in known), default=0))
        return {
            effort: idle if effort == NONE else known.get(effort, _in_proportion(effort, known))
            for effort in efforts
            if effort.rows in allowed
        }


def _in_proportion(effort: Effort, known: dict[Effort, float]) -> float:
    """Return what `effort` costs if rows and levels cost what they do elsewhere; 0 if unknown."""
    return min(
        (
            seconds * max(effort.rows / other.rows, effort.depth / other.depth)
            for other, seconds in known.items()
        ),
        default=0.0,
    )


def _is_due(times: _Times, kind: str, lost: float) -> bool:
    """Whether something may be tried that is thought to lose so many seconds."""
    idle = times.elapsed - times.tried_at.get(kind, 0.0)
    return EXPLORING / 2 * idle > lost


class _Plan(NamedTuple):
    """What an effort is expected to give and to take."""

    effort: Effort
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Told:
    """Drafts as much as it is told to: a `Sizer` that looks at no clock."""

    def __init__(self, effort: Effort):
        self.effort = effort

    def choose(self, depth: int) -> Effort:
        """Return the effort, no deeper than `depth`."""
        return self.effort._replace(depth=min(self.effort.depth, depth))

    def begin(self, effort: Effort, rows: int) -> None:
        """Do nothing."""

    def end(self, verified: Verified) -> None:
        """Do nothing."""

    def details(self) -> dict[str, Any]:
        """Return nothing."""
        return {}


class Sizer:
    """Chooses how much a drafter drafts, round by round.

    A round calls `choose`, `begin` when its draft is ready, and `end` when that is verified. Rounds
    that prepare a draft rather than make one call no `begin`.

    Parameters
    ----------
    context : DraftContext
    kind : str
        The method: what drafting took is remembered for its next runs.
    efforts : sequence of Effort
        `NONE` and what may be drafted.
    sizes : sequence of int
        Rows of a pass, ascending from 1.
    gains : callable
        ``gains(efforts, sizes)`` makes the `Gains`.
    passes : hashable
        What passes are for: those of different kinds differ in what they cost.
    """

    def __init__(
        self,
        context: DraftContext,
        kind: str,
        efforts: Sequence[Effort],
        sizes: Sequence[int],
        gains: Callable[[Sequence[Effort], Sequence[int]], Any],
        passes: Hashable = "passes",
    ):
        self.target, self.sequences = context.target, context.sequences
        self.kind, self.passes = (kind, *efforts), passes
        self.efforts, self.sizes = list(efforts), list(sizes)
        self.gains = gains(self.efforts, self.sizes)
        self.calibration = Calibration()
        self.expected: list[float] = []
        self.idle = 0  # rounds without a draft
        self._trial: tuple[str, Effort] | None = None
        self._ended: tuple[Any, int] | None = None
        self._running: _Times | None = None
        self._begun = False
        self._latest: _Times | None = None
        self._requests = 0

    def choose(self, depth: int) -> Effort:
        """Return the effort of the round that begins; its depth is at most `depth`."""
        times, self._trial = self._times(), None
        plans = self._plans(times, depth)
        best = max(plans, key=lambda plan: plan.rate)
        for kind, others in (
            ("more", [plan for plan in plans if plan.effort.rows > best.effort.rows]),
            ("none", [plan for plan in plans if plan.effort == NONE != best.effort]),
        ):
            if not others:
                continue
            other = max(others, key=lambda plan: plan.rate)
            if _is_due(times, kind, other.seconds - other.tokens / best.rate):
                self._trial = kind, other.effort
                return other.effort
        return best.effort

    def rows(self, effort: Effort, probabilities: Sequence[Sequence[float]]) -> int:
        """Return how many rows, root included, a drafted tree is verified with.

        `probabilities` are, per request, those of its drafted nodes, descending.
        """
        times = self._times()
        spent = times.drafting(self.efforts).get(effort, 0.0)
        costs = {n: spent + s for n, s in times.passes.estimates(self.sizes).items()}
        rows = best_size(costs, probabilities, self.calibration.factor)
        if rows == 1 and self._trial is None:
            rows = self._tried_rows(times, costs, probabilities)
            rows = min(rows, 1 + max(map(len, probabilities)))
        self.expected = [sum(one[: rows - 1]) for one in probabilities]
        return rows

    def prune(self, effort: Effort, probabilities: Any, place: Any) -> int:
        """Learn from a grown tree; return how many rows, root included, it is verified with.

        Arguments are as for `TreeGains.add`.
        """
        self.gains.add(effort, probabilities, place)
        return self.rows(effort, (-np.sort(-probabilities, -1)).tolist())

    def _tried_rows(
        self, times: _Times, costs: dict[int, float], probabilities: Sequence[Sequence[float]]
    ) -> int:
        """Return the best rows beyond the root's, if it is time to try them, and 1 otherwise."""
        more = {rows: seconds for rows, seconds in costs.items() if rows > 1}
        if not more or not any(probabilities):
            return 1
        factor = self.calibration.factor
        rows = best_size(more, [[*one, 0.0] for one in probabilities], factor)
        tokens = sum(1 + factor * sum(one[: rows - 1]) for one in probabilities)
        lost = costs[rows] - costs[1] * tokens / len(probabilities)
        if not _is_due(times, "rows", lost):
            return 1
        times.tried_at["rows"] = times.elapsed
        return rows

    def begin(self, effort: Effort, rows: int) -> None:
        """Note that a pass of `rows` rows begins, behind drafting with an effort."""
        times = self._running = self._times()
        now = times.passes.clock.now()
        if self._ended is not None and self._ended[1] == self._emitted:
            times.drafts.note(effort, self._ended[0], now)
        if self._trial is not None and self._trial[1] == effort:
            times.tried_at[self._trial[0]] = times.elapsed
        self.idle += rows == 1
        times.passes.begin(rows)
        self._begun = True

    def end(self, verified: Verified) -> None:
        """Note that it has ended, and learn from it."""
        if self._running is not None and self._begun:
            self._running.passes.end()
        self._begun = False
        counts = verified.accepted.counts.tolist()
        self.gains.learn(verified.draft.tree.max_depth, counts)
        if not any(self.expected):
            self.calibration.forget()
        for expected, count in zip(self.expected, counts, strict=False):
            self.calibration.add(expected, count)
        self.expected = []
        self._ended = self._times().passes.clock.now(), self._emitted

    def details(self) -> dict[str, Any]:
        """Return what was found, for the statistics of the run."""
        if self._running is None:
            return {}
        passes, drafts = self._running.passes.measured, self._running.drafts.medians
        drafts.pop(NONE, None)
        return {
            "ms per pass, by rows": {str(rows): round(1e3 * s, 2) for rows, s in passes.items()},
            "ms per draft, by width x depth": {
                f"{width} x {depth}": round(1e3 * s, 2) for (width, depth), s in drafts.items()
            },
            "rounds without a draft": self.idle,
        }

    def _times(self) -> _Times:
        """Return the times of such a batch and length: at first those of a shorter text."""
        requests = len(self.sequences.active)
        former = self._latest if self._requests == requests else None

        def passes(clock: Clock) -> PassCosts:
            return former.passes.copy() if former is not None else PassCosts(clock)

        def times(clock: Clock) -> _Times:
            drafts = former.drafts.copy() if former is not None else Timings(clock)
            return _Times(recalled(self.target, self.sequences, self.passes, passes), drafts)

        self._latest = recalled(self.target, self.sequences, self.kind, times)
        self._requests = requests
        return self._latest

    @property
    def _emitted(self) -> int:
        return sum(self.sequences.ends)

    def _plans(self, times: _Times, depth: int) -> list[_Plan]:
        """Return what every effort that may be chosen now is expected to give and to take."""
        passes, drafts = times.passes.estimates(self.sizes), times.drafting(self.efforts)
        if not times.passes.measured:
            return [_Plan(NONE, 1.0, 1.0)]
        allowed = [n for n, one in enumerate(self.efforts) if one in drafts and one.depth <= depth]
        seconds = np.array([drafts[self.efforts[n]] for n in allowed])[:, None]
        seconds = seconds + np.array(list(passes.values()))
        gains = self.gains.table()[allowed][:, : len(passes)]
        tokens = 1 + self.calibration.factor * gains
        best = (tokens / seconds).argmax(1)
        return [
            _Plan(self.efforts[n], float(tokens[at, row]), float(seconds[at, row]))
            for at, (n, row) in enumerate(zip(allowed, best, strict=True))
        ]
