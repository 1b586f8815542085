"""`PartialCache`: the few cached tokens that a draft attends to, as a list of positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specattn.decoding.engine.target import Target
from specattn.decoding.passes.attention import Selection
from specattn.decoding.text.draws import uploaded
from specattn.ops import select_topk


class PartialCache:
    """At most `budget` positions per full-attention layer, request and KV head: |B| in the paper.

    The first `sinks` tokens, |S|, always stay. A selection takes the most important others, and
    lists them in descending order of importance; the tokens that come after it replace them from
    the end of the list. When those reach the sinks, it is time for a new selection. While a text is
    shorter than the budget all of it is listed. Keys and values stay where they are. (*TokenSwift*,
    arXiv 2502.18890, section 3.3.)

    Adding tokens costs the same however long the text is, and a selection, which reads all cached
    keys once, comes after every ``budget - sinks`` tokens.

    `indices`, int32 [full layers, B, Hk, budget], are the sinks in the order of the text, then
    positions in any order. Behind a text that is shorter every slot lists its own number, so the
    tokens to come are listed already.
    """

    def __init__(self, target: Target, budget: int, sinks: int, lengths: Sequence[int]):
        self.target, self.budget, self.sinks = target, budget, sinks
        self.layers = target.full_layers
        self.lengths = self._selected_at = list(lengths)
        self.whole = torch.arange(budget, dtype=torch.int32, device=target.device)
        heads = target.cache.storage.shape[-2]
        self.indices = self.whole.repeat(len(self.layers), len(self.lengths), heads, 1)
        self.ranked = max(self.lengths) < budget or not self.layers
        self.selections = 0

    def selection(self) -> Selection:
        """Return what a draft attends to now; meaningless unless `ranked`."""
        lengths = self.target.cache.seqlens.clamp(max=self.budget)
        return Selection(self.indices, lengths[:, None].repeat(1, self.indices.shape[2]))

    def has_room(self, count: int) -> bool:
        """Whether `count` more tokens of each request fit before all must be ranked anew."""
        return not self.layers or (
            self.ranked
            and all(
                now + count - then <= self._room(then)
                for now, then in zip(self.lengths, self._selected_at, strict=True)
            )
        )

    def add(self, lengths: Sequence[int]) -> None:
        """List the tokens that the cache has received: it now holds `lengths` of each request."""
        requests, slots, positions = list[int](), list[int](), list[int]()
        for request, (now, then) in enumerate(zip(self.lengths, self._selected_at, strict=True)):
            if then < self.budget:
                continue  # listed already
            added = range(now, lengths[request])
            requests += [request] * len(added)
            positions += added
            slots += [self.budget - 1 - (position - then) for position in added]
        at = [requests, slots, positions]
        request, slot, position = uploaded(at, self.indices.device, dtype=torch.int64)
        self.indices[:, request, :, slot] = position.to(torch.int32)[:, None, None]
        self.lengths = list(lengths)

    def select(self, queries: torch.Tensor, lengths: Sequence[int]) -> None:
        """Rank all `lengths` cached tokens of each request and list the most important.

        They are ranked by the queries [full layers, B, Hq, D] of the last accepted token, the mean
        over heads that share a KV head.
        """
        cache, longest = self.target.cache, max(lengths)
        seqlens = cache.seqlens.clamp(max=longest)  # a finished request may have gone further
        for place, layer in enumerate(self.layers):
            scores = cache.importance_scores(layer, queries[place][:, None], seqlens, longest)
            chosen, _ = select_topk(scores, seqlens, budget=self.budget, keep_first=self.sinks)
            importance = scores.gather(-1, chosen.clamp_min(0).long())
            importance.masked_fill_(chosen < 0, -torch.inf)
            importance[..., : self.sinks] = torch.inf
            order = importance.argsort(dim=-1, descending=True, stable=True)
            listed, own = chosen.gather(-1, order), self.whole[: chosen.shape[-1]]
            self.indices[place, ..., : len(own)] = torch.where(listed < 0, own, listed)
        self.lengths = self._selected_at = list(lengths)
        self.ranked = True
        self.selections += 1

    def compact(self, rows: list[int]) -> None:
        """Drop all rows of the batch but these, and keep them in this order."""
        self.indices = self.indices[:, rows]
        self.lengths = [self.lengths[row] for row in rows]
        self._selected_at = [self._selected_at[row] for row in rows]

    def _room(self, selected_at: int) -> int:
        """Return how many tokens can follow a selection among `selected_at` tokens."""
        if selected_at < self.budget:
            return self.budget - selected_at
        return self.budget - self.sinks
