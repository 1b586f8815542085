"""The cache of a model of which some layers keep keys and values, others a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from specattn.kv_cache import KVCache
from specattn.states import States, StateShape


class HybridCache(KVCache):
    """Keys and values of the layers that have them, states of the others, under one commit.

    Arguments as for `KVCache`, but that `keeps_state` says of every layer whether it has a state,
    of which `shape` says how large it is.
    """

    states: States

    def __init__(
        self,
        keeps_state: Sequence[bool],
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        shape: StateShape,
        **options: Any,
    ):
        self._keeps_state = list(keeps_state)
        attending = self._keeps_state.count(False)
        super().__init__(attending, batch, capacity, kv_heads, head_dim, **options)
        layers, device = len(self._keeps_state) - attending, self.storage.device
        self.states = States(layers, batch, shape, dtype=self.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes that keys, values and states take, and what a verification leaves."""
        return super().nbytes + self.states.nbytes

    def clear(self) -> None:
        """Hold no token, of as many requests as at first."""
        super().clear()
        self.states.resize(self.batch_size)
        self.states.clear()

    def place(self, layer: int) -> int:
        """Return which of its kind a layer is: with keys, or with a state."""
        layer %= len(self._keeps_state)
        return self._keeps_state[:layer].count(self._keeps_state[layer])

    def commit(
        self,
        nodes: torch.Tensor,
        counts: torch.Tensor,
        *,
        in_place: bool = False,
        on_host: Sequence[int] | None = None,
    ) -> None:
        """Keep the root and the accepted nodes of a verified tree, as `KVCache.commit` does."""
        path = None if in_place else pad(nodes, (1, 0))
        self.states.commit(path, counts + 1)
        super().commit(nodes, counts, in_place=in_place, on_host=on_host)

    def retire(self, finished: Sequence[bool]) -> list[int]:
        """Drop the finished requests, as `KVCache.retire` does."""
        rows = super().retire(finished)
        self.states.keep(rows)
        return rows
