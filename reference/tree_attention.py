"""Attention of tree nodes to each other."""

from ._attention import attend
from .tree_mask import visible_tree_keys


def tree_attention(q, k_new, v_new, tree_mask=None, softmax_scale=None, softcap=0.0):
    """Return `(out, lse)` of q [B, T, Hq, D] over the tree keys its rows see.

    k_new, v_new are [B, S, Hk, D]; tree_mask is bool [T, S] or [B, T, S], packed int64, or None for
    a causal chain whose last row sees every key.
    """
    visible = visible_tree_keys(tree_mask, q.shape[1], k_new.shape[1], q.device)
    k, v = k_new.transpose(1, 2), v_new.transpose(1, 2)
    out, lse = attend(q, k, v, visible[:, None], softmax_scale, softcap)
    return out.to(q.dtype), lse
