"""StreamingLLM as a drafter: the target attends to the first tokens and the last ones.

What: the first `sinks` tokens and the most recent ones, the same in every layer and head. When: the
rule is fixed, so the window is as recent as the text in every round, the first one included, and
selecting costs nothing. (Xiao et al., *Efficient streaming language models with attention sinks*,
2024; as a drafter in MagicDec, Sadhukhan et al. 2025.)

Keys are read where they lie, rotated to their places in the whole text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specattn.decoding.drafting.budget import Budgeted
from specattn.decoding.drafting.sparse_chain import SparseDrafter
from specattn.decoding.engine.contract import DraftContext, Drafter
from specattn.decoding.passes.attention import Selection
from specattn.reference.select_topk import selection_size, tokens_in_ratio


@dataclass(frozen=True)
class Streaming(Budgeted, name="streaming"):
    """MagicDec's self-speculation on sinks and a window of recent tokens.

    Parameters
    ----------
    gamma, ratio, budget, min_tokens, rejection, weights
        As for `Budgeted`; sinks are within the budget.
    sinks : int
        First tokens that are always selected.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0, "sinks")

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter for one run."""
        return _StreamingDrafter(self, context)

    def steps(self, seqlens: torch.Tensor, capacity: int, layers: int) -> list[Selection]:
        """Return what the longest draft's steps behind `seqlens` [B] cached tokens attend to."""
        share = {"ratio": None, "budget": None, "min_tokens": 0, **self.share()}
        width = selection_size(capacity, **share, kept=self.sinks)
        counts = torch.full_like(seqlens, width)
        if share["ratio"] is not None:
            least = max(share["min_tokens"], self.sinks)
            counts = tokens_in_ratio(seqlens, share["ratio"]).clamp(min=least)
        counts = torch.minimum(counts, seqlens)
        column = torch.arange(width + self.max_gamma, dtype=torch.int32, device=seqlens.device)
        # The window's tokens, and then the drafted ones, lie in a row.
        recent = (seqlens - counts)[:, None] + column
        table = torch.where(column < self.sinks, column, recent).expand(layers, -1, -1)
        return [Selection(table, counts).extended(step) for step in range(self.max_gamma)]


class _StreamingDrafter(SparseDrafter):
    def __init__(self, method: Streaming, context: DraftContext):
        super().__init__(method, context)
        self.method = method

    def selectors(self, count: int) -> list[Selection]:
        cache, layers = self.target.cache, len(self.target.full_layers)
        return self.method.steps(cache.seqlens, cache.capacity, layers)[:count]
