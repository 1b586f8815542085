"""Estimates what a draft of each size brings, by how often drafted tokens came true so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

SIZES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65)
"""Rows of a request in a pass, root included: few sizes, so that each is met again."""

_REMEMBERS = 8  # drafts over which gains are averaged
_PRIOR, _KNOWN = 0.5, 8.0  # expected events that nothing learned weighs, and that are remembered
_GUESS, _DOUBT = 0.8, 2.0  # chance that a token of a chain is accepted, and what that weighs
_NOTHING = -1.0  # expected of a size that an effort does not have: less than of no draft


class Effort(NamedTuple):
    """How much is drafted: nodes of a level, and levels below the root; or tokens of a chain."""

    width: int
    depth: int


NONE = Effort(0, 0)
"""Nothing is drafted."""


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


def chains(most: int) -> list[Effort]:
    """Return the efforts of chains: few lengths, of which `most` is the longest."""
    return [Effort(1, size - 1) for size in sizes_up_to(most + 1) if size > 1]


def beams(width: int, depth: int) -> list[Effort]:
    """Return the efforts of trees of up to `depth` levels and `width` nodes: few, each is timed."""
    depths = sorted({level for level in (3, 6) if level < depth} | {depth})
    wide = [Effort(one, level) for one in sorted({min(4, width), width}) for level in depths]
    return [
        *(Effort(1, level) for level in sorted({1, *depths})),
        *(e for e in wide if e.width > 1),
    ]


def sizes_up_to(most: int) -> list[int]:
    """Return the rows of a pass, root included, that are chosen from: few, the last is `most`."""
    return [*(size for size in SIZES if size < most), most]


class Nodes(NamedTuple):
    """All nodes that a drafter scored behind the roots of a batch, level by level.

    Attributes
    ----------
    tokens : Tensor, int64 [B, n]
    scores : Tensor [B, n]
        Log-probabilities of paths, -inf of a node that only fills up. Siblings descend.
    parents : Tensor, int64 [B, n] or [n]
        Numbers among the nodes, -1 the root.
    levels, ranks : array or Tensor, int [n] or [B, n]
        1 is the level below the root; a node's rank is the first width of a beam that finds it,
        less one.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor
    levels: Any
    ranks: Any


class Truth:
    """How often drafted tokens came true, beside what their own chance behind their parent says.

    Apart of those that are their parent's best, for a greedy target takes hardly any other, and of
    those right behind the root, for a round begins where the last one's draft failed. What is
    learned is how much more often than that the rarer thing happens: that the best fails, that
    another comes true.
    """

    def __init__(self, greedy: bool):
        self.greedy = greedy
        self.expected = np.full(4, _PRIOR)  # rare things, by 2 * deep + best
        self.seen = np.full(4, _PRIOR)

    def rare(self, kinds: Any, own: Any) -> Any:
        """Return how likely the rarer thing is by tokens' `own` chances alone."""
        best = kinds % 2 == 1
        return np.where(best, (1 - own) ** (1 + self.greedy), own / (1 + self.greedy))

    def of(self, kinds: Any, own: Any) -> Any:
        """Return how likely tokens come true where their parents do."""
        rare = np.minimum(1.0, self.rare(kinds, own) * (self.seen / self.expected)[kinds])
        return np.where(kinds % 2 == 1, 1 - rare, rare)

    def learn(self, kinds: Any, own: Any, true: Any) -> None:
        """Learn of tokens whose parents came true, whether they were verified or not."""
        self.expected += np.bincount(kinds, self.rare(kinds, own), 4)
        self.seen += np.bincount(kinds, true != (kinds % 2 == 1), 4)
        keep = np.minimum(1.0, _KNOWN / self.expected)
        self.expected, self.seen = self.expected * keep, self.seen * keep


