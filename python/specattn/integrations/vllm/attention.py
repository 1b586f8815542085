"""A layer's attention over vLLM's KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType, CommonAttentionMetadata

import specattn.ops  # noqa: F401 - defines the operators
from specattn.backends.select import chosen

if TYPE_CHECKING:
    from .selections import Selections


@dataclass
class Batch:
    """The rows of a step: parts of prompts, decoded tokens and drafts to verify, in any mixture.

    `tokens` rows of all requests, without vLLM's padding; those of a request, at most
    `max_seqlen_q`, begin at its `cu_seqlens_q`, int32 [B + 1]. Before this step its cache had
    `cache_seqlens`, int32 [B], tokens, on the pages of `block_table`, int32 [B, max_pages].
    """

    tokens: int
    max_seqlen_q: int
    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    block_table: torch.Tensor

    @property
    def requests(self) -> int:
        """Number of requests."""
        return self.cache_seqlens.shape[0]

    def rows_of(self, request: int) -> int:
        """Return how many rows a request has; waits for a device."""
        return int(self.cu_seqlens_q[request + 1] - self.cu_seqlens_q[request])


def batch_of(common: CommonAttentionMetadata) -> Batch:
    """Return a step as vLLM describes it; NotImplementedError where it is not causal."""
    if isinstance(common.causal, torch.Tensor) or not common.causal:
        raise NotImplementedError(
            "specattn: expected causal attention, got a batch without it; vLLM's own attention "
            "serves such a model"
        )
    return Batch(
        tokens=common.num_actual_tokens,
        max_seqlen_q=common.max_query_len,
        cu_seqlens_q=common.query_start_loc,
        cache_seqlens=common.seq_lens - common.query_start_loc.diff(),
        block_table=common.block_table_tensor,
    )


def serves_head_size(head_size: int) -> bool:
    """Return whether there are kernels for heads of that size."""
    return head_size % 8 == 0 and 0 < head_size <= 256


def pages(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, [pages, page_size, Hk, D], as views of a layer's KV cache.

    The cache is [pages, Hk, page_size, 2 * D] of memory (LBHNC, which our backends require) in
    which a head's keys lie before its values.
    """
    count, heads, size, _ = kv_cache.shape
    both = kv_cache.view(count, heads, 2, size, -1).transpose(1, 3)
    return both[:, :, 0], both[:, :, 1]


_UNSCALED = (None, None)  # scales of K and V


class SpecattnAttention(AttentionImpl):
    """vLLM's attention of a layer, computed by specattn; parameters as vLLM's own.

    `options` are those that all attention operators have, in the order of their signatures;
    `selections` collects scores for a drafter, if there is one.
    """

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        sinks=None,
    ):
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.window = sliding_window
        self.options = {
            "softmax_scale": self.scale,
            "softcap": logits_soft_cap or 0.0,
            "sinks": sinks,
        }
        self.selections: Selections | None = None
        self._lse: torch.Tensor | None = None
        self._views: tuple[int, tuple[torch.Tensor, torch.Tensor]] | None = None

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Write the keys and values of new tokens, [tokens, Hk, D], where `slot_mapping` says."""
        tokens = slot_mapping.shape[0]
        new = key[None, :tokens], value[None, :tokens]
        _operator("write_kv", key)(
            *new, *self._pages(kv_cache), slot_mapping[None], *_UNSCALED, *_UNSCALED
        )

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        """Attend from the rows of a step, [tokens, Hq, D], to what the cache holds by now."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("specattn: expected no fused quantization of outputs")
        if attn_metadata is None:  # vLLM warms up
            return output
        if not isinstance(attn_metadata, Batch):
            attn_metadata.attend(self, query, key, value, *self._pages(kv_cache), output)
            return output
        batch, caches = attn_metadata, self._pages(kv_cache)
        q, out = query[: batch.tokens], output[: batch.tokens]
        if self.selections is not None and self.selections.wants(batch):
            self.selections.attend(self, q, *caches, batch, out)
        else:
            attend(self, q, *caches, batch, out)
        return output

    def inputs(self, q, k_cache, v_cache, batch: Batch) -> tuple[Any, ...]:
        """Return what the operators take ahead of their options: a causal chain, in the cache."""
        prefix = (q, k_cache, v_cache, batch.cache_seqlens)
        no_tree = (None,) * 4  # keys, values, mask and depths
        options = self.options.values()
        rows = (batch.cu_seqlens_q, batch.max_seqlen_q)
        return (*prefix, *no_tree, batch.block_table, self.window, *options, *rows, *_UNSCALED)

    def lse(self, q: torch.Tensor) -> torch.Tensor:
        """Return a buffer for log-sum-exps, which are not read."""
        if self._lse is None or self._lse.shape != q.shape[:-1]:
            self._lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        return self._lse

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `pages`, made once: vLLM allocates a layer's cache once."""
        if self._views is None or self._views[0] != kv_cache.data_ptr():
            self._views = kv_cache.data_ptr(), pages(kv_cache)
        return self._views[1]


def attend(layer: SpecattnAttention, q, k_cache, v_cache, batch: Batch, out) -> None:
    """Compute a layer's attention; `q` and `out` are [tokens, Hq, D]."""
    inputs = layer.inputs(q, k_cache, v_cache, batch)
    _operator("hybrid_tree_attention", q)(*inputs, out, layer.lse(q))


def verify(
    layer: SpecattnAttention, q, k_cache, v_cache, batch: Batch, out, collect_rows, scores
) -> None:
    """Compute a layer's attention; write the scores of every cached token to `scores` [B, N]."""
    inputs = layer.inputs(q, k_cache, v_cache, batch)
    verified = _operator("verify_attention", q)
    verified(*inputs, "scores", collect_rows, False, out, layer.lse(q), scores)


def _operator(op: str, q: torch.Tensor) -> Callable[..., None]:
    """Return an operator of `specattn.ops`, or its kernel alone where that looks at its arguments.

    Without the checks of the public functions, of which a layer's arguments need none, a decoded
    token takes 30 microseconds less in each layer: a twentieth of all of a small model's time.
    """
    kernel, backend = chosen(op, q.device, q.dtype)
    return kernel if backend.checks_values else getattr(torch.ops.specattn, op).default
