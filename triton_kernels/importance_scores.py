"""Importance of each cached token: its mean logit over the query rows (TokenSwift, 3.3).

The mean over rows and over the heads of a group of ``q_r . k`` is ``(mean_r q_r) . k``, so K is
read once and meets one float32 vector per KV head, whatever ``T`` and ``g`` are. That is one
multiply-add per element, which the vector units keep up with; a tensor-core tile would be padding.
Over all heads one program adds up the heads of its tokens: no atomics, so the same bits every time.
"""

import torch
import triton
import triton.language as tl

from . import _configs
from ._blocks import cache_rows, load_rows
from ._eight_bits import FORMS, bytes_of, numbers, scale_at, scale_of, scale_strides, times
from ._launch import launch

# fmt: off
VARYING = [
    "capacity", "tiles", "k_scale", "k_scale_stride_b", "k_scale_stride_n", "k_scale_stride_h",
]  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def importance_kernel(
    mean_q,
    k_cache,
    cache_seqlens,
    block_table,
    k_scale,
    scores,
    scale,
    capacity,
    tiles,
    mean_stride_b,
    mean_stride_h,
    k_stride_b,
    k_stride_n,
    k_stride_h,
    k_scale_stride_b,
    k_scale_stride_n,
    k_scale_stride_h,
    lengths_stride_b,
    table_stride_b,
    scores_stride_b,
    scores_stride_h,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FORM: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # fmt: on
    """Score ``tiles`` blocks of tokens: sum over ``HEADS`` KV heads of ``scale * mean_q . k``."""
    first_head = tl.program_id(1).to(tl.int64) * HEADS
    b = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    length = tl.load(cache_seqlens + b * lengths_stride_b)
    page_row = block_table
    if block_table is not None:
        page_row = block_table + b * table_stride_b
    p_mean = mean_q + b * mean_stride_b + first_head * mean_stride_h + d
    p_score = scores + b * scores_stride_b + tl.program_id(1).to(tl.int64) * scores_stride_h
    mean = tl.load(p_mean, mask=d < D, other=0.0)
    for tile in range(tiles):
        n = (tl.program_id(0) * tiles + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = n < length
        outer, inner = cache_rows(n, valid, b, None, None, page_row, PAGE_SIZE)
        p_k = k_cache + outer * k_stride_b + inner * k_stride_n + first_head * k_stride_h
        first = numbers(load_rows(p_k, valid, D, BLOCK_D), FORM, NATIVE)
        if k_scale is not None:
            ks = scale_at(k_scale, first_head, k_scale_stride_h, k_scale_stride_n)
            ks = scale_of(ks, outer, inner, valid, k_scale_stride_b, k_scale_stride_n)
            first = times(first, ks, 0)
        products = mean[None, :] * first
        for head in range(1, HEADS):
            others = tl.load(p_mean + head * mean_stride_h, mask=d < D, other=0.0)
            k = numbers(load_rows(p_k + head * k_stride_h, valid, D, BLOCK_D), FORM, NATIVE)
            if k_scale is not None:
                ks = scale_at(k_scale, first_head + head, k_scale_stride_h, k_scale_stride_n)
                ks = scale_of(ks, outer, inner, valid, k_scale_stride_b, k_scale_stride_n)
                k = times(k, ks, 0)
            products += others[None, :] * k
        score = tl.where(valid, tl.sum(products, 1) * scale, float("-inf"))
        tl.store(p_score + n, score, mask=n < capacity)


def importance_scores(
    q, k_cache, cache_seqlens, per_head, block_table, softmax_scale, k_scale, scores
):
    """Write the mean scaled logit of each cached token to ``scores``, -inf beyond the lengths.

    ``scores`` is float32, [B, Hk, N] with ``per_head`` and [B, N] without.
    """
    kv_heads, D = k_cache.shape[2:]
    paged = block_table is not None
    capacity = scores.shape[-1]
    heads = 1 if per_head else kv_heads
    mean_q = q.unflatten(2, (kv_heads, -1)).mean((1, 3), dtype=torch.float32)
    block_n, block_d, num_warps = _configs.importance_blocks(D)
    blocks = triton.cdiv(capacity, block_n)
    tiles = _configs.importance_tiles(q.device, blocks * kv_heads // heads * q.shape[0])
    launch(
        importance_kernel, (triton.cdiv(blocks, tiles), kv_heads // heads, q.shape[0]),
        mean_q, bytes_of(k_cache), cache_seqlens, block_table, k_scale, scores,
        softmax_scale / heads, capacity, tiles,
        *mean_q.stride()[:2],
        *k_cache.stride()[:3],
        *scale_strides(k_scale),
        cache_seqlens.stride(0),
        block_table.stride(0) if paged else 0,
        scores.stride(0),
        scores.stride(1) if per_head else 0,
        D=D,
        HEADS=heads,
        PAGE_SIZE=k_cache.shape[1] if paged else 0,
        FORM=FORMS.get(k_cache.dtype, ""),
        NATIVE=_configs.converts_e4m3(q.device),
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=num_warps,
    )  # fmt: skip
