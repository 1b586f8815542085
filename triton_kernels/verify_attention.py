"""Hybrid attention that also returns prefix logits of chosen rows (Vegas, 3.2 and 3.3)."""

import torch

from ._attend import attend, not_served  # noqa: F401 - for the backend


def verify_attention(
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
    collect,
    collect_rows,
    per_head,
    out,
    lse,
    collected,
):
    """Attend as ``hybrid_tree_attention`` does and fill ``collected`` in the same pass.

    With a softcap the mean logit is not the logit of the mean query. Then the pass writes the
    float32 logits to a workspace, and the scores are their mean. Without ``per_head`` the pass
    writes one score per KV head to a workspace: programs of different heads run in no fixed order.
    """
    batch, capacity = cache_seqlens.shape[0], collected.shape[-1]
    mean_of_logits = collect == "scores" and softcap > 0
    target = collected
    if mean_of_logits:
        target = collected.new_empty((batch, len(collect_rows), q.shape[-2], capacity))
    elif not per_head:
        target = collected.new_empty((batch, k_cache.shape[2], capacity))
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
        collect="logits" if mean_of_logits else collect,
        collect_rows=collect_rows,
        collected=target,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if mean_of_logits:
        rows_and_heads = (1, 3) if per_head else (1, 2, 3)
        logits = target.unflatten(2, (k_cache.shape[2], -1))
        torch.mean(logits, rows_and_heads, out=collected)
        # Capped logits are finite or NaN: -inf says that a row does not see the key.
        collected.masked_fill_((logits == -torch.inf).any(rows_and_heads), -torch.inf)
    elif not per_head:
        torch.mean(target, 1, out=collected)
