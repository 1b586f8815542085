"""The cached tokens that the last pass scored highest, by layer, for Vegas' drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specattn.ops import select_topk

from .attention import Batch, Cache, SpecattnAttention, verify

ROWS = (0, -1)
"""Rows of a request that rank its tokens: the first and the last (arXiv 2602.07223, 3.3)."""


class Selected(NamedTuple):
    """Selected cached tokens, int32 [layers, B, K]; the first `counts`, int32 [B], count."""

    indices: torch.Tensor
    counts: torch.Tensor
    batch: Batch


class Selections:
    """Collects scores in the target's own passes while it is `wanted`.

    Of `layers`, those that attend to the whole text, it selects `ratio` of a request's tokens, at
    least `min_tokens`. `batch` is the last pass.
    """

    def __init__(self, layers: list[SpecattnAttention], *, ratio: float, min_tokens: int):
        self.layers = layers
        self.ratio, self.min_tokens = ratio, min_tokens
        self.wanted = False
        self.batch: Batch | None = None
        self._of_layer: dict[SpecattnAttention, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scores: torch.Tensor | None = None
        self._collected_in: Batch | None = None
        for layer in layers:
            layer.selections = self

    def wants(self, batch: Batch) -> bool:
        """Set the last pass, and return whether it collects."""
        self.batch = batch
        return self.wanted

    def attend(self, layer: SpecattnAttention, q, cache: Cache, batch: Batch, out) -> None:
        """Attend as the layer does, and select; all tensors as `attention.attend` takes them."""
        requests = batch.requests
        if self._scores is None or len(self._scores) < requests:
            capacity = batch.block_table.shape[1] * cache.k.shape[1]
            self._scores = q.new_empty(requests, capacity, dtype=torch.float32)
        scores = self._scores[:requests]
        verify(layer, q, cache, batch, out, ROWS, scores)
        self._of_layer[layer] = select_topk(
            scores, batch.cache_seqlens, ratio=self.ratio, min_tokens=self.min_tokens
        )
        self._collected_in = batch

    def last(self) -> Selected | None:
        """Return the selection of the last pass, None where it did not collect."""
        if self.batch is None or self._collected_in is not self.batch:
            return None
        selected = [self._of_layer[layer] for layer in self.layers]
        return Selected(
            torch.stack([indices for indices, _ in selected]), selected[0][1], self.batch
        )
