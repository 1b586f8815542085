"""Attention to selected tokens of a cache, in place: sparse drafts (Vegas 3.2, TokenSwift 3.3)."""

import torch

from ._attention import attend, caches_of, capacity_of, longest, tokens_at
from ._ragged import by_request
from .merge_state import merge_state, with_sinks
from .tree_mask import visible_tree_keys


@by_request
def sparse_gather_attention(
    q,
    k_cache,
    v_cache,
    indices,
    index_lengths,
    k_new=None,
    v_new=None,
    tree_mask=None,
    block_table=None,
    softmax_scale=None,
    softcap=0.0,
    sinks=None,
    cache_seqlens=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    k_scale=None,
    v_scale=None,
    per_row=False,
):
    """Return `(out, lse)` of q [B, T, Hq, D] over the indexed tokens and over new keys, if any.

    `indices` are logical positions, [B, K] for all heads, [B, Hk, K] for each KV head or with
    `per_row` [B, T, K] for each row, of which the first `index_lengths` ([B], [B, Hk] or [B, T])
    count; the rest is never read. A length of -1 stands for all positions of the prefix, which
    `cache_seqlens` [B] then says. `cu_seqlens_q` makes rows
    ragged, as `by_request` says; `k_scale` and `v_scale` are those of `hybrid_tree_attention`.
    """
    if cache_seqlens is not None:
        capacity = capacity_of(k_cache, block_table)
        indices, index_lengths = with_prefixes(indices, index_lengths, cache_seqlens, capacity)
    indices = indices[..., : longest(index_lengths, indices.shape[-1])]
    taken = torch.arange(indices.shape[-1], device=q.device) < index_lengths[..., None]
    if per_row:  # one list of all rows' tokens, of which each sees its own
        own = torch.eye(q.shape[1], dtype=torch.bool, device=q.device)
        visible = (own[..., None] & taken[:, None]).flatten(2)[:, None]  # [B, 1, T, T * K]
        indices, taken = indices.flatten(1), taken.flatten(1)
    else:
        visible = (taken[:, None] if taken.dim() == 2 else taken)[:, :, None]  # [B, Hk or 1, 1, K]
    caches = caches_of(q, k_cache, v_cache, block_table, k_scale, v_scale)
    k, v = (cache.read(tokens_at, indices, taken) for cache in caches)
    out, lse = attend(q, k, v, visible, softmax_scale, softcap)
    if k_new is not None:
        in_tree = visible_tree_keys(tree_mask, q.shape[1], k_new.shape[1], q.device)
        k, v = k_new.transpose(1, 2), v_new.transpose(1, 2)
        tree = attend(q, k, v, in_tree[:, None], softmax_scale, softcap)
        out, lse = merge_state(out, lse, *tree)
    out, lse = with_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def with_prefixes(indices, index_lengths, cache_seqlens, capacity):
    """Replace each list whose length is -1 by that of all positions of its request's prefix."""
    whole = index_lengths < 0
    lengths = cache_seqlens.view(-1, *[1] * (index_lengths.dim() - 1))
    index_lengths = torch.where(whole, lengths, index_lengths)
    room = max(0, longest(cache_seqlens, capacity) - indices.shape[-1])
    indices = torch.nn.functional.pad(indices, (0, room))
    everything = torch.arange(indices.shape[-1], dtype=torch.int32, device=indices.device)
    return torch.where(whole[..., None], everything, indices), index_lengths
