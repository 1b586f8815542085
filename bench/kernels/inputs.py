"""Seeded random tensors for a case: queries, ragged caches, trees.

What lies in a cache beyond the used length is NaN, as the contract allows.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from specattn.ops.cost import Sizes

from .cases import DTYPES, Case, Layer

CACHE_SLACK = 64  # unused, NaN-filled tail of every cache


class Draw:
    """Seeded random tensors of one case, and the sizes every builder needs."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.random = random.Random(seed)
        self.dtype = DTYPES[case.dtype]
        shape = case.shape
        self.sizes = Sizes(
            B=case.batch,
            T=case.rows,
            Hq=shape.q_heads,
            Hk=shape.kv_heads,
            D=shape.head_dim,
            e=self.dtype.itemsize,
        )

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return standard normal values, in the case's type unless another is named."""
        return torch.randn(size, generator=self.generator, device=self.device).to(
            dtype or self.dtype
        )

    def queries(self) -> torch.Tensor:
        """Return queries twice as large as keys: a few keys then weigh much, so errors show."""
        s = self.sizes
        return 2 * self.normal(s.B, s.T, s.Hq, s.D)

    def keys(self, length: int) -> torch.Tensor:
        """Return keys or values [B, length, Hk, D]."""
        return self.normal(self.sizes.B, length, self.sizes.Hk, self.sizes.D)

    def states(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs and log-sum-exps of so many attentions."""
        s = self.sizes
        outs = self.normal(count, s.B, s.T, s.Hq, s.D)
        return outs, self.normal(count, s.B, s.T, s.Hq, dtype=torch.float32)

    def cache(self, used: int) -> torch.Tensor:
        """Return a cache [B, N, Hk, D] whose first ``used`` tokens are drawn, the rest NaN."""
        cache = self.keys(capacity(used, self.case.page_size))
        cache[:, used:] = math.nan
        return cache

    def weights(self, layer: Layer) -> list[torch.Tensor]:
        """Return the weights of a layer, one or two matrices [outputs, depth]."""
        return [self.normal(layer.outputs, layer.depth) for _ in range(layer.products)]

    def lengths(self, value: int) -> torch.Tensor:
        """Return the same length for every request."""
        return torch.full((self.sizes.B,), value, dtype=torch.int32, device=self.device)

    def tree(self) -> torch.Tensor | None:
        """Return a random tree's bool mask [T, T]; None for a single row and for a chain."""
        rows = self.sizes.T
        if rows == 1 or self.case.variant == "chain":
            return None
        mask = torch.eye(rows, dtype=torch.bool)
        for node in range(1, rows):
            mask[node] |= mask[self.random.randrange(max(0, node - 4), node)]
        return mask.to(self.device)


def capacity(used: int, page_size: int = 0) -> int:
    """Return N for ``used`` tokens: some slack, and whole pages."""
    page_size = page_size or 16
    return math.ceil((used + CACHE_SLACK) / page_size) * page_size


@dataclass(frozen=True)
class Prefix:
    """A cache of L tokens with the T tree keys behind them, and how to address it."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    lengths: torch.Tensor
    k_tree: torch.Tensor
    v_tree: torch.Tensor
    block_table: torch.Tensor | None
    sizes: Sizes

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What the primitives take behind the queries."""
        return self.k_cache, self.v_cache, self.lengths, self.k_tree, self.v_tree

    def keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [B, L + T, Hk, D] for a peer: a view, or a copy when paged."""
        return tuple(self._linear(cache) for cache in (self.k_cache, self.v_cache))

    def _linear(self, cache: torch.Tensor) -> torch.Tensor:
        used = self.sizes.L + self.sizes.T
        if self.block_table is None:
            return cache[:, :used]
        pages = self.block_table[:, : math.ceil(used / cache.shape[1])].long()
        return cache[pages].flatten(1, 2)[:, :used]


def prefix(case: Case, draw: Draw) -> Prefix:
    """Draw a cache of ``case.context`` tokens and a tree part; pages lie in random order."""
    used = case.context + case.rows
    k_cache, v_cache = draw.cache(used), draw.cache(used)
    # The tree's keys lie in the cache as well: peers need prefix and tree in one tensor.
    k_tree = k_cache[:, case.context : used].clone()
    v_tree = v_cache[:, case.context : used].clone()
    sizes = replace(draw.sizes, L=case.context, N=k_cache.shape[1], indices=case.batch)
    table = None
    if case.page_size:
        pages = sizes.N // case.page_size
        order = torch.randperm(case.batch * pages, generator=draw.generator, device=draw.device)
        table = order.view(case.batch, pages).to(torch.int32)
        k_cache, v_cache = (
            _scattered(cache.unflatten(1, (pages, -1)).flatten(0, 1), order)
            for cache in (k_cache, v_cache)
        )
        sizes = replace(sizes, indices=case.batch * (1 + math.ceil(case.context / case.page_size)))
    return Prefix(k_cache, v_cache, draw.lengths(case.context), k_tree, v_tree, table, sizes)


def _scattered(pages: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the pages such that logical page i lies at place ``order[i]``."""
    scattered = torch.empty_like(pages)
    scattered[order] = pages
    return scattered
