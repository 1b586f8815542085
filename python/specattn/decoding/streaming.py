"""StreamingLLM as a drafter: the target reads the first tokens and the last ones.

What: the first `sinks` tokens and the most recent ones, the same in every layer and head. When: the
rule is fixed, so the window is as recent as the text in every round, the first one included, and
choosing costs nothing. (Xiao et al., *Efficient streaming language models with attention sinks*,
2024; as a drafter in MagicDec, Sadhukhan et al. 2025.)

Keys are read where they lie, rotated to their places in the whole text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specattn.decoding.budget import Budgeted
from specattn.decoding.loop import Draft, Drafter
from specattn.decoding.sampling import TargetLaw
from specattn.decoding.sparse_chain import SparseChain
from specattn.decoding.target import Selection, Target
from specattn.reference.select_topk import selection_size, tokens_in_ratio


@dataclass(frozen=True)
class Streaming(Budgeted):
    """MagicDec's self-speculation on sinks and a window of recent tokens.

    Parameters
    ----------
    gamma, ratio, budget, min_tokens
        As for `Budgeted`; sinks are within the budget.
    sinks : int
        First tokens that are always read.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0:
            raise ValueError(f"sinks must not be negative, got {self.sinks}")

    def start(self, target: Target, law: TargetLaw, generator: torch.Generator | None) -> Drafter:
        """Return a drafter for one run."""
        return _StreamingDrafter(self, target, law, generator)

    def readings(self, seqlens: torch.Tensor, capacity: int, layers: int) -> list[Selection]:
        """Return what the `gamma` draft steps behind `seqlens` [B] cached tokens read."""
        share = {"ratio": None, "budget": None, "min_tokens": 0, **self.share()}
        width = selection_size(capacity, **share, kept=self.sinks)
        counts = torch.full_like(seqlens, width)
        if share["ratio"] is not None:
            least = max(share["min_tokens"], self.sinks)
            counts = tokens_in_ratio(seqlens, share["ratio"]).clamp(min=least)
        counts = torch.minimum(counts, seqlens)
        column = torch.arange(width + self.gamma, dtype=torch.int32, device=seqlens.device)
        # The window's tokens, and then the drafted ones, lie in a row.
        recent = (seqlens - counts)[:, None] + column
        table = torch.where(column < self.sinks, column, recent).expand(layers, -1, -1)
        return [Selection(table, counts).longer(step) for step in range(self.gamma)]


class _StreamingDrafter(Drafter):
    def __init__(
        self,
        method: Streaming,
        target: Target,
        law: TargetLaw,
        generator: torch.Generator | None,
    ):
        self.method, self.target = method, target
        self.chain = SparseChain(method.gamma, target, law, generator)

    def propose(self, root: torch.Tensor) -> Draft:
        cache, layers = self.target.cache, self.target.full_layers
        if not layers:
            return self.chain.draft(root, [])
        return self.chain.draft(root, self.method.readings(cache.seqlens, cache.capacity, layers))
