"""Hybrid attention that also returns prefix logits of chosen rows (Vegas, 3.2 and 3.3)."""

import torch

from ._attention import caches_of, capacity_of, fill_where, mask_logits, prefix_of, scaled_logits
from ._ragged import by_request
from .hybrid_tree_attention import hybrid_tree_attention, visible_prefix
from .tree_mask import tree_depths, visible_tree_keys


@by_request
def verify_attention(
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
    collect="scores",
    collect_rows=(0, -1),
    per_head=True,
):
    """Return `(out, lse, collected)`: hybrid attention, and logits or scores of `collect_rows`.

    "logits": [B, R, Hq, N] bfloat16 (float64 for float64), the scaled and capped logits of those
    rows; "scores": [B, Hk, N], their mean over those rows and over the heads of each group, or
    without `per_head` [B, N], over all heads. -inf where a row does not see the key.
    `cu_seqlens_q` makes rows ragged, as `by_request` says.
    """
    out, lse = hybrid_tree_attention(
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
        k_scale=k_scale,
        v_scale=v_scale,
    )
    rows = list(collect_rows)
    if window is not None:
        if depths is None:
            tree_size = q.shape[1] if k_tree is None else k_tree.shape[1]
            depths = tree_depths(visible_tree_keys(tree_mask, q.shape[1], tree_size, q.device))
        depths = depths[:, rows]
    keys, _ = caches_of(q, k_cache, v_cache, block_table, k_scale, v_scale)
    k = keys.read(prefix_of, cache_seqlens)
    visible = visible_prefix(k.shape[2], cache_seqlens, depths, window)
    logits = mask_logits(scaled_logits(q[:, rows], k, softmax_scale, softcap), visible)
    if collect == "scores":
        # Where one of the rows does not see the key, whatever the others make of it.
        hidden = ~visible.all(2)
        collected = fill_where(hidden, logits.mean((2, 3)), -torch.inf)
        collected = collected if per_head else collected.mean(1)
    else:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.bfloat16
        collected = logits.transpose(1, 2).flatten(2, 3).to(dtype)
    room = capacity_of(k_cache, block_table) - k.shape[2]
    return out, lse, torch.nn.functional.pad(collected, (0, room), value=-torch.inf)
