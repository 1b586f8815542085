"""Deterministic top-k selection of the cached tokens that a sparse draft sees, without a sync.

One kernel turns every (score, position) into an int64 that orders as the selection does: above,
the score's bits as an ordered integer; below, the position. No two are equal, so every correct
top-k finds the same set. Tokens that are always kept rank above every score, dead ones below.
"""

import torch
import triton
import triton.language as tl

from ._launch import launch

# 0.07 * 100 is 7.000000000000001 in binary: without this, rounding up would take an eighth token.
ROUNDING_SLACK = 1e-6


# fmt: off
@triton.jit(do_not_specialize=["capacity", "keep_first", "keep_last"])
def rank_kernel(
    scores, cache_seqlens, ranks, capacity, keep_first, keep_last,
    scores_stride_b, scores_stride_h, lengths_stride_b, ranks_stride_b, ranks_stride_h,
    BLOCK_N: tl.constexpr,
):
    # fmt: on
    """Write the ranks of a block of positions."""
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    length = tl.load(cache_seqlens + b * lengths_stride_b)
    p_score = scores + b * scores_stride_b + h * scores_stride_h + n
    score = tl.load(p_score, mask=n < length, other=0.0).to(tl.float32)
    score = tl.where(score == score, score, float("-inf")) + 0.0  # NaN ranks as -inf, -0.0 as 0.0
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where((n < keep_first) | (n >= length - keep_last), 0x7FFFFFFF, ordered)
    ordered = tl.where(n < length, ordered, -0x80000000)
    rank = (ordered.to(tl.int64) << 32) + n
    tl.store(ranks + b * ranks_stride_b + h * ranks_stride_h + n, rank, mask=n < capacity)


def select_topk(
    scores,
    cache_seqlens,
    ratio,
    budget,
    min_tokens,
    keep_first,
    keep_last,
    indices,
    index_lengths,
):
    """Write the chosen positions, ascending and padded with -1, and how many they are.

    ``scores`` [B, N] or [B, Hk, N], ``indices`` int32 [B, K] or [B, Hk, K], ``index_lengths`` int32
    [B] or [B, Hk]. Ties go to the later position; NaN and -inf come last.
    """
    capacity, width = scores.shape[-1], indices.shape[-1]
    if scores.dim() == 2:
        scores, indices, index_lengths = scores[:, None], indices[:, None], index_lengths[:, None]
    counts = _counts(cache_seqlens, ratio, budget, min_tokens, keep_first + keep_last)
    index_lengths.copy_(counts[:, None])
    if width == 0:
        return
    B, heads = scores.shape[:2]
    ranks = torch.empty(scores.shape, dtype=torch.int64, device=scores.device)
    block_n = 1024
    launch(
        rank_kernel, (triton.cdiv(capacity, block_n), heads, B),
        scores, cache_seqlens, ranks, capacity, keep_first, keep_last,
        *scores.stride()[:2],
        cache_seqlens.stride(0),
        *ranks.stride()[:2],
        BLOCK_N=block_n,
    )  # fmt: skip
    best = ranks.topk(width).indices.int()
    taken = torch.arange(width, device=scores.device) < counts[:, None, None]
    best = best.masked_fill_(~taken, capacity).sort(-1).values
    indices.copy_(best.masked_fill_(~taken, -1))


def _counts(cache_seqlens, ratio, budget, min_tokens, kept):
    """Return how many tokens of each request are taken, int32 [B]."""
    least = max(min_tokens, kept)
    if ratio is None:
        return cache_seqlens.clamp(max=max(budget, least))
    wanted = (cache_seqlens.double() * ratio - ROUNDING_SLACK).ceil().int().clamp(min=least)
    return torch.minimum(wanted, cache_seqlens)
