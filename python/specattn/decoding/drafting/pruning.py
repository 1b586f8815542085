"""Trees of the most probable nodes of larger ones, such as EAGLE-2 grows.

A node's *score* is the log-probability that the drafter gives to its whole path: about the
logarithm of the chance that the node will be accepted. The best of all nodes that were ever scored
make the tree, whether they were expanded or not (EAGLE-2, sections 4.1 and 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from specattn.decoding.drafting.gains import Nodes
from specattn.decoding.engine.contract import Draft
from specattn.decoding.text.sampling import kernels
from specattn.reference.tree_mask import WORD_BITS
from specattn.tree import Tree


def most_probable(
    scores: torch.Tensor, parents: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `count` nodes of a tree, root apart, that are most likely accepted.

    No node outdoes its parent, and of equals the one above comes first; so the best are trees.
    Given are scores [B, n], such as the log-probabilities of their paths, and parents by number, -1
    the root; returned the chosen numbers, ascending [B, count], and the parents [B, 1 + count] of
    the tree of the root and these.
    """
    if count == scores.shape[1]:  # all of them: nothing is sorted
        order = torch.arange(count, device=scores.device).expand(len(scores), -1)
        return order, torch.nn.functional.pad(parents.expand_as(scores) + 1, (1, 0), value=-1)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
    # Where each parent stands in the tree: the root, no node of these, before all of them.
    above = torch.searchsorted(order, parents.gather(1, order), right=True)
    return order, torch.nn.functional.pad(above, (1, 0), value=-1)


def pruned(
    root: torch.Tensor,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    parents: torch.Tensor,
    count: int,
    *,
    depth: int,
    width: int,
) -> tuple[Draft, torch.Tensor]:
    """Return the draft of the `count` most probable of drafted nodes [B, n], and which these are.

    `depth` and `width` are the whole tree's levels, and children of a node at most.
    """
    depth, width, native = min(depth, count), min(width, count), kernels()
    if native is None or root.device.type != "cpu":
        chosen, above = most_probable(scores, parents, count)
        tree = Tree(above, max_depth=depth, max_width=width, trusted=True)
        kept = tokens if count == tokens.shape[1] else tokens.gather(1, chosen)
        return Draft(tree, torch.cat([root[:, None], kept], 1)), chosen
    batch, size = len(root), count + 1
    chosen = parents.new_empty(batch, count)
    kept, above = parents.new_empty(2, batch, size)
    depths = parents.new_empty(batch, size, dtype=torch.int32)
    mask = parents.new_empty(batch, size, count // WORD_BITS + 1)
    given = (tokens, scores.float(), parents.expand(batch, -1).contiguous())
    native.prune_tree(*given, chosen, kept, above, depths, mask, 1)
    kept[:, 0] = root
    tree = Tree.grown(above, depths=depths, packed_mask=mask, max_depth=depth, max_width=width)
    return Draft(tree, kept), chosen


class Candidates(NamedTuple):
    """All nodes that were scored while trees grew behind root [B]: each [B, n].

    Parents are numbers among the candidates, -1 the root; `places` as `places` returns them, or
    what returns it as a tensor when a pacer asks.
    """

    root: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor
    places: Any
    depth: int
    width: int

    def nodes(self) -> Nodes:
        """Return them as a pacer takes them."""
        found = self.places() if callable(self.places) else self.places
        return Nodes(self.tokens, self.scores, self.parents, *found)

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
