"""Vegas: draft with the target itself on the few cached tokens that verification found important.

Verifying a draft computes, as a by-product, how much its rows care about every token of the prefix.
The next draft then runs the same model, but its full-attention layers read only the best-scored
tokens, chosen per layer and shared by all heads, and everything newer than that prefix.
(*Vegas: self-speculative decoding with verification-guided sparse attention*, §3.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specattn.decoding.loop import Draft, Drafter, Verified
from specattn.decoding.method import Method
from specattn.decoding.sampling import TargetLaw
from specattn.decoding.sparse_chain import Chosen, SparseChain
from specattn.decoding.target import SCORES, Selection, Target
from specattn.ops import select_topk


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
        self.method, self.cache = method, target.cache
        self.chain = SparseChain(method.gamma, target, law, generator)
        self.chosen: Chosen | None = None

    def propose(self, root: torch.Tensor) -> Draft:
        if self.chosen is None:
            return self.chain.draft(root, [])
        gamma = self.method.gamma
        # At first 1 to gamma + 1 tokens are newer than the prefix: the last root and path.
        return self.chain.draft(root, self.chosen.readings(self.cache.seqlens, gamma, 2 * gamma))

    def observe(self, verified: Verified) -> None:
        scores = verified.result.scores
        assert scores is not None, "they are wanted"
        layers, batch, capacity = scores.shape
        if not layers:
            return
        indices, lengths = select_topk(
            scores.view(layers * batch, capacity),
            verified.prefix.repeat(layers),
            ratio=self.method.ratio,
            min_tokens=self.method.min_tokens,
            keep_first=self.method.keep_first,
            keep_last=self.method.keep_last,
        )
        selection = Selection(indices.view(layers, batch, -1), lengths[:batch])
        self.chosen = Chosen(selection, verified.prefix)

    def keep(self, rows: list[int]) -> None:
        if self.chosen is not None:
            self.chosen = self.chosen.keep(rows)
