"""Quest as a drafter: at every step and in every layer, the pages with the largest bounds.

What: whole pages of `page_size` tokens, for each KV head. A page keeps, per channel, the smallest
and the largest value of its keys; no key of it can have a larger product with q than
``sum_d max(q_d * min_d, q_d * max_d)``. The pages with the largest bounds are selected, and
whatever lies behind the last whole page. When: at every draft step, in every full-attention layer,
with that step's own query. (Tang et al., *Quest: query-aware sparsity for efficient long-context
LLM inference*, 2024; as a drafter in MagicDec, Sadhukhan et al. 2025.)

The heads of a group share their keys, so they share pages: their bounds are averaged. Quest itself
leaves its first two layers whole; here every layer is sparse, as in all other methods.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import torch

from specattn.decoding.drafting.budget import Budgeted
from specattn.decoding.drafting.sparse_chain import PrefixSelection, SparseDrafter, tokens_of
from specattn.decoding.engine.contract import DraftContext, Drafter
from specattn.decoding.engine.target import Target
from specattn.decoding.passes.attention import CapturableSelector
from specattn.decoding.text.draws import uploaded
from specattn.ops import importance_scores, select_topk


@dataclass(frozen=True)
class Quest(Budgeted, name="quest"):
    """MagicDec's self-speculation on the pages that each draft step asks for.

    Beside the cache it keeps two values per page, KV head and channel in each full-attention layer:
    ``1 / page_size`` of the cache's size.

    Parameters
    ----------
    gamma, ratio, budget, min_tokens, rejection, weights
        As for `Budgeted`, rounded up to pages.
    page_size : int

    Raises
    ------
    ValueError
        A parameter is out of range. When a run starts: heads of more than 128 channels.
    """

    page_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(1, "page_size")

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter for one run."""
        return _QuestDrafter(self, context)


class _QuestDrafter(SparseDrafter):
    def __init__(self, method: Quest, context: DraftContext):
        super().__init__(method, context)
        self.method = method
        self.bounds = PageBounds(context.target, method.page_size)
        self.read: list[int] | None = None  # tokens of every text

    def selectors(self, count: int) -> list[Pages]:
        lengths = self.sequences.lengths
        if self.read is None:
            self.bounds.read_all()
        else:
            self.bounds.catch_up(max(map(operator.sub, lengths, self.read)))
        self.read = lengths
        seqlens, read = self.bounds.cache.seqlens, self.bounds.counts
        moving = [read | {"visible": seqlens + step} for step in range(count)]
        return [Pages(self.method, self.bounds, one) for one in moving]

    def compact(self, rows: list[int]) -> None:
        self.bounds.compact(rows)


class PageBounds:
    """The largest and smallest keys of every whole page, channel by channel.

    `values` [full layers, B, pages, Hk, 2 * D] are the largest, then the smallest; pages that are
    not whole yet have no meaningful entry.
    """

    def __init__(self, target: Target, page_size: int):
        self.cache, self.page_size = target.cache, page_size
        self.layers = target.full_layers
        self.pages = self.cache.width // page_size
        batch, _, heads = self.cache.storage.shape[2:5]
        channels = self.cache.head_dim
        if channels > 128:
            raise ValueError(f"quest needs heads of at most 128 channels, got {channels}")
        shape = (len(self.layers), batch, max(self.pages, 1), heads, 2 * channels)
        self.values = self.cache.storage.new_empty(shape, dtype=self.cache.dtype)
        places = [self.cache.place(layer) for layer in self.layers]
        self.places = uploaded(places, self.values.device, dtype=torch.int64)

    @property
    def counts(self) -> dict[str, torch.Tensor]:
        """Whole pages of every request, int32 [B], and those that this rank's cache holds."""
        whole = self.cache.seqlens // self.page_size
        held = self.cache.held(whole * self.page_size) // self.page_size
        return {"whole": whole, "held": held}

    def read_all(self) -> None:
        """Read every page of the cache, one layer after the other."""
        for number, layer in enumerate(self.layers):
            rows = self.cache.storage[self.cache.place(layer), 0, :, : self.pages * self.page_size]
            keys = self.cache.numbers(rows).unflatten(1, (self.pages, self.page_size))
            self.values[number, :, : self.pages] = _bounds(keys, 2)

    def catch_up(self, newest: int) -> None:
        """Read the pages that became whole when at most the `newest` last tokens came.

        A fixed number of pages, so nothing waits for the device; most were read before.
        """
        if not self.pages:
            return
        count = -(-newest // self.page_size)
        device = self.values.device
        held = self.counts["held"]
        pages = (held[:, None] - count + torch.arange(count, device=device)).clamp(min=0)
        tokens = pages[..., None] * self.page_size + torch.arange(self.page_size, device=device)
        layers = self.places[:, None, None, None]
        requests = torch.arange(len(pages), device=device)[:, None]
        keys = self.cache.numbers(self.cache.storage[layers, 0, requests[..., None], tokens])
        self.values[:, requests, pages] = _bounds(keys, 3)

    def compact(self, rows: list[int]) -> None:
        """Drop all rows of the batch but these."""
        self.values = self.values[:, rows]


@dataclass(frozen=True)
class Pages(CapturableSelector):
    """The KV selector of one draft step by its query.

    `moving`, int32 [B] each, are the tokens that are ``visible``, drafted ones included, the
    ``whole`` pages of the committed ones, and those ``held`` by this rank.
    """

    method: Quest
    bounds: PageBounds
    moving: Mapping[str, torch.Tensor]

    @property
    def key(self) -> Hashable:
        """The method, and where the bounds of pages lie."""
        values = self.bounds.values
        return self.method, values.data_ptr(), values.shape

    def reading(self, moving: Mapping[str, torch.Tensor]) -> Pages:
        """Return the same selector of other `moving` tensors."""
        return replace(self, moving=moving)

    def select(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of the pages with the largest bounds, and all behind the whole pages.

        A bound is the product of ``(max(q, 0), min(q, 0))`` with the page's (largest, smallest)
        keys, so ranking pages is ranking cached keys of twice the width.
        """
        size, whole, cache = self.method.page_size, self.moving["whole"], self.bounds.cache
        parts = torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)
        pages = self.bounds.values[layer]
        scores = importance_scores(parts, pages, self.moving["held"], softmax_scale=1.0)
        scores = cache.gathered(scores, size)
        selected = PrefixSelection(
            tokens_of(*select_topk(scores, whole, **self.method.share(size)), size), whole * size
        )
        behind = size - 1 + self.method.max_gamma
        (chosen,) = selected.steps(self.moving["visible"], 1, behind)
        return chosen.indices, chosen.lengths


def _bounds(keys: torch.Tensor, dim: int) -> torch.Tensor:
    """Return largest and smallest keys over the tokens of pages."""
    return torch.cat([keys.amax(dim), keys.amin(dim)], -1)
