"""What the attention kernel collects beside its result: which rows, and where nothing is seen."""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102

import triton
import triton.language as tl

from ._bfloat16 import cast
from ._blocks import dot_keys, load_wide
from ._tree import depth_of


@triton.jit
def _rows_of(x, dtype: tl.constexpr):
    """Return rows of ``dtype`` that add up to the float32 vector ``x`` [D]: [1, D] or [16, D]."""
    rows = x[None, :]
    if dtype != tl.float32:
        r = tl.arange(0, 16)[:, None]
        high = cast(x, dtype)
        rest = x - high.to(tl.float32)
        middle = cast(rest, dtype)
        low = cast(rest - middle.to(tl.float32), dtype)
        tile = tl.where(r == 1, middle[None, :], low[None, :])
        tile = tl.where(r == 0, high[None, :], tile)
        rows = tl.where(r < 3, tile, tl.zeros_like(tile))
    return rows


@triton.jit
def scores_of(mean, mean_rest, k, k_rest):
    """Return a mean query's products with a tile of keys, [1, N]; rests included.

    In 16 bits its parts are rows of a tile, whose products add up. In float32 it is one row, for
    which a tile of 16 would spill.
    """
    if mean.dtype == tl.float32:
        s = tl.sum(mean * k, 1)
        if mean_rest is not None:
            s += tl.sum(mean_rest * k_rest, 1)
    else:
        s = tl.sum(dot_keys(mean, mean_rest, k, k_rest), 0)
    return s[None, :]


@triton.jit
def fill_empty(p_row, ok, begin, end, BLOCK_N: tl.constexpr):
    """Write -inf to the columns [begin, end) of some rows [C]."""
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        p = p_row[:, None] + n[None, :]
        nothing = tl.full(p.shape, float("-inf"), p.dtype.element_ty)
        tl.store(p, nothing, mask=ok[:, None] & (n < end)[None, :])


# fmt: off
@triton.jit
def collected_rows(
    q, head, tile, T, S, depth_row, mask_row, mask_stride_t, masked,
    q_stride_t, q_stride_h, collected_stride_r, collected_stride_h,
    COLLECT: tl.constexpr, ROWS: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr,
    WIDTHS: tl.constexpr, BLOCK_C: tl.constexpr,
):
    # fmt: on
    """Return what is collected: (queries [C, D], their rest, output offsets, which exist, depths).

    ``ROWS`` are tokens, negative ones counted from ``T``. Of scores there is one row per KV head,
    as deep as the deepest of its tokens, because a key must be visible to all of them. Ragged
    requests may have no token at all.
    """
    BLOCK_D: tl.constexpr = WIDTHS[1]  # Triton 3.6 has no shapes of a tuple's elements
    BLOCK_R: tl.constexpr = WIDTHS[2]
    c = tl.arange(0, BLOCK_C)
    if COLLECT == "scores":
        total = tl.zeros([BLOCK_D], tl.float32)
        total_rest = None
        if BLOCK_R:
            total_rest = tl.zeros([BLOCK_R], tl.float32)
        depth = tl.full([1], -1, tl.int32)
        ok = c < GROUP
        some = True
        if RAGGED:
            some = T > 0
            ok = ok & (tl.zeros_like(c) < T)
        for i in tl.static_range(len(ROWS)):
            t = ROWS[i] if ROWS[i] >= 0 else T + ROWS[i]
            if RAGGED:
                t = tl.maximum(tl.minimum(t, T - 1), 0)  # a short request has its nearest one
            row = (tl.zeros_like(c).to(tl.int64) + t) * q_stride_t
            p_q = q + row + (head * GROUP + c) * q_stride_h
            part, rest = load_wide(p_q, ok, WIDTHS[0], BLOCK_D, BLOCK_R)
            total += tl.sum(part.to(tl.float32), 0)
            if BLOCK_R:
                total_rest += tl.sum(rest.to(tl.float32), 0)
            at = depth_of(t, some, T, S, depth_row, mask_row, mask_stride_t, masked)
            depth = tl.maximum(depth, at)
        queries = _rows_of(total / (len(ROWS) * GROUP), q.dtype.element_ty)
        queries_rest = queries
        if BLOCK_R:
            queries_rest = _rows_of(total_rest / (len(ROWS) * GROUP), q.dtype.element_ty)
        offset = tl.zeros([1], tl.int64) + head * collected_stride_h
        ok = tl.zeros([1], tl.int32) == tile
    else:
        c += tile * BLOCK_C
        t = tl.zeros_like(c)
        for i in tl.static_range(len(ROWS)):
            t = tl.where(c // GROUP == i, ROWS[i] if ROWS[i] >= 0 else T + ROWS[i], t)
        ok = c // GROUP < len(ROWS)
        some = ok
        if RAGGED:
            t = tl.maximum(tl.minimum(t, T - 1), 0)
            some = ok & (t < T)  # unless there is no row at all
        h = head * GROUP + c % GROUP
        depth = depth_of(t, some, T, S, depth_row, mask_row, mask_stride_t, masked)
        p_q = q + t.to(tl.int64) * q_stride_t + h * q_stride_h
        queries, queries_rest = load_wide(p_q, some, WIDTHS[0], BLOCK_D, BLOCK_R)
        offset = (c // GROUP).to(tl.int64) * collected_stride_r + h * collected_stride_h
    return queries, queries_rest, offset, ok, depth
