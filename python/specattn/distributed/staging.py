"""The new rows of a pass, kept beside a rank's share of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specattn.kv_cache import KVCache


class Staging:
    """Memory for new rows, stored as in the cache; arguments as for `KVCache`, but no capacity.

    Nodes of a tree stay in `nodes`, in all layers, until a commit says which are kept; rows of a
    chain only until their layer has attended. Both grow to the most rows of a pass.
    """

    def __init__(self, layers: int, batch: int, kv_heads: int, head_dim: int, **options: Any):
        self.nodes = KVCache(layers, batch, 1, kv_heads, head_dim, **options)
        self._chain = KVCache(1, batch, 1, kv_heads, head_dim, **options)

    def room(self, place: int, count: int, chain: bool) -> tuple[KVCache, int]:
        """Return where `count` rows of a layer go: a cache, and in which of its layers."""
        if chain:
            self._chain = _with_room(self._chain, count)
            return self._chain, 0
        self.nodes = _with_room(self.nodes, count)
        return self.nodes, place

    def retire(self, finished: Sequence[bool]) -> None:
        """Drop the finished requests, as `KVCache.retire` does."""
        self.nodes.retire(finished)
        self._chain.retire(finished)


def _with_room(cache: KVCache, count: int) -> KVCache:
    """Return a cache like this one with room for `count` rows: this one, if it has."""
    if count <= cache.capacity:
        return cache
    layers, _, batch, _, kv_heads, _ = cache.storage.shape
    size = layers, batch, 1 << (count - 1).bit_length(), kv_heads, cache.head_dim
    where: Any = {"dtype": cache.dtype, "device": cache.storage.device}
    return KVCache(*size, stored=cache.stored, **where)
