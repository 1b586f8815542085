"""Attention to a cached prefix, which needs no mask, and to a tree, which does (LongSpec, 3.4)."""

from ._attend import attend, not_served  # noqa: F401 - for the backend


def hybrid_tree_attention(
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
    cu_seqlens_q,
    max_seqlen_q,
    k_scale,
    v_scale,
    out,
    lse,
):
    """Write the state of ``q`` over the first ``cache_seqlens`` cached keys and the tree.

    ``tree_mask`` is packed. With ``depths`` it is trimmed to ``window`` already, and they are those
    before trimming.
    """
    attend(
        q,
        k_cache,
        v_cache,
        cache_seqlens[:, None],
        out,
        lse,
        softmax_scale=softmax_scale,
        softcap=softcap,
        k_tree=k_tree,
        v_tree=v_tree,
        tree_mask=tree_mask,
        depths=depths,
        block_table=block_table,
        window=window,
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        k_scale=k_scale,
        v_scale=v_scale,
    )
