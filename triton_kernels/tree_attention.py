"""Attention of draft tokens to draft tokens only: one launch of the family, without a prefix."""

from ._attend import attend, not_served  # noqa: F401 - for the backend


def tree_attention(q, k_new, v_new, tree_mask, softmax_scale, softcap, out, lse):
    """Write the state of ``q`` [B, T, Hq, D] over the new keys that ``tree_mask`` shows its rows.

    ``tree_mask`` is packed, int64 [B or 1, T, W], or ``None`` for a causal chain.
    """
    attend(
        q,
        None,
        None,
        None,
        out,
        lse,
        softmax_scale=softmax_scale,
        softcap=softcap,
        k_tree=k_new,
        v_tree=v_new,
        tree_mask=tree_mask,
    )
