"""Importance of each cached token: its mean logit over the query rows (TokenSwift, 3.3)."""

import torch

from ._attention import capacity_of, prefix_of, scaled_logits


def importance_scores(
    q, k_cache, cache_seqlens, per_head=True, block_table=None, softmax_scale=None
):
    """Return the mean scaled logit of all rows, -inf beyond `cache_seqlens`.

    Per KV head, over the T rows and g heads of its group: [B, Hk, N]; or over all heads: [B, N].
    """
    k = prefix_of(k_cache, cache_seqlens, block_table)
    scores = scaled_logits(q, k, softmax_scale).mean((2, 3))
    if not per_head:
        scores = scores.mean(1)
    dead = torch.arange(k.shape[2], device=q.device) >= cache_seqlens[:, None]
    scores = scores.masked_fill(dead[:, None] if per_head else dead, -torch.inf)
    room = capacity_of(k_cache, block_table) - k.shape[2]
    return torch.nn.functional.pad(scores, (0, room), value=-torch.inf)
