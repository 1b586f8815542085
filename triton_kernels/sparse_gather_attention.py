"""Attention to selected cached tokens, read in place (Vegas, 3.2; TokenSwift, 3.3)."""

from ._attend import attend, not_served  # noqa: F401 - for the backend


def sparse_gather_attention(
    q,
    k_cache,
    v_cache,
    indices,
    index_lengths,
    k_new,
    v_new,
    tree_mask,
    block_table,
    softmax_scale,
    softcap,
    sinks,
    cache_seqlens,
    cu_seqlens_q,
    max_seqlen_q,
    k_scale,
    v_scale,
    per_row,
    out,
    lse,
):
    """Write the state of ``q`` over the cached tokens at ``indices`` and over new keys, if any.

    ``indices`` are logical positions, [B, K] for all heads, [B, Hk, K] or ``per_row`` [B, T, K];
    the first ``index_lengths`` ([B], [B, Hk] or [B, T]) of them count and the rest is never read.
    With ``cache_seqlens`` [B] a length of -1 stands for the whole prefix.
    """
    shared = not per_row and indices.dim() == 2
    attend(
        q,
        k_cache,
        v_cache,
        index_lengths[:, None] if shared else index_lengths,
        out,
        lse,
        softmax_scale=softmax_scale,
        softcap=softcap,
        tree=k_new is not None,
        k_tree=k_new,
        v_tree=v_new,
        tree_mask=tree_mask,
        block_table=block_table,
        indices=indices[:, None] if shared else indices,
        sinks=sinks,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        k_scale=k_scale,
        v_scale=v_scale,
        per_row=per_row,
    )
