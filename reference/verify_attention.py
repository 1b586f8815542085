"""Hybrid attention that also hands out the prefix logits of some rows (Vegas, 3.2 and 3.3)."""

import torch

from ._attention import capacity_of
from .hybrid_tree_attention import hybrid_with_logits


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
    collect="scores",
    collect_rows=(0, -1),
):
    """Return `(out, lse, collected)`: hybrid attention, and how `collect_rows` rank the prefix.

    "logits": [B, R, Hq, N] bfloat16 (float64 for float64), the scaled and capped logits of the rows
    named; "scores": [B, Hk, N], their mean over those rows and over the heads of each group. -inf
    where a row does not see the key.
    """
    out, lse, logits = hybrid_with_logits(
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
    collected = logits[:, :, list(collect_rows)]  # [B, Hk, R, g, n]
    if collect == "scores":
        collected = collected.mean((2, 3))
    else:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.bfloat16
        collected = collected.transpose(1, 2).flatten(2, 3).to(dtype)
    room = capacity_of(k_cache, block_table) - collected.shape[-1]
    return out, lse, torch.nn.functional.pad(collected, (0, room), value=-torch.inf)
