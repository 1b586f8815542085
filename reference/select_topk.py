"""Deterministic top-k selection of the cached tokens that a sparse draft sees."""

import math

import torch

# 0.07 * 100 is 7.000000000000001 in binary: without this, rounding up would take an eighth token.
ROUNDING_SLACK = 1e-6


def select_topk(
    scores, cache_seqlens, ratio=None, budget=None, min_tokens=0, keep_first=0, keep_last=0
):
    """Return `(indices, index_lengths)`: positions in ascending order, padded with -1, int32.

    scores [B, N] or [B, Hk, N] -> indices [B, K] or [B, Hk, K]. Of a request of n tokens,
    `max(ceil(ratio * n) or budget, min_tokens, keep_first + keep_last)` are taken, or all n if
    there are fewer. The first `keep_first` and last `keep_last` are always among them; the rest are
    the highest scores, the later of two equal ones first. -inf and NaN rank below every number.
    """
    capacity = scores.shape[-1]
    width = selection_size(capacity, ratio, budget, min_tokens, keep_first + keep_last)
    lengths = cache_seqlens.view(-1, *[1] * (scores.dim() - 1))  # [B, 1] or [B, 1, 1]
    wanted = torch.full_like(lengths, budget) if ratio is None else tokens_in_ratio(lengths, ratio)
    counts = torch.minimum(wanted.clamp(min=max(min_tokens, keep_first + keep_last)), lengths)

    positions = torch.arange(capacity, device=scores.device)
    kept = (positions < keep_first) | (positions >= lengths - keep_last)
    standing = kept.int().masked_fill(positions >= lengths, -1).expand_as(scores)
    best = positions.flip(-1).expand_as(scores)
    # Each sort keeps the order of what it finds equal.
    for key in (scores.masked_fill(scores.isnan(), -torch.inf), standing):
        by_key = key.gather(-1, best).sort(dim=-1, descending=True, stable=True).indices
        best = best.gather(-1, by_key)
    best = best[..., :width]
    taken = torch.arange(width, device=scores.device) < counts
    best = best.masked_fill(~taken, capacity).sort(-1).values
    index_lengths = counts.squeeze(-1).expand(scores.shape[:-1])
    return best.masked_fill(~taken, -1).int(), index_lengths.int()


def selection_size(capacity, ratio, budget, min_tokens, kept):
    """Return K, the number of tokens taken of a request that fills the capacity."""
    wanted = math.ceil(ratio * capacity - ROUNDING_SLACK) if budget is None else budget
    return min(max(wanted, min_tokens, kept), capacity)


def tokens_in_ratio(lengths, ratio):
    """Return ceil(ratio * lengths) as int32."""
    return (ratio * lengths.double() - ROUNDING_SLACK).ceil().int()
