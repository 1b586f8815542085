"""The best paths where tokens are scored by depth alone, as a drafter of one pass scores them.

What may follow at a depth, and how likely, is the same behind every node there. So a tree is a set
of paths of ranks, and of all paths the `budget` most probable ones are taken: no other tree of as
many nodes is accepted as far, as far as the drafter is right. (arXiv 2604.12989 and 2606.18394
expand one node after the other from a heap, and keep all children of each.)

No heap is needed. Let paths be ordered by score, equal ones by depth, and then as their parents are
and by rank. Then

- behind a path come all that have no better rank anywhere, and all that go on from it;
- so of `budget` paths at most ``budget - d`` end at level d (counted from 0): each of those above
  the last of these comes first, and so do the d nodes above it;
- and the j-th path of a level (from 0) is followed by its r-th token in none of the best n of the
  next level, if ``(j + 1) * (r + 1) > n``: as many precede it, itself included.

Both are known before any score. So every level is one sum over pairs (j, r) and one sort, and
nothing waits for the host.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from specattn.decoding.drafting.pruning import most_probable


class Paths(NamedTuple):
    """The best paths, level by level and each behind its parent: n of every request.

    Attributes
    ----------
    scores : Tensor, float32 [B, n]
        Log-probabilities of paths; those of a level, and so siblings, descend.
    parents : Tensor, int64 [B, n]
        Numbers among the paths, -1 the root.
    levels, ranks : Tensor, int64 [B, n]
        Of each path's last token: its depth, 0 right behind the root, and its rank there.
    """

    scores: torch.Tensor
    parents: torch.Tensor
    levels: torch.Tensor
    ranks: torch.Tensor

    def beams(self) -> torch.Tensor:
        """Return the worst rank along each path: int64 [B, n]."""
        worst, above = (torch.nn.functional.pad(x, (1, 0)) for x in (self.ranks, self.parents + 1))
        for _ in range(int(self.levels.shape[1]).bit_length()):  # twice as far each time
            worst = worst.maximum(worst.gather(1, above))
            above = above.gather(1, above)
        return worst[:, 1:]


def best_paths(steps: torch.Tensor, budget: int) -> Paths:
    """Return the `budget` best paths, or all there are.

    `steps`, float32 [B, depth, width], are the log-probabilities of the tokens of every depth,
    descending.
    """
    _, depth, width = steps.shape
    nodes = level_bounds(depth, width, budget)
    table = _table(depth, width, budget, steps.device)
    scores, levels, taken = steps.new_zeros(len(steps), 1), [], []
    for level, count in enumerate(nodes):
        first, end = table.starts[level], table.starts[level + 1]
        above, rank = table.above[first:end], table.ranks[first:end]
        below = scores.index_select(1, above) + steps[:, level].index_select(1, rank)
        found, order = below.sort(dim=1, descending=True, stable=True)
        scores = found[:, :count]
        levels.append(scores)
        taken.append(order[:, :count] + first)
    pairs, numbers = torch.cat(taken, 1), table.before
    parents = table.above[pairs] + numbers
    every = torch.cat(levels, 1)
    chosen, tree = most_probable(every, parents, min(budget, every.shape[1]))
    scores, pairs = every.gather(1, chosen), pairs.gather(1, chosen)
    return Paths(scores, tree[:, 1:] - 1, table.levels[pairs], table.ranks[pairs])


def level_bounds(depth: int, width: int, budget: int) -> list[int]:
    """Return how many of the `budget` best paths end at each level at most."""
    bounds = list[int]()
    for level in range(min(depth, budget)):
        bounds.append(min(budget - level, (bounds[-1] if bounds else 1) * width))
    return bounds


class _Table(NamedTuple):
    """All pairs (j, r) that are summed, level by level: int64 [pairs], and the first of a level.

    `before` is, of every path that a level keeps, what turns its j into its parent's number.
    """

    above: torch.Tensor
    ranks: torch.Tensor
    levels: torch.Tensor
    before: torch.Tensor
    starts: list[int]


@cache  # kept for good: captured graphs read them
def _table(depth: int, width: int, budget: int, device: torch.device) -> _Table:
    above, ranks, levels = list[int](), list[int](), list[int]()
    before, starts, parents, first = list[int](), [0], 1, -1
    for level, count in enumerate(level_bounds(depth, width, budget)):
        for j in range(parents):
            for rank in range(min(width, count // (j + 1))):
                above.append(j)
                ranks.append(rank)
                levels.append(level)
        starts.append(len(above))
        before += [first] * count
        first, parents = first + parents, count
    found = [torch.tensor(x, device=device) for x in (above, ranks, levels, before)]
    return _Table(found[0], found[1], found[2], found[3], starts)
