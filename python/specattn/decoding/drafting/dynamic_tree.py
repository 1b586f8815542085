"""Keeps the best nodes of trees that grew where a drafter was confident (EAGLE-2).

A node's *score* is the log-probability that the drafter gives to its whole path: about the
logarithm of the chance that the node will be accepted. In the end the best of all nodes that were
ever scored make the tree, whether they were expanded or not (sections 4.1 and 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from specattn.decoding.drafting.pruning import pruned
from specattn.decoding.engine.contract import Draft


class Candidates(NamedTuple):
    """All nodes that were scored while trees grew behind root [B]: each [B, n].

    Parents are numbers among the candidates, -1 the root; `places` as `places` returns them.
    """

    root: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor
    places: Any
    depth: int
    width: int

    def best(self, size: int) -> Draft:
        """Return the trees of the root and its `size` - 1 best descendants, or all there are."""
        count = min(size - 1, self.tokens.shape[1])
        nodes = (self.tokens, self.scores, self.parents)
        return pruned(self.root, *nodes, count, depth=self.depth, width=self.width)[0]


def places(sizes: Sequence[int], children: int) -> Any:
    """Return level of each candidate from 1 on, and its rank: int [2, n].

    The rank is the first width of a beam that would have found it: its own among its siblings, or
    its parent's in the beam. `sizes` are the nodes expanded level by level, of each so many
    `children`.
    """
    levels = [np.full(n * children, level) for level, n in enumerate(sizes, 1)]
    ranks = [np.maximum.outer(np.arange(n), np.arange(children)).ravel() for n in sizes]
    return np.stack([np.concatenate(levels), np.concatenate(ranks)])
