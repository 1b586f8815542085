"""Attention in a self-drafting pass: reads selected cached tokens, and writes none to the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from specattn.ops import hybrid_tree_attention, sparse_gather_attention

from .attention import Cache, SpecattnAttention


@dataclass
class DraftPass:
    """The passes that draft a chain, a token per request and step; every layer attends through it.

    vLLM reserves no cache for what such a drafter drafts, so the keys and values of the drafted
    tokens, at most `steps`, are kept here. Layers in `positions` attend to the first `lengths`,
    int32 [B], of their cached tokens, int32 [B, K]; the others, with a sliding window, to those of
    `cache_seqlens`, int32 [B]. `block_table` is int32 [B, max_pages].
    """

    positions: dict[SpecattnAttention, torch.Tensor]
    lengths: torch.Tensor
    cache_seqlens: torch.Tensor
    block_table: torch.Tensor
    steps: int
    step: int = 0
    _new: dict[SpecattnAttention, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attend(self, layer: SpecattnAttention, q, key, value, cache: Cache, out) -> None:
        """Attend from a row of each request; `q` and `out` are [B, Hq, D]."""
        k_new, v_new = self._with(layer, key, value)
        # The one row sees the keys of all steps so far, its own included.
        all_of_them = torch.full((1, 1), (1 << (self.step + 1)) - 1, device=q.device)
        k_cache, v_cache, *scales = cache
        options = {**layer.options, "block_table": self.block_table, "out": out[:, None]}
        options |= zip(("k_scale", "v_scale"), scales, strict=True)
        if layer in self.positions:
            sparse_gather_attention(
                q[:, None],
                k_cache,
                v_cache,
                self.positions[layer],
                self.lengths,
                k_new,
                v_new,
                all_of_them,
                **options,
            )
        else:
            hybrid_tree_attention(
                q[:, None],
                k_cache,
                v_cache,
                self.cache_seqlens,
                k_new,
                v_new,
                all_of_them,
                window=layer.window,
                **options,
            )

    def _with(self, layer: SpecattnAttention, key, value) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a step's keys and values [B, Hk, D]; return those of all steps, [B, S, Hk, D]."""
        if layer not in self._new:
            shape = (len(key), self.steps, *key.shape[1:])
            self._new[layer] = key.new_empty(shape), value.new_empty(shape)
        new = self._new[layer]
        for kept, given in zip(new, (key, value), strict=True):
            kept[:, self.step] = given
        k_new, v_new = (kept[:, : self.step + 1] for kept in new)
        return k_new, v_new
