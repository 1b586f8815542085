"""Vegas: draft with the target itself on the few cached tokens that verification found important.

Verifying a draft computes, as a by-product, how much its rows care about every token of the prefix.
The next draft then runs the same model, but its full-attention layers read only the best-scored
tokens, chosen per layer and shared by all heads, and everything newer than that prefix.
(*Vegas: self-speculative decoding with verification-guided sparse attention*, §3.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from specattn.decoding.loop import Draft, Drafter, Verified
from specattn.decoding.method import Method
from specattn.decoding.sampling import TargetLaw
from specattn.decoding.target import SCORES, Selection, Target
from specattn.ops import select_topk
from specattn.tree import Tree


@dataclass(frozen=True)
class Vegas(Method):
    """Self-speculation with verification-guided sparse attention.

    Sliding-window layers keep their window while drafting; where all layers slide there is nothing
    to thin out, and decoding is plain. Rejected drafts guide the selection just
    like accepted ones (§3.2), through the first and the last row of each verification (§3.3).

    Parameters
    ----------
    gamma : int
        Drafted tokens per round.
    ratio : float
        Share of the prefix that a draft reads, in (0, 1].
    min_tokens : int
        Lower bound of that selection; shorter prefixes are read whole.
    keep_first, keep_last : int
        First and last prefix tokens that are always selected, within the budget. The paper's method
        needs none: what is newer than the prefix is always read.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    gamma: int = 6
    ratio: float = 0.07
    min_tokens: int = 256
    keep_first: int = 0
    keep_last: int = 0

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ValueError(f"gamma must be at least 1, got {self.gamma}")
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], got {self.ratio}")
        for name in ("min_tokens", "keep_first", "keep_last"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def max_nodes(self) -> int:
        """The root and `gamma` drafted tokens."""
        return self.gamma + 1

    def start(self, target: Target, law: TargetLaw, generator: torch.Generator | None) -> Drafter:
        """Return a drafter; its first round drafts nothing, for want of a selection."""
        return _SparseDrafter(self, target, law, generator)


class _SparseDrafter(Drafter):
    """Chains drafted by the target on the selection that the last verification led to."""

    wanted = SCORES

    def __init__(
        self,
        method: Vegas,
        target: Target,
        law: TargetLaw,
        generator: torch.Generator | None,
    ):
        self.method, self.target, self.law, self.generator = method, target, law, generator
        self.chains = [Tree.chain(n, device=target.device) for n in range(method.gamma + 1)]
        self.selected: Selection | None = None  # of the prefix alone
        self.prefix = target.cache.seqlens

    def propose(self, root: torch.Tensor) -> Draft:
        tokens, probs = root[:, None], list[torch.Tensor]()
        if self.selected is None:
            return Draft(self.chains[0], tokens)
        table, lengths = self._with_newer_tokens(self.selected)
        for step, chain in enumerate(self.chains[:-1]):
            selection = Selection(table, lengths + step)
            logits = self.target.draft(tokens[:, -1:], step, selection).logits
            drawn, law = self.law.draw(logits, chain, tokens, step, self.generator)
            tokens = torch.cat([tokens, drawn], 1)
            if law is not None:
                probs.append(law)
        if not probs:
            return Draft(self.chains[-1], tokens)
        # Nothing follows the last node; its row is there for the shape and never read.
        return Draft(self.chains[-1], tokens, pad(torch.cat(probs, 1), (0, 0, 0, 1)))

    def observe(self, verified: Verified) -> None:
        scores = verified.result.scores
        assert scores is not None, "they are wanted"
        layers, batch, capacity = scores.shape
        if not layers:
            return
        self.prefix = verified.prefix
        indices, lengths = select_topk(
            scores.view(layers * batch, capacity),
            verified.prefix.repeat(layers),
            ratio=self.method.ratio,
            min_tokens=self.method.min_tokens,
            keep_first=self.method.keep_first,
            keep_last=self.method.keep_last,
        )
        self.selected = Selection(indices.view(layers, batch, -1), lengths[:batch])

    def keep(self, rows: list[int]) -> None:
        self.prefix = self.prefix[rows]
        if self.selected is not None:
            indices, lengths = self.selected
            self.selected = Selection(indices[:, rows], lengths[rows])

    def _with_newer_tokens(self, selected: Selection) -> Selection:
        """Return what the first draft step reads: the selection and all newer tokens.

        The root and the tokens drafted behind it come next, so a step more is one more in length.
        """
        newer = self.target.cache.seqlens - self.prefix  # 1 to gamma + 1: the last root and path
        room = 2 * self.method.gamma
        column = torch.arange(selected.indices.shape[-1] + room, device=self.prefix.device)
        behind = (self.prefix - selected.lengths)[:, None] + column
        chosen = column < selected.lengths[:, None]
        table = torch.where(chosen, pad(selected.indices, (0, room)), behind.to(torch.int32))
        return Selection(table, selected.lengths + newer)
