"""A prefill chunk whose rows are divided over ranks: each computes the linear layers of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.functional import pad

from specattn.decoding.passes.attention import Pass
from specattn.decoding.passes.cached_model import CachedModel
from specattn.distributed.context import ContextCache
from specattn.kv_cache import NewHeads


@dataclass
class SplitPass(Pass):
    """A causal chain of which this rank runs `share` rows from `first` on.

    Those at or beyond `rows` fill up the shares, and mean nothing.
    """

    first: int = 0
    share: int = 0

    @property
    def positions(self) -> torch.Tensor:
        """Of this rank's rows, int64 [B, share]."""
        own = torch.arange(self.first, self.first + self.share, device=self.prefix.device)
        return self.prefix[:, None] + own

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Store the new keys and values of all ranks' rows, and attend from this rank's."""
        options["window"] = self.windows[layer]
        cache = cast(ContextCache, self.cache)
        return cache.attend_split(NewHeads(layer, q, k, v, self), self.first, **options)


def split_features(
    target: CachedModel, tokens: torch.Tensor, max_seqlen: int, wanted: bool
) -> torch.Tensor:
    """Run a chunk [B, rows] behind what is cached; return its features if they are wanted."""
    cache = cast(ContextCache, target.cache)
    ranks, rows = cache.ranks, tokens.shape[1]
    share = -(-rows // ranks.size)
    first = ranks.rank * share
    behind = cache.seqlens, max_seqlen
    plan = SplitPass(cache, target.windows, rows, *behind, first=first, share=share)
    own = pad(tokens, (0, share * ranks.size - rows))[:, first : first + share]
    features = target.runner.features(plan, own)
    if not wanted:
        return features
    (parts,) = ranks.gather("features", features)
    return parts.movedim(0, 1).flatten(1, 2)[:, :rows]
