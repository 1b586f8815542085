"""Vegas: draft with the target itself on the few cached tokens that verification found important.

Verifying a draft computes, as a by-product, how much its rows care about every token of the prefix.
The next draft then runs the same model, but its full-attention layers read only the best-scored
tokens, chosen per layer and shared by all heads, and everything newer than that prefix.
(*Vegas: self-speculative decoding with verification-guided sparse attention*, §3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specattn.decoding.budget import Budgeted
from specattn.decoding.loop import Draft, Drafter, Verified
from specattn.decoding.sampling import TargetLaw
from specattn.decoding.sparse_chain import Chosen, SparseChain
from specattn.decoding.statistics import Clock
from specattn.decoding.switch import Switch
from specattn.decoding.target import NOTHING, SCORES, Selection, Target, Wanted
from specattn.ops import select_topk

ROWS = ("two", "all", "last")
RANKINGS = ("logit", "weight")


@dataclass(frozen=True)
class Vegas(Budgeted):
    """Self-speculation with verification-guided sparse attention.

    Sliding-window layers keep their window while drafting; where all layers slide there is nothing
    to thin out, and decoding is plain. Rejected drafts guide the selection just like accepted ones
    (§3.2).

    Parameters
    ----------
    gamma, ratio, budget, min_tokens
        As for `Budgeted`; what counts is the prefix of the last verification.
    keep_first, keep_last : int
        First and last prefix tokens that are always selected, within the budget. The paper's method
        needs none: what is newer than the prefix is always read.
    rows : {"two", "all", "last"}
        Rows of a verification that rank the prefix: the first and the last one (Collect-2-Query,
        §3.3), all of them (equation 2), or that of the last accepted token alone, which the paper
        finds worse (figure 4). Only acceptance says which that is, so every row is scored by itself
        and `gamma` + 1 times as many scores are kept.
    ranking : {"logit", "weight"}
        Rank by mean logit, or by mean attention weight as the authors' program does (appendix B).
        Weights take a buffer of one layer's logits, and so does ``rows="last"``.
    switch : bool, optional
        Time rounds with and without drafts and keep to the faster kind (`Switch`). By default it is
        on where that cannot show in the text: always but where a run that samples has been given a
        seed, since another number of draws from it is another text of the same law.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    gamma: int = 6
    keep_first: int = 0
    keep_last: int = 0
    rows: str = "two"
    ranking: str = "logit"
    switch: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("keep_first", "keep_last"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name, known in (("rows", ROWS), ("ranking", RANKINGS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")

    def start(self, target: Target, law: TargetLaw, generator: torch.Generator | None) -> Drafter:
        """Return a drafter; its first round drafts nothing, for want of a selection."""
        return _SparseDrafter(self, target, law, generator)


class _SparseDrafter(Drafter):
    """Chains drafted by the target on the selection that the last verification led to."""

    def __init__(
        self,
        method: Vegas,
        target: Target,
        law: TargetLaw,
        generator: torch.Generator | None,
    ):
        self.method, self.target, self.sequences = method, target, law.sequences
        self.chain = SparseChain(method.gamma, target, law, generator)
        self.chosen: Chosen | None = None
        on = method.switch
        if on is None:
            on = law.greedy or generator is None
        self.switch = Switch(Clock(target.device)) if on and target.full_layers else None

    def propose(self, root: torch.Tensor) -> Draft:
        drafting = self._drafting()
        if not drafting:
            self.chosen = None
        readings: list[Selection] = []
        if self.chosen is not None:
            # At first 1 to gamma + 1 tokens are newer than the prefix: the last root and path.
            gamma, seqlens = self.method.gamma, self.target.cache.seqlens
            readings = self.chosen.readings(seqlens, gamma, newer=2 * gamma)
        draft = self.chain.draft(root, readings)
        self.wanted = self._wanted(draft.tree.size) if drafting else NOTHING
        return draft

    def observe(self, verified: Verified) -> None:
        scores = self._scores(verified)
        if scores is None:
            return
        layers, batch, capacity = scores.shape
        indices, lengths = select_topk(
            scores.view(layers * batch, capacity),
            verified.prefix.repeat(layers),
            **self.method.share(),
            keep_first=self.method.keep_first,
            keep_last=self.method.keep_last,
        )
        selection = Selection(indices.view(layers, batch, -1), lengths[:batch])
        self.chosen = Chosen(selection, verified.prefix)

    def keep(self, rows: list[int]) -> None:
        if self.chosen is not None:
            self.chosen = self.chosen.keep(rows)

    def details(self) -> dict[str, Any]:
        return self.switch.details() if self.switch is not None else {}

    def _drafting(self) -> bool:
        """Whether the round that begins now shall draft, or prepare the next one for it."""
        if self.switch is None:
            return self.target.full_layers > 0
        lengths, padding = self.sequences.lengths, self.sequences.padding
        active = self.sequences.active
        return self.switch.choose(
            length=max(lengths[row] - padding[row] for row in active),
            requests=len(active),
            emitted=sum(lengths),
        )

    def _wanted(self, rows: int) -> Wanted:
        """Return what ranks the prefix, of a verification of so many rows."""
        asked = SCORES.rows if self.method.rows == "two" else tuple(range(rows))
        return Wanted(asked, self.method.ranking, each=self.method.rows == "last")

    def _scores(self, verified: Verified) -> torch.Tensor | None:
        """Return what ranks the prefix [full layers, B, N], or None in a round without scores."""
        scores = verified.result.scores
        if scores is None or self.method.rows != "last":
            return scores
        counts = verified.accepted.counts.long()  # the path is a chain: node n is row n
        return scores[:, torch.arange(len(counts), device=counts.device), counts]
