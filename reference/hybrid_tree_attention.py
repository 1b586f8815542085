"""Attention to a cached prefix, which needs no mask, merged with a masked tree (LongSpec, 3.3)."""

import torch

from ._attention import (
    mask_logits,
    prefix_of,
    scaled_logits,
    softmax_state,
    tokens_at,
)
from .merge_state import merge_state, with_sinks
from .tree_attention import tree_state
from .tree_mask import tree_depths, trim_tree_mask, visible_tree_keys


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
):
    """Return `(out, lse)` of q [B, T, Hq, D] over the prefix and over the tree keys its rows see.

    Every row sees the first `cache_seqlens` tokens of its request's cache. With `k_tree=None` the T
    tree keys lie behind them. With `window`, a row at position t sees keys at positions p with
    t - window < p; a row stands at `cache_seqlens + depth`, `depths` [B or 1, T] being read off
    `tree_mask` unless given.
    """
    out, lse, _ = hybrid_with_logits(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        k_tree,
        v_tree,
        tree_mask,
        depths,
        block_table,
        window,
        softmax_scale,
        softcap,
        sinks,
    )
    return out, lse


def hybrid_with_logits(
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    k_tree,
    v_tree,
    tree_mask,
    depths,
    block_table,
    window,
    softmax_scale,
    softcap,
    sinks,
):
    """Return `(out, lse, logits)`; logits [B, Hk, T, g, n] are the masked ones of the prefix."""
    rows = q.shape[1]
    if k_tree is None:
        behind = cache_seqlens[:, None] + torch.arange(rows, device=q.device)
        k_tree = tokens_at(k_cache, behind, block_table).transpose(1, 2)
        v_tree = tokens_at(v_cache, behind, block_table).transpose(1, 2)
    tree_visible = visible_tree_keys(tree_mask, rows, k_tree.shape[1], q.device)
    depths = tree_depths(tree_visible) if depths is None else depths
    if window is not None:
        tree_visible = trim_tree_mask(tree_visible, window)

    k = prefix_of(k_cache, cache_seqlens, block_table).transpose(1, 2)
    v = prefix_of(v_cache, cache_seqlens, block_table).transpose(1, 2)
    visible = visible_prefix(k.shape[2], cache_seqlens, depths, window)
    logits = scaled_logits(q, k, softmax_scale, softcap)
    logits, v = mask_logits(logits, v, visible[:, None, :, None])

    prefix = softmax_state(logits, v)
    tree = tree_state(q, k_tree, v_tree, tree_visible, softmax_scale, softcap)
    out, lse = with_sinks(*merge_state(*prefix, *tree), sinks)
    return out.to(q.dtype), lse, logits


def visible_prefix(size, cache_seqlens, depths, window):
    """Return which of the first `size` cached tokens each row sees, bool [B, T or 1, size]."""
    lengths = cache_seqlens[:, None, None]
    positions = torch.arange(size, device=cache_seqlens.device)
    visible = positions < lengths
    if window is not None:
        visible = visible & (positions > lengths + depths[:, :, None] - window)
    return visible
