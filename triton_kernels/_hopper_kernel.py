"""The attention kernel for Hopper, in tiles of 64 and 128 rows: warp-specialised, in Gluon.

What it computes is what `_split_kv` computes, over the same slots. A block has one or two groups of
four warps with 64 rows each (`_hopper_consume`), and four warps that bring K and V
(`_hopper_produce`) through rings of `RING`` buffers of ``BLOCK_N`` keys; these hand most of their
registers to the others. Rows and keys of a slot are packed as there, but the tree stands in the
request's last slot, in one tile with the end of the prefix.

Ragged rows are cut into tiles as there; a request's tiles behind its last row return at once.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102, SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ._blocks import offset_of, split_size_of, tile_of
from ._gluon import barrier
from ._hopper_collect import deepest, fill_empty, in_shared, mean_query
from ._hopper_consume import consume
from ._hopper_produce import produce
from ._hopper_visible import ROWS, WARPS
from ._tree import depth_of

NOWHERE = gl.constexpr(1 << 30)  # where the tree of a slot without one is


# fmt: off
@gluon.jit
def _allocate(
    dtype: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    RING: gl.constexpr,
):
    # fmt: on
    """Return the shared memory of a block: queries, rings, and their barriers, ready for use."""
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(dtype, [BLOCK_M // ROWS, ROWS, D], Q_LAYOUT)
    ring = gl.allocate_shared_memory(dtype, [RING, BLOCK_N, D], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], BARRIER)
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=BLOCK_M // ROWS)
    turns = full  # one group takes none; Triton 3.6 would reuse their memory without a barrier
    if BLOCK_M > ROWS:
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        for i in gl.static_range(2):
            mbarrier.init(turns.index(i), count=1)
    ODD_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    odd = gl.allocate_shared_memory(gl.int8, [4 if RING <= 8 else 8, BLOCK_N], ODD_LAYOUT)
    return q, ring, full, empty, turns, odd


# As in `_split_kv`.
VARYING = [
    "lengths", "block_table", "tree_mask", "depths", "cu_seqlens_q", "sinks", "lse", "masked", "T",
    "S", "capacity", "splits", "least", "most", "window", "num_kv_heads", "num_requests",
    "k_rows_b", "k_rows_h", "k_columns_h", "v_rows_b", "v_rows_h", "v_columns_h",
    "lengths_stride_b", "table_stride_b", "mask_stride_b", "mask_stride_t", "depths_stride_b",
    "lse_stride_i", "lse_stride_b", "lse_stride_t", "lse_stride_h",
]  # fmt: skip


# fmt: off
@gluon.jit(do_not_specialize=VARYING)
def hopper_kernel(
    q, k_cache, v_cache, lengths, block_table, k_tree, v_tree, tree_mask, depths,
    cu_seqlens_q, sinks, out, lse, collected, k_desc, v_desc,
    scale, softcap, masked, T, S, capacity, splits, least, most, window, num_kv_heads, num_requests,
    q_stride_b, q_stride_t, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h,
    k_rows_b, k_rows_h, k_columns_h, v_rows_b, v_rows_h, v_columns_h,
    lengths_stride_b, table_stride_b,
    k_tree_stride_b, k_tree_stride_n, k_tree_stride_h,
    v_tree_stride_b, v_tree_stride_n, v_tree_stride_h,
    mask_stride_b, mask_stride_t, depths_stride_b,
    out_stride_i, out_stride_b, out_stride_t, out_stride_h,
    lse_stride_i, lse_stride_b, lse_stride_t, lse_stride_h,
    collected_stride_b, collected_stride_r, collected_stride_h,
    D: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, COLLECT: gl.constexpr, COLLECT_ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, RING: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
):
    # fmt: on
    """Compute one slot's state of one tile of rows.

    For TMA K is a matrix with rows of ``k_stride_n`` elements: a request or page has ``k_rows_b``
    of them, and its heads lie ``k_rows_h`` rows or ``k_columns_h`` columns apart.
    """
    TMA: gl.constexpr = k_desc is not None
    COLLECTS: gl.constexpr = COLLECT != "none"
    RAGGED: gl.constexpr = cu_seqlens_q is not None
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    head = (gl.program_id(0) % num_kv_heads).to(gl.int64)
    tile = gl.program_id(0) // num_kv_heads
    slot = gl.program_id(1)
    slots = gl.num_programs(1)
    b = gl.program_id(2).to(gl.int64)

    first_row = None
    if RAGGED:
        lanes = gl.arange(0, 128, LANES)
        b, tile = tile_of(tile, lanes, cu_seqlens_q, num_requests, GROUP, BLOCK_M)
        first_row = gl.load(cu_seqlens_q + b)
        T = gl.load(cu_seqlens_q + b + 1) - first_row
        S = T
        first_row = first_row.to(gl.int64)
        if not COLLECTS:
            if tile * BLOCK_M >= T * GROUP:
                return
    length = gl.load(lengths + b * lengths_stride_b)
    if RAGGED:
        length = gl.where(T > 0, length, 0)  # who has no row collects nothing
    begin = 0
    if WINDOW and not COLLECTS:
        begin = gl.maximum(length - window, 0)  # no row sees a key before this one
    split_size = split_size_of(length - begin, splits, least, most, slots, BLOCK_N)
    begin += slot * split_size
    end = gl.minimum(begin + split_size, length)
    if COLLECTS:
        collected += b * collected_stride_b
        share = gl.cdiv(capacity - length, slots)  # all slots write what lies behind
        behind = length + slot * share
        fill_empty(
            collected, behind, gl.minimum(behind + share, capacity), head, tile, T,
            collected_stride_r, collected_stride_h, COLLECT, COLLECT_ROWS, GROUP, HEADS, BLOCK_M,
        )  # fmt: skip
    if ((slot > 0) & (begin >= length)) | (tile * BLOCK_M >= T * GROUP):
        return

    mask_row = tree_mask.to(gl.pointer_type(gl.int32), bitcast=True)
    mask_row += 2 * offset_of(b, first_row, mask_stride_b, mask_stride_t)
    # A tuple cannot hold None: flags say what is not there.
    page_row = lengths
    if block_table is not None:
        page_row = block_table + b * table_stride_b
    TRIMMED: gl.constexpr = depths is not None
    depth_row = None
    p_depths = lengths
    if TRIMMED:
        depth_row = depths + offset_of(b, first_row, depths_stride_b, 1)
        p_depths = depth_row
    SINKS: gl.constexpr = sinks is not None
    p_sinks = sinks if SINKS else lse
    p_collected = collected if COLLECTS else lse
    first_token = tile * BLOCK_M // GROUP
    tokens = gl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, T) - first_token
    # Of a chain's keys [tree_begin, tree_end) count: what some row of the tile sees.
    tree_end = gl.where(masked > 0, S, gl.minimum(S, first_token + tokens + S - T))
    tree_begin = 0
    highest = -1
    if WINDOW:
        t = (tile * BLOCK_M + gl.arange(0, BLOCK_M, LANES)) // GROUP
        depth = depth_of(t, t < T, T, S, depth_row, mask_row, mask_stride_t, masked)
        lower = length - window + depth
        highest = gl.max(gl.where(t < T, lower, -1), 0)
        if not COLLECTS:
            lowest = gl.min(gl.where(t < T, lower, 1 << 30), 0)
            begin = gl.maximum(begin, lowest + 1)
            tree_begin = gl.where(masked > 0, 0, gl.maximum(lowest + 1 - length, 0) // 32 * 32)
    keys = gl.maximum(end - begin, 0)
    tree_at = NOWHERE
    total = keys
    if end >= length:
        tree_at = gl.cdiv(keys, 32) * 32 - tree_begin  # below 0 if no row sees the prefix
        total = tree_at + tree_end
    tiles = gl.maximum(gl.cdiv(total, BLOCK_N), 1)

    shared = _allocate(q.dtype.element_ty, BLOCK_M, BLOCK_N, D, RING)
    slot_keys = (begin, keys, tree_at, keys // BLOCK_N, highest)
    mask = (mask_row, mask_stride_t, masked, S, window)
    out += slot.to(gl.int64) * out_stride_i + offset_of(b, first_row, out_stride_b, out_stride_t)
    lse += slot.to(gl.int64) * lse_stride_i + offset_of(b, first_row, lse_stride_b, lse_stride_t)
    q += offset_of(b, first_row, q_stride_b, q_stride_t)
    scoring = (0, 0, 0, p_collected)
    if COLLECT == "scores":
        parts = mean_query(
            q, head, T, q_stride_t, q_stride_h, q.dtype.element_ty, COLLECT_ROWS, GROUP, HEADS, D
        )
        if BLOCK_M > ROWS:  # the groups have no registers for them
            parts = in_shared(parts)
        else:  # partitions' arguments take the place of what a conversion of these still reads
            barrier()
        below = length - window - begin
        if WINDOW:
            below += deepest(T, S, depth_row, mask_row, mask_stride_t, masked, COLLECT_ROWS)
        scored = gl.where(tile == 0, keys, 0)
        scoring = (parts, scored, below, collected + head * collected_stride_h + begin)
    pointers = (q, p_sinks, p_depths, out, lse, p_collected)
    strides = (
        q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
        collected_stride_r, collected_stride_h,
    )  # fmt: skip
    has_sink = (slot == 0).to(gl.int32)
    IN_CACHE: gl.constexpr = k_tree is None
    p_k_tree = k_cache
    p_v_tree = v_cache
    if not IN_CACHE:
        p_k_tree = k_tree + offset_of(b, first_row, k_tree_stride_b, k_tree_stride_n)
        p_k_tree += head * k_tree_stride_h
        p_v_tree = v_tree + offset_of(b, first_row, v_tree_stride_b, v_tree_stride_n)
        p_v_tree += head * v_tree_stride_h
    k_source = (k_cache + head * k_stride_h, k_stride_b, k_stride_n, p_k_tree, k_tree_stride_n)
    v_source = (v_cache + head * v_stride_h, v_stride_b, v_stride_n, p_v_tree, v_tree_stride_n)
    h = head.to(gl.int32)
    places = (
        h * k_rows_h, k_rows_b, h * k_columns_h, h * v_rows_h, v_rows_b, h * v_columns_h,
    )  # fmt: skip
    lookup = (b, page_row, length, first_token, tokens)
    produced = (
        shared, (k_desc if TMA else b, v_desc if TMA else b), places, (k_source, v_source),
        slot_keys, mask, lookup, tiles,
    )  # fmt: skip
    consumed = (
        shared, pointers, slot_keys, mask, strides, scoring, (head, tile, has_sink, length, tiles),
        T, scale, softcap,
    )  # fmt: skip
    if BLOCK_M == ROWS:
        gl.warp_specialize(
            [
                (consume, (
                    consumed, 0, BLOCK_M, BLOCK_N, D, RING, GROUP, TMA, WINDOW, SOFTCAP, SINKS,
                    TRIMMED, COLLECT, COLLECT_ROWS,
                )),
                (produce, (produced, RING, TMA, PAGE_SIZE, IN_CACHE, WINDOW)),
            ],
            [WARPS],
            [REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (
                    consumed, 0, BLOCK_M, BLOCK_N, D, RING, GROUP, TMA, WINDOW, SOFTCAP, SINKS,
                    TRIMMED, COLLECT, COLLECT_ROWS,
                )),
                (consume, (
                    consumed, 1, BLOCK_M, BLOCK_N, D, RING, GROUP, TMA, WINDOW, SOFTCAP, SINKS,
                    TRIMMED, COLLECT, COLLECT_ROWS,
                )),
                (produce, (produced, RING, TMA, PAGE_SIZE, IN_CACHE, WINDOW)),
            ],
            [WARPS, WARPS],
            [CONSUMER_REGISTERS, REGISTERS],
        )  # fmt: skip
