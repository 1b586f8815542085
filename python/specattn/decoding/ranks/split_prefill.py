"""A prefill chunk whose rows are divided over ranks: each computes the linear layers of its own."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Ragged rows of which this rank runs `share` from `first` on.

    What lies behind them fills up the shares, and means nothing.
    """

    first: int = 0
    share: int = 0

    @property
    def positions(self) -> torch.Tensor:
        """Of this rank's rows, int64 [1, share]."""
        own = self.slots[1][self.first :][: self.share]
        return pad(own, (0, self.share - len(own)))[None]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Store the new keys and values of all ranks' rows, and attend from this rank's."""
        options |= {"cu_seqlens_q": self.cu_seqlens, "max_seqlen_q": self.rows}
        cache, new = cast(ContextCache, self.cache), NewHeads(layer, q[0], k[0], v[0], self)
        return cache.attend_split(new, self.first, window=self.windows[layer], **options)[None]


def split_features(
    target: CachedModel, tokens: torch.Tensor, counts: Sequence[int], start: int, wanted: bool
) -> Sequence[torch.Tensor]:
    """Do what `CachedModel.prefill_chunk` does; features that nobody wants stay where they are."""
    cache, total = cast(ContextCache, target.cache), len(tokens)
    ranks, rows = cache.ranks, max(counts)
    share = -(-total // ranks.size)
    first = ranks.rank * share
    behind = (rows, cache.seqlens, start + rows)
    own_rows: Any = {"counts": counts, "first": first, "share": share}
    own_rows["feature_layers"] = target.feature_layers
    plan = SplitPass(cache, target.windows, *behind, **own_rows)
    own = pad(tokens, (0, share * ranks.size - total))[first : first + share]
    features = target.runner.features(plan, own[None])[0]
    if not wanted:
        return ()
    (parts,) = ranks.gather("features", features)
    return parts.flatten(0, 1)[:total].split(list(counts))
