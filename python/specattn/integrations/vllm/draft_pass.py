"""A pass in which the target drafts for itself: it reads few cached tokens, and writes none."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from specattn.ops import hybrid_tree_attention, sparse_gather_attention

from .attention import SpecattnAttention


@dataclass
class DraftPass:
    """One token for each of some requests, step by step; every layer's attention asks it.

    vLLM reserves no cache for what such a drafter drafts, so the keys and values of the drafted
    tokens lie here.

    Parameters
    ----------
    positions : dict of SpecattnAttention to Tensor, int32 [B, K]
        For each layer that attends to the whole text, the cached tokens that it sees.
    lengths : Tensor [B], int32
        How many positions count.
    cache_seqlens : Tensor [B], int32
        Tokens in the cache: layers with a sliding window see those in it.
    block_table : Tensor [B, max_pages], int32
    steps : int
        Most tokens to draft.
    """

    positions: dict[SpecattnAttention, torch.Tensor]
    lengths: torch.Tensor
    cache_seqlens: torch.Tensor
    block_table: torch.Tensor
    steps: int
    step: int = 0
    _new: dict[SpecattnAttention, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attend(self, layer: SpecattnAttention, q, key, value, k_cache, v_cache, out) -> None:
        """Attend from a row of each request; `q` and `out` are [B, Hq, D]."""
        k_new, v_new = self._with(layer, key, value)
        # The one row sees the keys of all steps so far, its own included.
        all_of_them = torch.full((1, 1), (1 << (self.step + 1)) - 1, device=q.device)
        options = {**layer.options, "block_table": self.block_table, "out": out[:, None]}
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
