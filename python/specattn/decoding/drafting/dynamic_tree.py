"""EAGLE-2's dynamic draft trees, grown for a whole batch with tensor operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from specattn.decoding.drafting.pruning import pruned
from specattn.decoding.engine.contract import Draft

_GROUP = 32  # tokens of a group in `top_tokens`, at most
_LARGE = 2**14  # vocabularies from here on are looked through by groups


class Candidates(NamedTuple):
    """All nodes that were scored while trees grew.

    Attributes
    ----------
    root : Tensor, int64 [B]
    tokens : Tensor, int64 [B, n]
    scores : Tensor, float32 [B, n]
    parents : Tensor, int64 [B, n]
        By their number among the candidates; -1 is the root.
    places : array, int [2, n]
        As `places` returns them.
    depth, width : int
        Levels, and children of a node.
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


class DynamicTree:
    """A batch of trees that grow where the drafter is confident (EAGLE-2, sections 4.1 and 4.2).

    A node's *score* is the log-probability that the drafter gives to its whole path: about the
    logarithm of the chance that the node will be accepted. Every level, the best `width` nodes of
    the last one are expanded into their `width` best tokens each. In the end the best of all nodes
    that were ever scored make the tree, whether they were expanded or not.

    Parameters
    ----------
    root : Tensor, int64 [B]
    width : int
        Nodes that are expanded per level, and children of each.
    """

    def __init__(self, root: torch.Tensor, width: int):
        self.root, self.width = root, width
        self.candidates = 0
        # Of every level: tokens and scores of its candidates, [B, n * children], and the numbers of
        # their n parents among all candidates. The root is none: -1.
        self.tokens, self.scores = list[torch.Tensor](), list[torch.Tensor]()
        self.parents = [torch.full_like(root[:, None], -1)]
        self.reached = torch.zeros(len(root), 1, device=root.device)  # scores of the last parents

    def score(self, logits: torch.Tensor) -> None:
        """Make candidates of the children of the nodes that were expanded last.

        Parameters
        ----------
        logits : Tensor [B, n, V]
            Of the drafter after the nodes that `expand` returned last; after the root at
            first, [B, 1, V].
        """
        steps, tokens = top_tokens(logits.log_softmax(-1, torch.float32), self.width)
        self.children = steps.shape[-1]
        self.tokens.append(tokens.flatten(1))
        self.scores.append((self.reached[..., None] + steps).flatten(1))
        self.candidates += self.scores[-1].shape[1]

    def expand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose which of the last level's candidates are expanded next.

        Returns
        -------
        tokens, parents : Tensor, int64 [B, m]
            Of these nodes: their tokens, and which of the n nodes of the last level each follows.
        """
        scores = self.scores[-1]
        self.reached, chosen = scores.topk(min(self.width, scores.shape[1]))
        self.parents.append(chosen + (self.candidates - scores.shape[1]))
        return self.tokens[-1].gather(1, chosen), chosen // self.children

    @property
    def grown(self) -> Candidates:
        """All candidates so far."""
        tokens, scores, above = (
            torch.cat(part, 1) for part in (self.tokens, self.scores, self.parents)
        )
        above = above[..., None].expand(-1, -1, self.children).flatten(1)[:, : self.candidates]
        sizes = [scores.shape[1] // self.children for scores in self.scores]
        found = places(sizes, self.children)
        return Candidates(self.root, tokens, scores, above, found, len(sizes), self.width)


def places(sizes: Sequence[int], children: int) -> Any:
    """Return level of each candidate from 1 on, and its rank: int [2, n].

    The rank is the first width of a beam that would have found it: its own among its siblings,
    or its parent's in the beam.

    Parameters
    ----------
    sizes : sequence of int
        Nodes that were expanded, level by level.
    children : int
        Candidates of each.
    """
    levels = [np.full(n * children, level) for level, n in enumerate(sizes, 1)]
    ranks = [np.maximum.outer(np.arange(n), np.arange(children)).ravel() for n in sizes]
    return np.stack([np.concatenate(levels), np.concatenate(ranks)])


def top_tokens(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest entries of x [B, n, V] in descending order, and their places: [B, n, k].

    They lie in the `count` groups of tokens with the largest entries, so after one pass for the
    groups' maxima the rest is small. On a CPU that takes a third of the time of ``topk`` over a
    vocabulary of 128k; over a small one it is slower.
    """
    size = x.shape[-1]
    count, group = min(count, size), math.gcd(size, _GROUP)
    if size < _LARGE or size // group < count:
        return torch.topk(x, count)
    groups = x.unflatten(-1, (-1, group))
    best = groups.amax(-1).topk(count, sorted=False).indices
    among = groups.gather(2, best[..., None].expand(*best.shape, group)).flatten(2)
    found, at = among.topk(count)
    return found, best.gather(2, at // group) * group + at % group
