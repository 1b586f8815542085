"""Vegas: draft with the target itself on the few cached tokens that verification found important.

Verifying a draft computes, as a by-product, how strongly its rows attend to every token of the
prefix. The next draft runs the same model, but its full-attention layers attend only to the
best-scored tokens, selected per layer and shared by all heads, and to everything newer than that
prefix.
(*Vegas: self-speculative decoding with verification-guided sparse attention*, §3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from specattn.decoding.attention import NO_CAPTURE, CaptureSpec, Selection
from specattn.decoding.drafting import Draft, DraftContext, Drafter, Verified
from specattn.decoding.methods.budget import Budgeted
from specattn.decoding.methods.sparse_chain import PrefixSelection, SelectionDrafter, rows_at
from specattn.decoding.methods.switch import Switch

Rows = Literal["two", "all", "last"]
Ranking = Literal["logit", "weight"]


@dataclass(frozen=True)
class Vegas(Budgeted, name="vegas"):
    """Self-speculation with verification-guided sparse attention.

    Sliding-window layers keep their window while drafting; where all layers slide, decoding is
    plain. Rejected drafts guide the selection just like accepted ones (§3.2).

    Parameters
    ----------
    gamma, ratio, budget, min_tokens, rejection
        As for `Budgeted`; what counts is the prefix of the last verification.
    keep_first, keep_last : int
        First and last prefix tokens that are always selected, within the budget. The paper's method
        needs none: what is newer than the prefix is always visible.
    rows : {"two", "all", "last"}
        Rows of a verification that rank the prefix: the first and the last one (Collect-2-Query,
        §3.3), all of them (equation 2), or that of the last accepted token alone, which the paper
        finds worse (figure 4). Only acceptance says which that is, so every row is scored by itself
        and `gamma` + 1 times as many scores are kept.
    ranking : {"logit", "weight"}
        Rank by mean logit, or by mean attention weight as the authors' program does (appendix B).
        Weights take a buffer of one layer's logits, and so does ``rows="last"``.
    switch : bool
        Time rounds with and without drafts and keep to the faster kind (`Switch`). It changes no
        text, but for drafts that are sampled by themselves (`rejection`).

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    gamma: int = 6
    keep_first: int = 0
    keep_last: int = 0
    rows: Rows = "two"
    ranking: Ranking = "logit"
    switch: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("keep_first", "keep_last"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name, known in (("rows", get_args(Rows)), ("ranking", get_args(Ranking))):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter; its first round drafts nothing, because no scores exist yet."""
        return _VegasDrafter(self, context)


class _VegasDrafter(SelectionDrafter):
    """Selects by the scores of the last verification."""

    def __init__(self, method: Vegas, context: DraftContext):
        # At first 1 to gamma + 1 tokens are newer than the prefix: the last root and path.
        super().__init__(method.gamma, 2 * method.gamma, context, rejection=method.rejection)
        self.method = method
        on = method.switch and self.target.full_layers
        self.switch = Switch(self.target.clock()) if on else None

    def propose(self, root: torch.Tensor) -> Draft:
        drafting = self._drafting()
        if not drafting:
            self.selected = None
        draft = super().propose(root)
        self.capture = self._capture(draft.tree.size) if drafting else NO_CAPTURE
        return draft

    def observe(self, verified: Verified) -> None:
        scores = verified.result.scores
        if scores is None:
            return
        if self.method.rows == "last":
            scores = rows_at(scores, verified.accepted.counts)
        layers, batch, capacity = scores.shape
        indices, lengths = self.target.cache.select_topk(
            scores.view(layers * batch, capacity),
            verified.prefix.repeat(layers),
            **self.method.share(),
            keep_first=self.method.keep_first,
            keep_last=self.method.keep_last,
        )
        selection = Selection(indices.view(layers, batch, -1), lengths[:batch])
        self.selected = PrefixSelection(selection, verified.prefix)

    def details(self) -> dict[str, Any]:
        return self.switch.details() if self.switch is not None else {}

    def _drafting(self) -> bool:
        """Whether the round that begins now shall draft, or prepare the next one for it."""
        if self.switch is None:
            return bool(self.target.full_layers)
        sequences = self.context.sequences
        return self.switch.choose(
            length=max(sequences.active_lengths),
            requests=len(sequences.active),
            emitted=sum(sequences.lengths),
        )

    def _capture(self, rows: int) -> CaptureSpec:
        """Return what ranks the prefix, of a verification of so many rows."""
        captured = (0, -1) if self.method.rows == "two" else tuple(range(rows))
        return CaptureSpec(captured, self.method.ranking, per_row=self.method.rows == "last")
