"""Chains of drafted tokens, each drawn from a distribution shaped as the target's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from specattn.decoding.engine.contract import Draft, DraftContext
from specattn.tree import Tree


class ChainBuilder:
    """Draws the tokens of a chain one after the other, at most `gamma` of them.

    With `rejection` each is sampled by itself, to be tested by the rejection rule. By default it is
    drawn with the noise with which the target's own token at that position will be drawn, and
    accepted where both are the same.
    """

    def __init__(self, gamma: int, context: DraftContext, *, rejection: bool = False):
        self.sampler, self.generator = context.sampler, context.generator
        self.rejection, self.sequences = rejection, context.sequences
        self.trees = [Tree.chain(n, device=context.target.device) for n in range(gamma + 1)]

    def build(
        self, root: torch.Tensor, steps: int, logits: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> Draft:
        """Draft a chain of `steps` tokens behind `root` [B], fewer where the texts end before.

        ``logits(token, step)`` returns logits [B, 1, V] after the chain's last token [B, 1].
        """
        tokens, probs = root[:, None], list[torch.Tensor]()
        for step in range(min(steps, self.sequences.draft_depth)):
            drawn = self.draw(logits(tokens[:, -1:], step), self.trees[step], tokens, step, probs)
            tokens = torch.cat([tokens, drawn], 1)
        return self.draft(tokens, probs)

    def draw(
        self,
        logits: torch.Tensor,
        tree: Tree,
        tokens: torch.Tensor,
        first: int | torch.Tensor,
        probs: list[torch.Tensor],
    ) -> torch.Tensor:
        """Draw the token after each of the last nodes of a chain, as `Sampler.draw` does.

        What it was sampled from is appended to `probs` where the rejection rule needs it.
        """
        if not self.rejection:
            return self.sampler.draw(logits, tree, tokens, first).clamp_min(0)
        drawn, sampled = self.sampler.sample(logits, tree, tokens, first, self.generator)
        if sampled is not None:
            probs.append(sampled)
        return drawn

    def draft(self, tokens: torch.Tensor, probs: list[torch.Tensor]) -> Draft:
        """Return the chain `tokens` [B, n + 1]; `probs`, if any, are its n draft distributions."""
        tree = self.trees[tokens.shape[1] - 1]
        if not probs:
            return Draft(tree, tokens)
        # Nothing follows the last node; its row is there for the shape and never read.
        return Draft(tree, tokens, pad(torch.cat(probs, 1), (0, 0, 0, 1)))
