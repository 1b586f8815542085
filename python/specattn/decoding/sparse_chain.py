"""Self-drafting: the target drafts a chain for itself and reads few of the cached tokens.

What all such methods share. Each says in a file of its own what it reads and when it chooses that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from specattn.decoding.loop import Draft
from specattn.decoding.sampling import TargetLaw
from specattn.decoding.target import Reading, Selection, Target
from specattn.tree import Tree


class SparseChain:
    """Lets the target draft chains.

    Parameters
    ----------
    gamma : int
        Drafted tokens per round, at most.
    target : Target
    law : TargetLaw
    generator : torch.Generator or None
    """

    def __init__(
        self, gamma: int, target: Target, law: TargetLaw, generator: torch.Generator | None
    ):
        self.target, self.law, self.generator = target, law, generator
        self.trees = [Tree.chain(n, device=target.device) for n in range(gamma + 1)]

    def draft(self, root: torch.Tensor, readings: Iterable[Reading]) -> Draft:
        """Draft one token per reading behind `root` [B]; without any, the root alone."""
        tokens, probs = root[:, None], list[torch.Tensor]()
        for step, reading in enumerate(readings):
            logits = self.target.draft(tokens[:, -1:], step, reading).logits
            drawn, law = self.law.draw(logits, self.trees[step], tokens, step, self.generator)
            tokens = torch.cat([tokens, drawn], 1)
            if law is not None:
                probs.append(law)
        return self.drafted(tokens, probs)

    def drafted(self, tokens: torch.Tensor, probs: list[torch.Tensor]) -> Draft:
        """Return the chain `tokens` [B, n + 1]; `probs`, if any, are the n laws drawn from."""
        tree = self.trees[tokens.shape[1] - 1]
        if not probs:
            return Draft(tree, tokens)
        # Nothing follows the last node; its row is there for the shape and never read.
        return Draft(tree, tokens, pad(torch.cat(probs, 1), (0, 0, 0, 1)))


class Chosen(NamedTuple):
    """Tokens chosen among the first of every request; whatever is newer is read beside them.

    Attributes
    ----------
    selection : Selection
    prefix : Tensor, int32 [B]
        How many tokens there were to choose from.
    """

    selection: Selection
    prefix: torch.Tensor

    def keep(self, rows: list[int]) -> Chosen:
        """Return what was chosen for these rows of the batch alone."""
        indices, lengths = self.selection
        return Chosen(Selection(indices[:, rows], lengths[rows]), self.prefix[rows])

    def readings(self, seqlens: torch.Tensor, steps: int, newer: int) -> list[Selection]:
        """Return what each draft step reads: all steps share one table of positions.

        Parameters
        ----------
        seqlens : Tensor, int32 [B]
            What is committed now.
        steps : int
            A step more is one more in length: the root and the drafted tokens lie in a row.
        newer : int
            Most tokens between the prefix and the last step, which the host must know.
        """
        indices, lengths = self.selection
        per_head = (-1, *[1] * (lengths.dim() - 1))
        column = torch.arange(indices.shape[-1] + newer, dtype=torch.int32, device=indices.device)
        behind = (self.prefix.view(per_head) - lengths)[..., None] + column
        table = torch.where(column < lengths[..., None], pad(indices, (0, newer)), behind)
        first = Selection(table, lengths).longer(seqlens - self.prefix)
        return [first.longer(step) for step in range(steps)]


def tokens_of(chunks: torch.Tensor, counts: torch.Tensor, size: int) -> Selection:
    """Return the tokens of chosen chunks: int32 [..., K] and their counts -> [..., K * size]."""
    within = torch.arange(size, dtype=torch.int32, device=chunks.device)
    return Selection((chunks[..., None] * size + within).flatten(-2), counts * size)


def chunk_means(scores: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mean score of every chunk of `size` tokens: [..., N] -> [..., ceil(N / size)]."""
    scores = pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf)
    return scores.unflatten(-1, (-1, size)).mean(-1)
