"""Importance of each cached token: its mean logit over the query rows (TokenSwift, 3.3)."""

import torch

from ._attention import caches_of, capacity_of, prefix_of, scaled_logits


def importance_scores(
    q, k_cache, cache_seqlens, per_head=True, block_table=None, softmax_scale=None, k_scale=None
):
    """Return the mean scaled logit of all rows, -inf beyond `cache_seqlens`.

    Per KV head, over the T rows and g heads of its group: [B, Hk, N]; or over all heads: [B, N]. A
    cache of 8 bits stands for its elements times `k_scale`, [Hk] or [.., N, Hk].
    """
    keys, _ = caches_of(q, k_cache, k_cache, block_table, k_scale)
    k = keys.read(prefix_of, cache_seqlens)
    scores = scaled_logits(q, k, softmax_scale).mean((2, 3))
    if not per_head:
        scores = scores.mean(1)
    dead = torch.arange(k.shape[2], device=q.device) >= cache_seqlens[:, None]
    scores = scores.masked_fill(dead[:, None] if per_head else dead, -torch.inf)
    room = capacity_of(k_cache, block_table) - k.shape[2]
    return torch.nn.functional.pad(scores, (0, room), value=-torch.inf)