class TreeGains:
    """What trees bring, by effort and rows: tokens that are expected to be accepted of a request.

    A tree tells it of each smaller one within; of larger ones the share of accepted levels moves
    along.
    """

    def __init__(self, efforts: Sequence[Effort], sizes: Sequence[int], greedy: bool):
        self.truth, self.sizes = Truth(greedy), np.array(sizes)
        width, self.depths = np.array(efforts).T[:, :, None]
        chance = 0.75 + 0.15 * np.log10(
            np.clip((self.sizes - 1) / self.depths, 1, np.minimum(width, 10))
        )
        self.levels = np.minimum(self.depths, self.sizes - 1)
        self.table = chance * (1 - chance**self.levels) / (1 - chance)
        self._seen = np.zeros(len(efforts))
        self._within = (width <= width[:, 0]) & (self.depths <= self.depths[:, 0])
        self._width = width
        self._waits: tuple[Any, ...] | None = None  # a draft whose outcome is not known yet

    def note(self, number: int, nodes: Nodes) -> Any:
        """Learn what an effort was found to offer; return tokens by request and rows, [B, sizes].

        Probabilities are taken to be as true as such were before.
        """
        scores = nodes.scores.double().numpy(force=True)
        batch, n = scores.shape
        shift = np.arange(batch)[:, None] * n
        parents = np.broadcast_to(nodes.parents.numpy(force=True), (batch, n))
        above = np.where(parents < 0, batch * n, parents + shift).ravel()
        levels, ranks = (
            np.broadcast_to(x.numpy(force=True) if isinstance(x, torch.Tensor) else x, (batch, n))
            for x in (nodes.levels, nodes.ranks)
        )
        levels, ranks = levels.ravel(), ranks.ravel()
        scores, fills = scores.ravel(), np.isneginf(scores.ravel())
        with np.errstate(invalid="ignore"):
            own = np.where(fills, 0.0, np.exp(scores - np.append(scores, 0.0)[above]))
        best = np.zeros(batch * n, bool)
        at_root = np.where(parents < 0, batch * n + np.arange(batch)[:, None], parents + shift)
        best[np.unique(at_root.ravel(), return_index=True)[1]] = True
        kinds = 2 * (levels > 1) + best
        path = np.append(np.where(fills, 0.0, self.truth.of(kinds, own)), 1.0)
        each = [np.flatnonzero(levels == level) for level in range(1, levels.max() + 1)]
        for at in each[1:]:
            path[at] *= path[above[at]]
        self._waits = nodes.tokens, levels, above, each, kinds, own, fills
        order = np.argsort(-scores.reshape(batch, n), 1, kind="stable") + shift
        gains = np.zeros((len(self.table), batch, len(self.sizes)))
        within = np.flatnonzero(self._within[:, number])
        for one in within:
            inside = (levels <= self.depths[one, 0]) & (ranks < self._width[one, 0])
            for request, row in enumerate(order):
                sums = np.append(0.0, np.cumsum(path[row[inside[row]]][: self.sizes[-1]]))
                gains[one, request] = sums[np.minimum(self.sizes - 1, len(sums) - 1)]
        self._move(number, within, gains.mean(1))
        return gains[number]

    def _move(self, number: int, within: Any, found: Any) -> None:
        """Move what is expected towards what was found; of larger efforts, as this one moved."""
        before = self._odds()
        weight = 1 / np.minimum(self._seen[within] + 2, _REMEMBERS)[:, None]
        self.table[within] += weight * (found[within] - self.table[within])
        larger = ~self._within[:, number]
        moved = before + (self._odds()[number, -1] - before[number, -1])
        self.table[larger] = (self.levels / (1 + np.exp(-moved)))[larger]
        self._seen[within] += 1

    def _odds(self) -> Any:
        share = np.clip(self.table / np.maximum(self.levels, 1), 0.01, 0.99)
        return np.log(share / (1 - share))

    def learn(self, emitted: Sequence[Sequence[int] | None]) -> None:
        """Learn what came true of the draft that was noted: what each request went on with.

        None where a request's text is not known to follow the draft.
        """
        if self._waits is None:
            return
        tokens, levels, above, each, kinds, own, fills = self._waits
        self._waits = None
        came = np.full((len(emitted), len(each)), -1)
        for row, text in zip(came, emitted, strict=True):
            row[: len(text or ())] = (text or ())[: len(each)]
        requests = np.repeat(np.arange(len(emitted)), len(levels) // len(emitted))
        wanted = came[requests, levels - 1]
        right = np.append((tokens.numpy(force=True).ravel() == wanted) & ~fills, True)
        for at in each[1:]:
            right[at] &= right[above[at]]
        seen = right[above] & (wanted >= 0) & ~fills
        self.truth.learn(kinds[seen], own[seen], right[:-1][seen])


class ChainGains:
    """What chains without probabilities bring, by how often tokens of a depth were accepted."""

    def __init__(self, efforts: Sequence[Effort], sizes: Sequence[int], greedy: bool = True):
        deepest = max(effort.depth for effort in efforts)
        self.offered = np.full(deepest, _DOUBT)  # behind accepted ones, by depth
        self.accepted = _GUESS * self.offered
        depths = np.array([effort.depth for effort in efforts])[:, None]
        # All that is drafted is verified: no effort goes with fewer rows.
        self._reached = np.where(depths < np.array(sizes), depths, deepest + 1)

    def learn(self, drafted: int, counts: Sequence[int | None]) -> None:
        """Book a round of chains of `drafted` tokens, of which requests accepted `counts`."""
        if not drafted:
            return
        keep = 1 - (1 / _REMEMBERS) * (self.offered > _REMEMBERS)
        self.offered *= keep
        self.accepted *= keep
        for count in counts:
            if count is not None:
                self.offered[: min(count + 1, drafted)] += 1
                self.accepted[:count] += 1

    @property
    def probabilities(self) -> Any:
        """That a token of each depth is accepted, float [depth]."""
        return np.cumprod(self.accepted / self.offered)

    @property
    def table(self) -> Any:
        """What each effort brings, by rows."""
        return np.concatenate([[0.0], np.cumsum(self.probabilities), [_NOTHING]])[self._reached]


class Lookups:
    """How many tokens of what was looked up came true, for each that was expected.

    A draft counts as `at_once` tokens at most: one wrong token ends a long one.
    """

    def __init__(
        self,
        factor: float = 1.0,
        weight: float = 4.0,
        most: float = 96.0,
        at_once: float = math.inf,
    ):
        self.expected, self.accepted, self.most = weight, factor * weight, most
        self.at_once = at_once

    @property
    def factor(self) -> float:
        """Accepted tokens per expected one."""
        return self.accepted / self.expected

    def learn(self, expected: float, accepted: int) -> None:
        """Book what came of a draft."""
        part = min(1.0, self.at_once / max(expected, accepted, 1.0))
        self.expected += part * expected
        self.accepted += part * accepted
        if self.expected > self.most:
            self.expected, self.accepted = self.expected / 2, self.accepted / 2
