"""Global top-k over a sharded cache, and the part of a selection that this rank holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from specattn.distributed.group import ContextParallel
from specattn.distributed.sharding import Sharding
from specattn.ops import select_topk
from specattn.reference.select_topk import selection_size, tokens_in_ratio


def best_of_all(
    ranks: ContextParallel,
    sharding: Sharding,
    capacity: int,
    scores: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    ratio: float | None = None,
    budget: int | None = None,
    min_tokens: int = 0,
    keep_first: int = 0,
    keep_last: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the best tokens of whole texts, each rank having scored its own.

    `scores` are [n, slots of a rank], `seqlens` int32 [n] and `capacity` count tokens of whole
    texts; options and result, indices int32 [n, K] and index_lengths int32 [n], are those of
    `specattn.select_topk`, as if one rank had all scores.

    Of k tokens that are wanted, every rank sends the score of its own ``ceil(k / ranks)``-th best.
    No fewer than k tokens reach the smallest of these, so those that do not are not among the best
    k; the others, about k in all, are exchanged with their positions.
    """
    kept = keep_first + keep_last
    wanted = tokens_in_ratio(seqlens, ratio) if budget is None else torch.full_like(seqlens, budget)
    wanted = torch.minimum(wanted.clamp(min=max(min_tokens, kept)), seqlens)
    most = min(selection_size(capacity, ratio, budget, min_tokens, kept), scores.shape[-1])
    slots, counts = select_topk(scores, sharding.held(seqlens), budget=max(most, 1))
    nothing = torch.arange(slots.shape[-1], device=slots.device) >= counts[:, None]
    values = scores.gather(-1, slots.clamp_min(0).long())
    values = values.masked_fill(nothing | values.isnan(), -torch.inf)

    nth = (wanted + ranks.size - 1) // ranks.size
    ranked = values.sort(-1, descending=True).values
    least = ranked.gather(-1, (nth - 1).clamp(0, ranked.shape[-1] - 1).long()[:, None])
    least = least.masked_fill((nth > counts)[:, None], -torch.inf)
    least = ranks.reduce("selection", least, "min")
    offered = (values >= least) & ~nothing
    width = int(ranks.reduce("selection", offered.sum(-1).amax()[None], "max"))

    order = (~offered).to(torch.int8).argsort(dim=-1, stable=True)[:, : max(width, 1)]
    positions = sharding.positions(slots).masked_fill(~offered, capacity)
    found = ranks.gather("selection", positions.gather(-1, order), values.gather(-1, order))
    positions, values = (x.movedim(0, 1).flatten(1) for x in found)
    known = scores.new_full((len(scores), capacity + 1), -torch.inf)  # the last entry is never read
    known.scatter_(-1, positions.long(), values)
    share = {"min_tokens": min_tokens, "keep_first": keep_first, "keep_last": keep_last}
    return select_topk(
        known[:, :capacity].contiguous(), seqlens, ratio=ratio, budget=budget, **share
    )


class OwnShares:
    """A rank's slots of selected tokens, cached by layer: several passes may share a selection."""

    def __init__(self, sharding: Sharding):
        self.sharding = sharding
        self._tables: dict[int, _Table] = {}

    def of(
        self, layer: int, indices: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots and counts of the selected tokens that this rank holds, in their order.

        `indices`, int32 [B, W] or [B, Hk, W], and `lengths`, int32 [B] or [B, Hk], are as
        `specattn.sparse_gather_attention` takes them.
        """
        table = self._tables.get(layer)
        if table is None or not table.is_of(indices):
            table = self._tables[layer] = self._table(indices)
        last = (lengths - 1).clamp_min(0).long()[..., None]
        counts = table.before.gather(-1, last)[..., 0].masked_fill(lengths == 0, 0)
        return table.slots, counts

    def _table(self, indices: torch.Tensor) -> _Table:
        mine = self.sharding.is_mine(indices)
        before = mine.cumsum(-1, dtype=torch.int32)
        column = (before - 1).masked_fill(~mine, indices.shape[-1]).long()
        slots = torch.zeros_like(pad(indices, (0, 1)))  # others' go to the last column
        slots.scatter_(-1, column, self.sharding.slots(indices))
        return _Table(indices, indices._version, slots, before)


class _Table(NamedTuple):
    """The rank's share of one layer's selection."""

    indices: torch.Tensor  # kept, so that its memory stands for it
    version: int
    slots: torch.Tensor
    before: torch.Tensor  # how many of the first entries are the rank's

    def is_of(self, indices: torch.Tensor) -> bool:
        """Whether it was made of these indices, and they have not changed."""
        same = indices.data_ptr() == self.indices.data_ptr() and indices._version == self.version
        return same and indices.shape == self.indices.shape
