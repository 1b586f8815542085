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

from specattn.decoding.budget import Budgeted
from specattn.decoding.loop import Draft, Drafter, Verified
from specattn.decoding.sampling import TargetLaw
from specattn.decoding.sparse_chain import Chosen, SparseChain, chunk_means, tokens_of
from specattn.decoding.target import Selection, Target, Wanted
from specattn.ops import select_topk


@dataclass(frozen=True)
class SpecExtend(Budgeted):
    """Self-speculation on the chunks that mattered to the last accepted token.

    Parameters
    ----------
    gamma, ratio, budget, min_tokens
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
        self._check_positive("chunk_size")

    def start(self, target: Target, law: TargetLaw, generator: torch.Generator | None) -> Drafter:
        """Return a drafter; its first round drafts nothing, for want of a selection."""
        return _SpecExtendDrafter(self, target, law, generator)


class _SpecExtendDrafter(Drafter):
    def __init__(
        self,
        method: SpecExtend,
        target: Target,
        law: TargetLaw,
        generator: torch.Generator | None,
    ):
        self.method, self.target = method, target
        self.chain = SparseChain(method.gamma, target, law, generator)
        self.chosen: Chosen | None = None

    def propose(self, root: torch.Tensor) -> Draft:
        gamma, readings = self.method.gamma, list[Selection]()
        if self.chosen is not None:
            # Newer than the last whole chunk: less than a chunk, a round's tokens, the next draft.
            newer = self.method.chunk_size + 2 * gamma
            readings = self.chosen.readings(self.target.cache.seqlens, gamma, newer)
        draft = self.chain.draft(root, readings)
        self.wanted = Wanted(rows=tuple(range(draft.tree.size)), ranking="weight", each=True)
        return draft

    def observe(self, verified: Verified) -> None:
        scores, counts = verified.result.scores, verified.accepted.counts
        assert scores is not None, "they are wanted"
        if not len(scores):
            return
        # Row 0 is the root, so row n is the n-th drafted token.
        last = scores[:, torch.arange(len(counts), device=counts.device), counts]
        self.chosen = choose(self.method, last, verified.prefix)

    def keep(self, rows: list[int]) -> None:
        if self.chosen is not None:
            self.chosen = self.chosen.keep(rows)


def choose(method: SpecExtend, weights: torch.Tensor, prefix: torch.Tensor) -> Chosen:
    """Choose chunks among the first `prefix` [B] tokens by their `weights` [layers, B, N]."""
    size, (layers, batch, _) = method.chunk_size, weights.shape
    chunks = prefix // size
    best, counts = select_topk(
        chunk_means(weights, size).flatten(0, 1), chunks.repeat(layers), **method.share(size)
    )
    tokens, lengths = tokens_of(best.unflatten(0, (layers, batch)), counts[:batch], size)
    return Chosen(Selection(tokens, lengths), chunks * size)
