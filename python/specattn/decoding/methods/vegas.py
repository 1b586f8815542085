"""Vegas: draft with the target itself on the few cached tokens that verification found important.

Verifying a draft computes, as a by-product, how strongly its rows attend to every token of the
prefix. The next draft runs the same model, but its full-attention layers attend only to the
best-scored tokens, selected per layer and shared by all heads, and to everything newer than that
prefix.
(*Vegas: self-speculative decoding with verification-guided sparse attention*, §3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from specattn.decoding.drafting.budget import Budgeted
from specattn.decoding.drafting.gains import Effort
from specattn.decoding.drafting.sparse_chain import GuidedDrafter, PrefixSelection, rows_at
from specattn.decoding.engine.contract import DraftContext, Verified
from specattn.decoding.passes.attention import CaptureSpec, Choice, Selection
from specattn.distributed.tensor import TensorParallel

Rows = Literal["two", "all", "last"]
Ranking = Literal["logit", "weight"]


@dataclass(frozen=True)
class Vegas(Budgeted, name="vegas"):
    """Self-speculation with verification-guided sparse attention.

    Sliding-window layers keep their window while drafting; where all layers slide, decoding is
    plain. Rejected drafts guide the selection just like accepted ones (§3.2).

    Parameters
    ----------
    gamma, ratio, budget, min_tokens, rejection, weights
        As for `Budgeted`, at most 6 tokens; what counts is the prefix of the last verification.
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
    per_head : bool
        Whether each KV head has tokens of its own, ranked by its own query heads, as many as are
        else shared by all. Keeps as many times the scores as there are KV heads.
    mean_over_ranks : bool
        Where a model's heads are divided over ranks (docs/distributed.md): whether tokens are
        ranked by the scores of all heads, which are exchanged. Otherwise each rank selects for its
        own, as the authors' program does.
    switch : bool
        Whether a given `gamma` is drafted only in rounds in which that pays. It changes no text,
        but for drafts that are sampled by themselves (`rejection`).

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    most_gamma: ClassVar[int] = 6

    keep_first: int = 0
    keep_last: int = 0
    rows: Rows = "two"
    ranking: Ranking = "logit"
    per_head: bool = False
    mean_over_ranks: bool = True
    switch: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0, "keep_first", "keep_last")
        for name, known in (("rows", get_args(Rows)), ("ranking", get_args(Ranking))):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")

    @property
    def efforts(self) -> list[Effort]:
        """The drafts that are chosen from, none apart."""
        given = self.gamma is not None and self.switch
        return [Effort(1, self.max_gamma)] if given else super().efforts

    def start(self, context: DraftContext) -> VegasDrafter:
        """Return a drafter; its first round drafts nothing, because no scores exist yet."""
        return VegasDrafter(self, context)


class VegasDrafter(GuidedDrafter):
    """Selects by the scores of the last verification.

    Parameters
    ----------
    method : Vegas
    context : DraftContext
    deepest : int
        Levels of the deepest tree that another drafter may have verified then.
    """

    def __init__(self, method: Vegas, context: DraftContext, deepest: int = 0):
        # At first the last root and path are newer than the prefix.
        newer = method.max_gamma + max(method.max_gamma, deepest)
        self.method = method
        super().__init__(method, newer, context)

    def select(self, verified: Verified) -> None:
        """Select by the scores of a verification, if it was asked for them."""
        scores, selection = verified.result.scores, verified.result.selection
        if selection is not None:
            self.selected = PrefixSelection(selection, verified.prefix, followed=True)
            return
        if scores is None:
            self.selected = None  # what was selected before is no longer all but the newest
            return
        if self.method.rows == "last":
            scores = rows_at(scores, verified.accepted.last)
        if (divided := self._exchanged()) is not None:
            scores = divided.mean(scores)
        layers, batch, *each = scores.shape  # KV heads, if each has its own, and tokens
        indices, lengths = self.target.cache.select_topk(
            scores.reshape(layers * batch, *each),
            verified.prefix.repeat(layers),
            **self._share(),
        )
        selection = Selection(indices.unflatten(0, (layers, batch)), lengths[:batch])
        self.selected = PrefixSelection(selection, verified.prefix)

    def tokens_read(self, length: int) -> float:
        """Return how many tokens of a text of `length` a draft step reads."""
        method = self.method
        return method.budget or max(method.ratio * length, min(length, method.min_tokens))

    def captured(self, rows: int) -> CaptureSpec:
        """Return what ranks the prefix, of a verification of so many rows."""
        captured = (0, -1) if self.method.rows == "two" else tuple(range(rows))
        per_row = self.method.rows == "last"
        choice: Choice | None = Choice(tuple(self._share().items()), self.newer)
        if per_row or self._exchanged() is not None:
            choice = None  # of scores that the pass has not
        method = self.method
        return CaptureSpec(captured, method.ranking, per_row, method.per_head, choice=choice)

    def _share(self) -> dict[str, Any]:
        """Return what to select, as `select_topk` takes it."""
        method = self.method
        kept = {"keep_first": method.keep_first, "keep_last": method.keep_last}
        return method.share() | kept

    def _exchanged(self) -> TensorParallel | None:
        """Return the ranks whose heads' scores are averaged, if they are."""
        method = self.method
        own = method.per_head or not method.mean_over_ranks
        return None if own else self.target.divided_heads
