"""Seeded random tensors for a case: queries, ragged caches, trees.

What lies in a cache beyond the used length is NaN, as the contract allows.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from specattn import Tree
from specattn.kv_cache import row_bytes
from specattn.ops.cost import Sizes

from .cases import DTYPES, EIGHT_BITS, Case, Layer

CACHE_SLACK = 64  # unused, NaN-filled tail of every cache
SCALE = 1 / 32  # of every row of 8 bits: so bfloat16 has the same numbers


class Draw:
    """Seeded random tensors of one case, and the sizes every builder needs."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        self.case, self.device, self.dtype = case, device, DTYPES[case.dtype]
        self.generator = torch.Generator(device).manual_seed(seed)
        self.random = random.Random(seed)
        heads = {"Hq": case.shape.q_heads, "Hk": case.shape.kv_heads, "D": case.shape.head_dim}
        self.sizes = Sizes(B=case.batch, T=case.rows, e=self.dtype.itemsize, **heads)

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return standard normal values, in the case's type unless another is named."""
        values = torch.randn(size, generator=self.generator, device=self.device)
        return values.to(dtype or self.dtype)

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
        """Return a cache [B, N, Hk, D] whose first ``used`` tokens are drawn, the rest NaN.

        One of 8 bits is of bytes, as `rows_of_8_bits` has them.
        """
        cache = self.keys(capacity(used, self.case.page_size))
        if self.case.variant in EIGHT_BITS:
            rows = rows_of_8_bits(cache, EIGHT_BITS[self.case.variant])
            rows[:, used:] = 0xFF
            return rows
        cache[:, used:] = math.nan
        return cache

    def weights(self, layer: Layer) -> list[torch.Tensor]:
        """Return the weights of a layer, one or two matrices [outputs, depth]."""
        return [self.normal(layer.outputs, layer.depth) for _ in range(layer.products)]

    def lengths(self, value: int) -> torch.Tensor:
        """Return the same length for every request."""
        return torch.full((self.sizes.B,), value, dtype=torch.int32, device=self.device)

    def gated_delta(self) -> tuple[torch.Tensor, ...]:
        """Return q, k, v, g, beta and the state of a gated delta layer of the case's heads."""
        s = self.sizes
        gates = (s.B, s.T, s.Hq)
        q, k = (self.normal(s.B, s.T, s.Hk, s.D) for _ in range(2))
        v = self.normal(s.B, s.T, s.Hq, s.D)
        g, beta = (self.normal(*gates, dtype=torch.float32).sigmoid() for _ in range(2))
        return q, k, v, -g, beta, self.matrices()

    def matrices(self) -> torch.Tensor:
        """Return the state of a gated delta layer."""
        s = self.sizes
        return self.normal(s.B, s.Hq, s.D, s.D, dtype=torch.float32)

    def causal_conv(self, taps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x, weights, and what is kept, of all channels of such a layer."""
        s = self.sizes
        channels = (2 * s.Hk + s.Hq) * s.D
        x, kept = self.normal(s.B, s.T, channels), self.normal(s.B, taps - 1, channels)
        return x, self.normal(channels, taps), kept

    def parents(self) -> torch.Tensor:
        """Return a chain's parents [T], or a tree's, each among the four nodes before its child."""
        nearest = 1 if self.case.variant == "chain" else 4
        drawn = [self.random.randrange(max(0, i - nearest), i) for i in range(1, self.sizes.T)]
        return torch.tensor([-1, *drawn], device=self.device)

    def tree(self) -> torch.Tensor | None:
        """Return a random tree's bool mask [T, T]; None for a single row and for a chain."""
        rows = self.sizes.T
        if rows == 1 or self.case.variant.startswith("chain"):
            return None
        return Tree(self.parents()).mask


def rows_of_8_bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return normal values as rows of bytes, each with its scale at its end, as `KVCache` does."""
    codes = (x.float() / SCALE).clamp(-127, 127)
    codes = codes.round() if dtype == torch.int8 else codes
    scales = torch.full_like(codes[..., :1], SCALE)
    row = x.new_zeros(*x.shape[:-1], row_bytes(x.shape[-1], x.device), dtype=torch.uint8)
    row[..., : x.shape[-1]] = codes.to(dtype).view(torch.uint8)
    row[..., -4:] = scales.view(torch.uint8)
    return row


def of_8_bits(
    rows: torch.Tensor, dtype: torch.dtype, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of such rows: the elements, and the scales."""
    return rows[..., :head_dim].view(dtype), rows.view(torch.float32)[..., -1]


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
        return self._linear(self.k_cache), self._linear(self.v_cache)

    def _linear(self, cache: torch.Tensor) -> torch.Tensor:
        used = self.sizes.L + self.sizes.T
        if self.block_table is None:
            return cache[:, :used]
        pages = self.block_table[:, : math.ceil(used / cache.shape[1])].long()
        return cache[pages].flatten(1, 2)[:, :used]


def prefix(case: Case, draw: Draw) -> Prefix:
    """Draw a cache of ``case.context`` tokens and a tree part; pages lie in random order."""
    used = case.context + case.rows
    caches = [draw.cache(used), draw.cache(used)]
    # The tree's keys lie in the cache as well: peers need prefix and tree in one tensor.
    trees = [cache[:, case.context : used].clone() for cache in caches]
    sizes = replace(draw.sizes, L=case.context, N=caches[0].shape[1], indices=case.batch)
    table = None
    if case.page_size:
        pages = sizes.N // case.page_size
        order = torch.randperm(case.batch * pages, generator=draw.generator, device=draw.device)
        table = order.view(case.batch, pages).to(torch.int32)
        for number, cache in enumerate(caches):  # logical page i lies at place order[i]
            caches[number] = torch.empty_like(cache).unflatten(1, (pages, -1)).flatten(0, 1)
            caches[number][order] = cache.unflatten(1, (pages, -1)).flatten(0, 1)
        sizes = replace(sizes, indices=case.batch * (1 + math.ceil(case.context / case.page_size)))
    return Prefix(*caches, draw.lengths(case.context), *trees, table, sizes)
