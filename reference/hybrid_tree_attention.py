"""Attention to a cached prefix, which needs no mask, merged with a masked tree (LongSpec, 3.3)."""

import torch

from ._attention import attend, caches_of, prefix_of, tokens_at
from ._ragged import by_request
from .merge_state import merge_state, with_sinks
from .tree_mask import tree_depths, trim_tree_mask, visible_tree_keys


@by_request
def hybrid_tree_attention(
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    k_tree=None,
    v_tree=None,
    tree_mask=None,
    depths=None,
    block_table=None,
    window=None,
    softmax_scale=None,
    softcap=0.0,
    sinks=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    k_scale=None,
    v_scale=None,
):
    """Return `(out, lse)` of q [B, T, Hq, D] over the prefix and over the tree keys its rows see.

    Every row sees the first `cache_seqlens` tokens of its request's cache. With `k_tree=None` the T
    tree keys lie behind them. With `window`, a row at position t sees keys at positions p with
    t - window < p; a row stands at `cache_seqlens + depth`, `depths` [B or 1, T] being read off
    `tree_mask` unless given. `cu_seqlens_q` makes rows ragged, as `by_request` says. A cache of 8
    bits stands for its elements times `k_scale` and `v_scale`, [Hk] or [.., N, Hk].
    """
    rows = q.shape[1]
    caches = caches_of(q, k_cache, v_cache, block_table, k_scale, v_scale)
    if k_tree is None:
        behind = cache_seqlens[:, None] + torch.arange(rows, device=q.device)
        live = torch.ones_like(behind, dtype=torch.bool)
        k_tree, v_tree = (cache.read(tokens_at, behind, live) for cache in caches)
    else:
        k_tree, v_tree = k_tree.transpose(1, 2), v_tree.transpose(1, 2)
    in_tree = visible_tree_keys(tree_mask, rows, k_tree.shape[2], q.device)
    if window is not None:
        depths = tree_depths(in_tree) if depths is None else depths
        in_tree = trim_tree_mask(in_tree, window)
    k, v = (cache.read(prefix_of, cache_seqlens) for cache in caches)
    in_prefix = visible_prefix(k.shape[2], cache_seqlens, depths, window)

    prefix = attend(q, k, v, in_prefix, softmax_scale, softcap)
    tree = attend(q, k_tree, v_tree, in_tree[:, None], softmax_scale, softcap)
    out, lse = with_sinks(*merge_state(*prefix, *tree), sinks)
    return out.to(q.dtype), lse


def visible_prefix(size, cache_seqlens, depths, window):
    """Return which of the first `size` cached tokens each row sees, bool [B, 1, T or 1, size]."""
    lengths = cache_seqlens[:, None, None, None]
    positions = torch.arange(size, device=cache_seqlens.device)
    visible = positions < lengths
    if window is not None:
        visible = visible & (positions > lengths + depths[:, None, :, None] - window)
    return visible
