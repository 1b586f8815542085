"""EAGLE-2's dynamic draft trees, grown for a whole batch with tensor operations."""

from __future__ import annotations

import math

import torch

from specattn.decoding.loop import Draft
from specattn.tree import Tree

_GROUP = 32  # tokens of a group in `top_tokens`, at most


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
        self.levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.candidates = 0
        # Of the nodes that are expanded next: their scores, and their numbers among the candidates.
        self.scores = torch.zeros(len(root), 1, device=root.device)
        self.numbers = torch.full_like(root[:, None], -1)

    def grow(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Score the children of the nodes that were expanded last, and choose the next ones.

        Parameters
        ----------
        logits : Tensor [B, n, V]
            What the drafter says after the nodes that the last call returned; after the root, [B,
            1, V], in the first call.

        Returns
        -------
        tokens, parents : Tensor, int64 [B, m]
            Of the nodes to expand: their tokens, and which of the n nodes each follows.
        """
        steps, tokens = top_tokens(logits.log_softmax(-1, torch.float32), self.width)
        children = steps.shape[-1]
        scores, tokens = (self.scores[..., None] + steps).flatten(1), tokens.flatten(1)
        self.levels.append((tokens, scores, self.numbers))
        self.scores, chosen = scores.topk(min(self.width, scores.shape[1]))
        self.numbers = chosen + self.candidates
        self.candidates += scores.shape[1]
        return tokens.gather(1, chosen), chosen // children

    def best(self, size: int) -> Draft:
        """Return the trees of the root and its `size` - 1 best descendants, or all there are.

        No node outdoes its parent, and of equals the one above comes first; so the best are trees.
        """
        tokens, scores, expanded = (torch.cat(part, 1) for part in zip(*self.levels, strict=True))
        # Every expanded node has equally many children, and these follow one another.
        parents = expanded.repeat_interleave(tokens.shape[1] // expanded.shape[1], 1)
        count = min(size - 1, self.candidates)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
        # Where each candidate, the root at index 0 among them, stands in its tree.
        place = torch.zeros(len(order), 1 + self.candidates, dtype=torch.int64, device=order.device)
        place.scatter_(
            1, order + 1, torch.arange(1, 1 + count, device=order.device).expand_as(order)
        )
        above = place.gather(1, parents.gather(1, order) + 1)
        tree = Tree(
            torch.cat([torch.full_like(self.root[:, None], -1), above], 1),
            max_depth=min(len(self.levels), count),
            max_width=min(self.width, count),
            trusted=True,
        )
        return Draft(tree, torch.cat([self.root[:, None], tokens.gather(1, order)], 1))

    def expected_length(self, size: int) -> float:
        """Return how many tokens a pass over `best(size)` emits if the drafter's law is right.

        The mean over the batch: the bonus token, and each node with its chance.
        """
        scores = torch.cat([scores for _, scores, _ in self.levels], 1)
        return 1 + float(scores.sort(1, descending=True).values[:, : size - 1].exp().sum(1).mean())


def top_tokens(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest entries of x [B, n, V] in descending order, and their places: [B, n, k].

    They lie in the `count` groups of tokens with the largest entries, so after one pass for the
    groups' maxima the rest is small. ``topk`` over a whole vocabulary takes several times as long.
    """
    size = x.shape[-1]
    count, group = min(count, size), math.gcd(size, _GROUP)
    if size // group < count:
        return torch.topk(x, count)
    groups = x.unflatten(-1, (-1, group))
    best = groups.amax(-1).topk(count, sorted=False).indices
    among = groups.gather(2, best[..., None].expand(*best.shape, group)).flatten(2)
    found, at = among.topk(count)
    return found, best.gather(2, at // group) * group + at % group
