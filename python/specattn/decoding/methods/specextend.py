"""SpecExtend, drafting for itself: the chunks that the last accepted token attended to.

What: chunks of `chunk_size` tokens with the largest mean attention weight of one row, the last
accepted token's, averaged over the heads, in every full-attention layer by itself; and everything
behind the last whole chunk. When: once per round, after its verification; all draft steps of the
next round read the same. (Cha et al., *SpecExtend*, 2025, guides a small drafter by the target's
last layer; layer by layer at the target itself is how section 5.1 of the Vegas paper compares it.)

Which row will be the last accepted one is known only after the pass, so the weights of every row
are collected and kept until then: `gamma + 1` times the memory of Vegas' scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specattn.decoding.drafting.budget import Budgeted
from specattn.decoding.drafting.sparse_chain import (
    GuidedDrafter,
    PrefixSelection,
    chunk_means,
    rows_at,
    tokens_of,
)
from specattn.decoding.engine.contract import DraftContext, Drafter, Verified
from specattn.decoding.passes.attention import CaptureSpec
from specattn.ops import select_topk


@dataclass(frozen=True)
class SpecExtend(Budgeted, name="specextend"):
    """Self-speculation on the chunks that mattered to the last accepted token.

    Parameters
    ----------
    gamma, ratio, budget, min_tokens, rejection, weights
        As for `Budgeted`, rounded up to chunks.
    chunk_size : int

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    chunk_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(1, "chunk_size")

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter; its first round drafts nothing, because no scores exist yet."""
        return _SpecExtendDrafter(self, context)


class _SpecExtendDrafter(GuidedDrafter):
    def __init__(self, method: SpecExtend, context: DraftContext):
        # Newer than the last whole chunk: less than a chunk, a round's tokens, the next draft.
        newer = method.chunk_size + 2 * method.max_gamma
        super().__init__(method, newer, context)
        self.method = method

    def captured(self, rows: int) -> CaptureSpec:
        return CaptureSpec(tuple(range(rows)), ranking="weight", per_row=True)

    def select(self, verified: Verified) -> None:
        weights = verified.result.scores
        if weights is not None:
            last = self.target.cache.gathered(rows_at(weights, verified.accepted.counts))
            self.selected = select_chunks(self.method, last, verified.prefix)


def select_chunks(
    method: SpecExtend, weights: torch.Tensor, prefix: torch.Tensor
) -> PrefixSelection:
    """Select chunks among the first `prefix` [B] tokens by their `weights` [layers, B, N]."""
    size, (layers, batch, _) = method.chunk_size, weights.shape
    chunks = prefix // size
    best, counts = select_topk(
        chunk_means(weights, size).flatten(0, 1), chunks.repeat(layers), **method.share(size)
    )
    selection = tokens_of(best.unflatten(0, (layers, batch)), counts[:batch], size)
    return PrefixSelection(selection, chunks * size)
