"""Estimates what each size of a draft gains, in accepted tokens, and what drafting it costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from specattn.decoding.drafting.timings import SIZES, PassCosts, Timings, growing

_REMEMBERED = 32  # rounds over which acceptance is averaged
_DOUBT = 2.0  # rounds that an average weighs at least: what comes next may differ
_GUESS = 0.8  # chance that a drafted token is accepted, before any was
_HOPE = 1.15  # times what is known of less effort: what more is taken to bring before it was tried
_PRIOR, _MOST = 4.0, 256.0  # expected tokens that a calibration starts with, and is halved beyond


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


class ChainGains:
    """What chains and fixed trees bring, by how often tokens of a depth were accepted of late."""

    def __init__(self, efforts: Sequence[Effort], sizes: Sequence[int]):
        deepest = max(effort.depth for effort in efforts)
        # Tokens offered behind accepted ones, by depth.
        self.offered = np.full(deepest, _DOUBT)
        self.accepted = _GUESS * self.offered
        self._has_learned = False
        self._probabilities: Any = None  # while nothing changes
        # All that is drafted is verified: no effort goes with fewer rows.
        depths = np.array([effort.depth for effort in efforts])[:, None]
        self._reached = np.where(depths < np.array(sizes), depths, deepest + 1)

    def learn(self, drafted: int, counts: Sequence[int | None]) -> None:
        """Book a round of chains of `drafted` tokens; without any, what is known weighs less."""
        self._has_learned = self._has_learned or bool(drafted)
        if not self._has_learned:
            return
        self._probabilities = None
        keep = np.maximum(1 - 1 / _REMEMBERED, np.minimum(1, _DOUBT / self.offered))
        self.offered *= keep
        self.accepted *= keep
        for count in counts if drafted else ():
            if count is None:
                continue
            self.offered[: min(count + 1, drafted)] += 1
            self.accepted[:count] += 1

    @property
    def probabilities(self) -> Any:
        """That a token of each depth is accepted, float [depth]."""
        if self._probabilities is None:
            self._probabilities = np.cumprod(self.accepted / self.offered)
        return self._probabilities

    def table(self) -> Any:
        """Return what each effort brings."""
        return np.concatenate([[0.0], np.cumsum(self.probabilities), [-np.inf]])[self._reached]


class Calibration:
    """Tokens that were accepted for each that was expected, of late.

    It starts with `factor`, as if that had been found of a few tokens; `most` expected ones count.
    """

    def __init__(self, factor: float = 1.0, most: float = _MOST):
        self.most = most
        self.expected, self.accepted = _PRIOR, factor * _PRIOR

    @property
    def factor(self) -> float:
        """Accepted tokens per expected one."""
        return self.accepted / self.expected

    def learn(self, expected: float, accepted: int) -> None:
        """Book what came of a draft."""
        self.expected += expected
        self.accepted += accepted
        if self.expected > self.most:
            self.expected, self.accepted = self.expected / 2, self.accepted / 2

    def fade(self) -> None:
        """Let what is known weigh less: a round drafted nothing."""
        keep = max(1 - 1 / _REMEMBERED, min(1.0, _PRIOR / self.expected))
        self.expected, self.accepted = keep * self.expected, keep * self.accepted


class TreeGains:
    """What trees bring, by the probabilities that drafters gave to their nodes of late.

    A tree that was grown tells what all trees within it would have brought: of `sizes` rows each,
    the most probable nodes. Probabilities are calibrated by what was accepted.
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
        self._calibration = Calibration()
        self._verified: list[float] = []  # expected tokens of what is verified now

    def add(self, effort: Effort, probabilities: Any, place: Any) -> None:
        """Book a tree that was grown with an effort, whether its nodes are verified or not.

        `probabilities` are [B, n]; `place`, int [2, n], is the level of each node from 1 on, and
        its rank in it.
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

    @property
    def factor(self) -> float:
        """Accepted tokens per expected one."""
        return self._calibration.factor

    def expect(self, tokens: list[float]) -> None:
        """Note how many tokens are expected of what each request verifies now."""
        self._verified = tokens

    def learn(self, drafted: int, counts: Sequence[int | None]) -> None:
        """Compare what was accepted with what was expected; without a draft that weighs less."""
        if not any(self._verified):
            self._calibration.fade()
        for expected, count in zip(self._verified, counts, strict=False):
            if count is not None:
                self._calibration.learn(expected, count)
        self._verified = []

    def table(self) -> Any:
        """Return what each effort brings; of those not seen yet, what is hoped."""
        if not self._seen[1:].any():
            return self.factor * self._curves
        seen = np.where(self._seen[:, None], self._curves, 0.0)
        hoped = _HOPE * np.where(self._less[..., None], seen, 0.0).max(1)
        return self.factor * np.where(self._seen[:, None], self._curves, hoped)


def best_size(
    costs: dict[int, float], probabilities: Sequence[Sequence[float]], factor: float
) -> int:
    """Return the rows, root included, with which a batch gains the most tokens per second.

    `costs` are seconds by rows of a request, `probabilities`, by request and descending, those that
    drafted tokens are accepted; they are multiplied with `factor`.
    """
    gains = [list(accumulate(one, initial=0.0)) for one in probabilities]
    longest = max(map(len, gains))

    def rate(rows: int) -> float:
        tokens = sum(1 + factor * gain[min(rows, len(gain)) - 1] for gain in gains)
        return tokens / costs[rows]

    useful = [rows for rows in costs if rows <= longest]
    return max(useful, key=lambda rows: (rate(rows), -rows))


def best_total(costs: dict[int, float], requests: int, chances: Sequence[float]) -> int:
    """Return the drafted tokens with which a batch gains the most tokens per second.

    For passes in which every request may draft as much as it likes. `costs` are seconds by drafted
    tokens of all requests, ascending from 0; `chances`, descending, those that they are accepted.
    """
    gains = [0.0, *accumulate(chances)]
    best, fastest = 0, 0.0
    for room, seconds in costs.items():
        drafted = min(room, len(chances))
        if (rate := (requests + gains[drafted]) / seconds) > fastest:
            best, fastest = drafted, rate
    return best


class Costs(NamedTuple):
    """What rounds of texts alike took: their passes by rows, and their drafting by effort."""

    passes: PassCosts
    drafts: Timings

    def drafting(self, efforts: Sequence[Effort]) -> dict[Effort, float]:
        """Return the seconds of every effort that may be tried next.

        One that was not measured is taken to cost in proportion to what was, by rows and levels.
        """
        known = self.drafts.medians
        idle = known.pop(NONE, 0.0)
        rows = sorted({effort.rows for effort in efforts})
        allowed = growing(rows, max((one.rows for one in known), default=0))

        def seconds(effort: Effort) -> float:
            if effort == NONE:
                return idle
            return known.get(effort) or min(
                (
                    taken * max(effort.rows / other.rows, effort.depth / other.depth)
                    for other, taken in known.items()
                ),
                default=0.0,
            )

        return {effort: seconds(effort) for effort in efforts if effort.rows in allowed}


class Plan(NamedTuple):
    """What an effort is expected to give to each request, and to take."""

    effort: Effort
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds
