"""What the Hopper kernel collects beside its result: logits of rows, or one score per key.

Logits are what the rows' own products yield, so they cost no product of their own. A score is the
logit of the mean query: the product of a tile of K, which is in shared memory, with three vectors
that add up to that mean (``_collect``), by ``mma.sync``. It stands beside the products of the rows.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102, SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ._hopper_visible import WARPS
from ._tree import depth_of

PARTS = gl.constexpr(8)  # columns of the smallest product; three are used
_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
_KEYS = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])))


# fmt: off
@gluon.jit
def fill_empty(
    p_rows, begin, end, head, tile, T, collected_r, collected_h,
    COLLECT: gl.constexpr, COLLECT_ROWS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    # fmt: on
    """Write -inf to the columns [begin, end) of what is collected by a tile of rows."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, WARPS], [1, 0])
    SCORES: gl.constexpr = COLLECT == "scores"
    g = gl.arange(0, 1 if SCORES else HEADS, gl.SliceLayout(1, LAYOUT))
    for j in gl.static_range(1 if SCORES else len(COLLECT_ROWS)):
        if SCORES:
            ok = g == tile
            row = p_rows + (g + head) * collected_h
        else:
            token = COLLECT_ROWS[j] if COLLECT_ROWS[j] >= 0 else T + COLLECT_ROWS[j]
            ok = (g < GROUP) & ((token * GROUP + g) // BLOCK_M == tile)
            row = p_rows + j * collected_r + (head * GROUP + g) * collected_h
        for n0 in range(begin, end, 512):
            n = n0 + gl.arange(0, 512, gl.SliceLayout(0, LAYOUT))
            p = row[:, None] + n[None, :]
            nothing = gl.full(p.shape, float("-inf"), p.dtype.element_ty, LAYOUT)
            gl.store(p, nothing, mask=ok[:, None] & (n < end)[None, :])


@gluon.jit
def logits_of(t, h, ok, T, collected, collected_r, collected_h, COLLECT_ROWS: gl.constexpr):
    """Return (where the logits of tokens ``t`` [M] and heads ``h`` go, which are collected)."""
    number = t * 0 - 1
    for j in gl.static_range(len(COLLECT_ROWS)):
        token = COLLECT_ROWS[j] if COLLECT_ROWS[j] >= 0 else T + COLLECT_ROWS[j]
        number = gl.where(t == token, j, number)
    return collected + number.to(gl.int64) * collected_r + h * collected_h, ok & (number >= 0)


@gluon.jit
def store_logits(s, c, row, collects, lower, begin, keys, WINDOW: gl.constexpr):
    """Store the logits [M, N] of the slot's keys ``c`` that are the prefix's."""
    if WINDOW:
        s = gl.where((begin + c)[None, :] > lower[:, None], s, float("-inf"))
    p = row[:, None] + (begin + c)[None, :]
    gl.store(p, s.to(p.dtype.element_ty), mask=collects[:, None] & (c < keys)[None, :])


# fmt: off
@gluon.jit
def mean_query(
    q, head, T, q_stride_t, q_stride_h, dtype: gl.constexpr,
    COLLECT_ROWS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr,
):
    # fmt: on
    """Return [D, PARTS] whose columns add up to the mean of a KV head's collected rows.

    A short request of ragged ones has its nearest row, and one without rows nothing.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    g = gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    ok = (g < GROUP) & (g * 0 < T)
    total = gl.full([D], 0.0, gl.float32, gl.SliceLayout(0, LAYOUT))
    for j in gl.static_range(len(COLLECT_ROWS)):
        t = nearest(COLLECT_ROWS[j], T)
        row = t.to(gl.int64) * q_stride_t + (head * GROUP + g).to(gl.int64) * q_stride_h
        p_q = (q + row)[:, None] + d[None, :]
        total += gl.sum(gl.load(p_q, mask=ok[:, None], other=0.0).to(gl.float32), 0)
    mean = total / (len(COLLECT_ROWS) * GROUP)
    high = mean.to(dtype)
    rest = mean - high.to(gl.float32)
    middle = rest.to(dtype)
    low = (rest - middle.to(gl.float32)).to(dtype)
    B_LAYOUT: gl.constexpr = gl.DotOperandLayout(1, _LAYOUT, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(1, B_LAYOUT)
    c = gl.arange(0, PARTS, gl.SliceLayout(0, B_LAYOUT))[None, :]
    parts = gl.where(c == 2, gl.convert_layout(low, COLUMN)[:, None], 0.0)
    parts = gl.where(c == 1, gl.convert_layout(middle, COLUMN)[:, None], parts)
    return gl.where(c == 0, gl.convert_layout(high, COLUMN)[:, None], parts).to(dtype)


@gluon.jit
def in_shared(parts):
    """Return parts of a mean query in shared memory."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    held = gl.allocate_shared_memory(parts.dtype, [parts.shape[1], parts.shape[0]], LAYOUT)
    held.permute((1, 0)).store(parts)
    return held


@gluon.jit
def nearest(row: gl.constexpr, T):
    """Return the token of a collected row, which counts from ``T`` if negative."""
    t = row if row >= 0 else T + row
    return gl.maximum(gl.minimum(t, T - 1), 0)


@gluon.jit
def deepest(T, S, depth_row, mask_row, mask_stride_t, masked, COLLECT_ROWS: gl.constexpr):
    """Return how deep the deepest collected row stands: a key must be visible to all of them."""
    depth = -1
    for j in gl.static_range(len(COLLECT_ROWS)):
        t = nearest(COLLECT_ROWS[j], T)
        at = depth_of(t, T > 0, T, S, depth_row, mask_row, mask_stride_t, masked)
        depth = gl.maximum(depth, at)
    return depth


@gluon.jit
def store_scores(keys_shared, c0, scale, scoring, IN_SHARED: gl.constexpr, WINDOW: gl.constexpr):
    """Store the scores of a tile of keys [N, D], the slot's ``c0`` and following.

    ``scoring`` are (the mean query's parts, in registers or `in_shared`, how many keys of the slot
    are scored, which of them is the last below the window, where their scores go).
    """
    parts, scored, below, p_scores = scoring
    N: gl.constexpr = keys_shared.shape[0]
    if IN_SHARED:
        parts = parts.permute((1, 0)).load(gl.DotOperandLayout(1, _LAYOUT, 2))
    k = keys_shared.load(gl.DotOperandLayout(0, _LAYOUT, 2))
    s = mma_v2(k, parts, gl.zeros([N, PARTS], gl.float32, _LAYOUT))
    s = gl.sum(s, 1) * scale
    c = c0 + gl.arange(0, N, _KEYS)
    if WINDOW:
        s = gl.where(c > below, s, float("-inf"))
    gl.store(p_scores + c, s, mask=c < scored)
