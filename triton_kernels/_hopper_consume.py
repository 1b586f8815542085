"""A consumer of the Hopper kernel: attention of 64 rows to the tiles that the producer brings.

While ``P V`` of one tile runs, the softmax of the next is computed. With two groups of rows they
issue their products in turn, so that the softmax of one is hidden behind the products of the other
(FlashAttention-3, 3.1 and 3.2).
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102, SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._blocks import LN2, LOG2E, cap
from ._hopper_collect import logits_of, store_logits, store_scores
from ._hopper_visible import ROWS, WARPS, rows_of, visible_columns
from ._tree import depth_of


@gluon.jit
def _load_queries(shared, q, t, h, ok, q_stride_t, q_stride_h, LAYOUT: gl.constexpr):
    """Copy rows of queries to shared memory; those that do not exist are 0."""
    d = gl.arange(0, shared.shape[1], gl.SliceLayout(0, LAYOUT))
    row = t.to(gl.int64) * q_stride_t + h.to(gl.int64) * q_stride_h
    p_q = (q + row)[:, None] + d[None, :]
    shared.store(gl.load(p_q, mask=ok[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def _wait(full, item, items, RING: gl.constexpr, TMA: gl.constexpr):
    """Wait for an item, K or V of a tile, if it comes.

    Beside TMA the producer fences itself what else it brings.
    """
    mbarrier.wait(full.index(item % RING), item // RING & 1, pred=item < items)
    if not TMA:
        fence_async_shared()


# fmt: off
@gluon.jit
def _softmax(
    s, i, m, l, odd, rows, slot, mask, collected, scale, softcap,
    WINDOW: gl.constexpr, TRIMMED: gl.constexpr, SOFTCAP: gl.constexpr,
    LOGITS: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr,
):
    # fmt: on
    """Return (p, m, l, what sums scale by) after the products ``s`` of tile ``i``, in base 2.

    ``m`` is the maximum of the products, or with a softcap of the logits. ``odd`` [.., BLOCK_N]
    are the keys, in tiles that rows see differently, whose values are NaN or infinite.
    """
    begin, keys, tree_at, whole, highest = slot
    _, _, _, lower = rows
    c = i * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    factor = scale * LOG2E
    if SOFTCAP:
        s = cap(s * scale, softcap, SOFTCAP)
        factor = LOG2E
    if LOGITS:
        row, collects = collected
        logits = s
        if not SOFTCAP:
            logits = s * scale
        store_logits(logits, c, row, collects, lower, begin, keys, WINDOW)
    some = i >= whole
    if WINDOW:
        some = some | (begin + i * BLOCK_N <= highest)
    if some:
        no_number = odd.index(i % odd.shape[0]).load(gl.SliceLayout(0, LAYOUT)) != 0
        s = gl.where(no_number[None, :], float("nan"), s)
        visible = visible_columns(
            i * BLOCK_N, rows, slot, mask, WINDOW, TRIMMED, BLOCK_N, LAYOUT
        )
        s = gl.where(visible, s, float("-inf"))
    new_m = gl.maximum(m, gl.max(s, 1))
    pivot = gl.where(new_m == float("-inf"), 0.0, new_m) * factor  # -inf - -inf would be NaN
    p = gl.exp2(s * factor - pivot[:, None])
    alpha = gl.exp2(m * factor - pivot)
    return p, new_m, l * alpha + gl.sum(p, 1), alpha


# fmt: off
@gluon.jit
def consume(
    work,
    INDEX: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    RING: gl.constexpr, GROUP: gl.constexpr, TMA: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, SINKS: gl.constexpr, TRIMMED: gl.constexpr,
    COLLECT: gl.constexpr, COLLECT_ROWS: gl.constexpr,
):
    # fmt: on
    """Write the state of the ``INDEX``-th 64 rows of a tile over ``tiles`` tiles of keys."""
    shared, pointers, slot, mask, strides, scoring, place, T, scale, softcap = work
    head, tile, has_sink, length, tiles = place
    q_shared, ring, full, empty, turns, odd = shared
    q, sinks, depths, out, lse, collected = pointers
    q_t, q_h, out_t, out_h, lse_t, lse_h, collected_r, collected_h = strides
    _, scored, _, _ = scoring
    mask_row, mask_stride_t, masked, S, window = mask
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    FIRST: gl.constexpr = INDEX * ROWS
    LOGITS: gl.constexpr = COLLECT == "logits"
    SCORES: gl.constexpr = COLLECT == "scores"
    GROUPS: gl.constexpr = BLOCK_M // ROWS

    t, h, ok = rows_of(tile, head, FIRST, T, GROUP, BLOCK_M, gl.SliceLayout(1, Q_LAYOUT))
    queries = q_shared.index(INDEX)
    _load_queries(queries, q, t, h, ok, q_t, q_h, Q_LAYOUT)
    t, h, ok = rows_of(tile, head, FIRST, T, GROUP, BLOCK_M, S_ROWS)
    depth = t
    if WINDOW:
        depth = depth_of(t, ok, T, S, depths if TRIMMED else None, mask_row, mask_stride_t, masked)
    rows = (t, gl.where(ok, t + S - T, -1), depth, length - window + depth)
    factor = scale * LOG2E
    if SOFTCAP:
        factor = factor * 0.0 + LOG2E
    m = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    if SINKS:  # a key with this logit and the value 0
        m = gl.load(sinks + h, mask=ok & (t * 0 < has_sink), other=float("-inf"))
        m = m.to(gl.float32) * (LOG2E / factor)
    l = gl.where(m == float("-inf"), 0.0, 1.0)
    collecting = (collected, ok)
    if LOGITS:
        collecting = logits_of(t, h, ok, T, collected, collected_r, collected_h, COLLECT_ROWS)

    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    items = 2 * tiles
    _wait(full, 0, items, RING, TMA)
    if SCORES:
        if (scored > 0) & (INDEX == 0):
            store_scores(ring.index(0), 0, scale, scoring, GROUPS > 1, WINDOW)
    s = warpgroup_mma(queries, ring.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(empty.index(0), count=1)
    weights, m, l, _ = _softmax(
        s, 0, m, l, odd, rows, slot, mask, collecting, scale, softcap,
        WINDOW, TRIMMED, SOFTCAP, LOGITS, BLOCK_N, S_LAYOUT,
    )  # fmt: skip
    p = gl.convert_layout(weights.to(queries.dtype), P_LAYOUT)
    _wait(full, 2, items, RING, TMA)
    for i in range(1, tiles):
        k = 2 * i
        v = 2 * i - 1
        if SCORES:  # of every other tile; here a group waits for its turn anyway
            if (i * BLOCK_N < scored) & (i % GROUPS == INDEX):
                buffer = ring.index(k % RING)
                store_scores(buffer, i * BLOCK_N, scale, scoring, GROUPS > 1, WINDOW)
        if BLOCK_M > ROWS:
            mbarrier.wait(turns.index(INDEX), (i & 1) ^ INDEX)
        keys = ring.index(k % RING).permute((1, 0))
        s = warpgroup_mma(queries, keys, zero, use_acc=False, is_async=True)
        _wait(full, v, items, RING, TMA)
        product = warpgroup_mma(p, ring.index(v % RING), acc, is_async=True)
        if BLOCK_M > ROWS:
            mbarrier.arrive(turns.index(1 - INDEX), count=1)
        s = warpgroup_mma_wait(1, [s])
        mbarrier.arrive(empty.index(k % RING), count=1)
        weights, m, l, alpha = _softmax(
            s, i, m, l, odd, rows, slot, mask, collecting, scale, softcap,
            WINDOW, TRIMMED, SOFTCAP, LOGITS, BLOCK_N, S_LAYOUT,
        )  # fmt: skip
        next_p = gl.convert_layout(weights.to(queries.dtype), P_LAYOUT)
        # Between softmax and wait, or else the assembler lets the softmax wait too.
        _wait(full, k + 2, items, RING, TMA)
        acc, p, next_p = warpgroup_mma_wait(0, [product, p, next_p])
        mbarrier.arrive(empty.index(v % RING), count=1)
        acc = acc * gl.convert_layout(alpha, O_ROWS)[:, None]
        p = next_p
    v = items - 1
    _wait(full, v, items, RING, TMA)
    acc = warpgroup_mma(p, ring.index(v % RING), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])

    nothing = l == 0.0
    total = gl.where(nothing, 1.0, l)
    p_lse = lse + t * lse_t + h * lse_h
    gl.store(p_lse, gl.where(nothing, float("-inf"), (m * factor + gl.log2(total)) * LN2), mask=ok)
    acc = acc / gl.convert_layout(total, O_ROWS)[:, None]
    t, h, ok = rows_of(tile, head, FIRST, T, GROUP, BLOCK_M, O_ROWS)
    d = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    row = t.to(gl.int64) * out_t + h.to(gl.int64) * out_h
    p_out = (out + row)[:, None] + d[None, :]
    gl.store(p_out, acc.to(p_out.dtype.element_ty), mask=ok[:, None])
