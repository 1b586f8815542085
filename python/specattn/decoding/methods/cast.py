"""Cast: the target drafts for itself with its weights rounded to 4 bits.

Where a pass takes what reading the weights takes, rounded ones take a share of it, and the next
tokens are mostly the same. A draft reads the target's own keys and values; what it writes behind
them, verification writes over. (Georganas et al., *ML-SpecQD: multi-level speculative decoding with
quantized drafts*, 2025, without its further levels; the rounding is that of `quantise`.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from specattn.decoding.drafting.budget import SelfDrafting
from specattn.decoding.drafting.sparse_chain import SparseDrafter
from specattn.decoding.engine.contract import DraftContext, Drafter


@dataclass(frozen=True)
class Cast(SelfDrafting, name="cast"):
    """Self-speculation with rounded weights, attending to everything.

    Parameters
    ----------
    gamma, rejection, weights
        As for `SelfDrafting`, at most 5 tokens.

    Raises
    ------
    ValueError
        As for `SelfDrafting`.
    """

    most_gamma: ClassVar[int] = 5

    weights: Literal["int8", "int4", "fp8"] = field(default="int4", kw_only=True)

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter for one run."""
        return _CastDrafter(self, context)


class _CastDrafter(SparseDrafter):
    def selectors(self, count: int) -> list[None]:
        return [None] * count
