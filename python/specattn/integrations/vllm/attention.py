"""A layer's attention over vLLM's KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

import specattn.ops  # noqa: F401 - defines the operators
from specattn.backends.select import chosen


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


EIGHT_BITS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "int8_per_token_head": torch.int8,
}
"""What the elements of a cache of 8 bits are, by vLLM's names."""

_SCALE_BYTES = 4  # behind a row whose scale is its own, float32


def scales_rows(kv_cache_dtype: str) -> bool:
    """Return whether each token's row of a head has a scale of its own in such a cache."""
    return kv_cache_dtype.endswith("per_token_head")


def with_scales(spec: AttentionSpec) -> AttentionSpec:
    """Return a layer's cache with room for the scales of its rows, if they have some."""
    if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
        return spec
    content = spec.head_size + spec.head_size_v + 2 * _SCALE_BYTES
    return replace(spec, state_content_bytes=content)


class Cache(NamedTuple):
    """A layer's keys and values, [pages, page_size, Hk, D], and their scales where they have some.

    Scales are float32, [Hk] from the checkpoint or [pages, page_size, Hk] from the rows.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def cache_of(layer: Any, kv_cache: torch.Tensor, kv_cache_dtype: str) -> Cache:
    """Return views of a layer's KV cache.

    It is [pages, Hk, page_size, C] of memory (LBHNC, which our backends require) in which a head's
    keys lie before its values, each row before its scale.
    """
    count, heads, size, _ = kv_cache.shape
    both = kv_cache.view(count, heads, 2, size, -1).transpose(1, 3)
    if kv_cache_dtype not in EIGHT_BITS:
        return Cache(both[:, :, 0], both[:, :, 1])
    numbers = both.view(EIGHT_BITS[kv_cache_dtype])
    if not scales_rows(kv_cache_dtype):
        scales = layer._k_scale.expand(heads), layer._v_scale.expand(heads)
        return Cache(numbers[:, :, 0], numbers[:, :, 1], *scales)
    numbers, scale = numbers[..., :-_SCALE_BYTES], both.view(torch.float32)[..., -1]
    return Cache(numbers[:, :, 0], numbers[:, :, 1], scale[:, :, 0], scale[:, :, 1])


class Scoring(Protocol):
    """Whoever attends in a layer's place, to learn which tokens score highest."""

    def wants(self, batch: Batch) -> bool:
        """Return whether this step is theirs."""

    def attend(self, layer: SpecattnAttention, q, cache: Cache, batch: Batch, out) -> None:
        """Attend as the layer does."""


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
        self.selections: Scoring | None = None
        self._lse: torch.Tensor | None = None
        self._views: tuple[int, Cache] | None = None

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Write the keys and values of new tokens, [tokens, Hk, D], where `slot_mapping` says."""
        tokens = slot_mapping.shape[0]
        new = key[None, :tokens], value[None, :tokens]
        k, v, *scales = self._cache(layer, kv_cache)
        own = scales_rows(self.kv_cache_dtype)  # which are written, too
        places = (None, None, *scales) if own else (*scales, None, None)
        _operator("write_kv", key)(*new, k, v, slot_mapping[None], *places)

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
            cache = self._cache(layer, kv_cache)
            attn_metadata.attend(self, query, key, value, cache, output)
            return output
        batch, cache = attn_metadata, self._cache(layer, kv_cache)
        q, out = query[: batch.tokens], output[: batch.tokens]
        if self.selections is not None and self.selections.wants(batch):
            self.selections.attend(self, q, cache, batch, out)
        else:
            attend(self, q, cache, batch, out)
        return output

    def inputs(self, q, cache: Cache, batch: Batch) -> tuple[Any, ...]:
        """Return what the operators take ahead of their options: a causal chain, in the cache."""
        k_cache, v_cache, *scales = cache
        prefix = (q, k_cache, v_cache, batch.cache_seqlens)
        no_tree = (None,) * 4  # keys, values, mask and depths
        options = self.options.values()
        rows = (batch.cu_seqlens_q, batch.max_seqlen_q)
        return (*prefix, *no_tree, batch.block_table, self.window, *options, *rows, *scales)

    def lse(self, q: torch.Tensor) -> torch.Tensor:
        """Return a buffer for log-sum-exps, which are not read."""
        if self._lse is None or self._lse.shape != q.shape[:-1]:
            self._lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        return self._lse

    def _cache(self, layer: Any, kv_cache: torch.Tensor) -> Cache:
        """Return `cache_of`, made once: vLLM allocates a layer's cache once, its weights loaded."""
        if self._views is None or self._views[0] != kv_cache.data_ptr():
            views = cache_of(layer, kv_cache, self.kv_cache_dtype)
            self._views = kv_cache.data_ptr(), views
        return self._views[1]


def attend(layer: SpecattnAttention, q, cache: Cache, batch: Batch, out) -> None:
    """Compute a layer's attention; `q` and `out` are [tokens, Hq, D]."""
    inputs = layer.inputs(q, cache, batch)
    _operator("hybrid_tree_attention", q)(*inputs, out, layer.lse(q))


def verify(
    layer: SpecattnAttention, q, cache: Cache, batch: Batch, out, collect_rows, scores
) -> None:
    """Compute a layer's attention; write the scores of every cached token to `scores` [B, N]."""
    inputs = layer.inputs(q, cache, batch)
    verified = _operator("verify_attention", q)
    verified(*inputs, "scores", collect_rows, False, out, layer.lse(q), scores)


def _operator(op: str, q: torch.Tensor) -> Callable[..., None]:
    """Return an operator of `specattn.ops`, or its kernel alone where that looks at its arguments.

    Without the checks of the public functions, of which a layer's arguments need none, a decoded
    token takes 30 microseconds less in each layer: a twentieth of all of a small model's time.
    """
    kernel, backend = chosen(op, q.device, q.dtype)
    return kernel if backend.checks_values else getattr(torch.ops.specattn, op).default
