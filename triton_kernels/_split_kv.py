"""The attention kernel of every primitive: split-KV flash attention over a prefix and a tree.

Rows
    The ``T * g`` query rows that share a KV head are packed, row ``r`` being token ``r // g`` and
    query head ``r % g`` of the group, and cut into tiles of ``BLOCK_M``: K and V are read once per
    tile, and a draft of few tokens fills a tensor-core tile. With ``PER_ROW`` each token has a list
    of keys of its own, and its ``g`` rows are ``PADDED`` to whole tiles.
Slots
    The grid is (tile and head, slot, request). A slot is one piece of the keys; it yields a
    normalised output and a natural log-sum-exp per row, and ``_combine`` merges the slots. The
    prefix is cut evenly into as many as the request's own length asks for (``split_size_of``);
    slot 0 begins with the sink and the tree. Slots that a request does not need return at once and
    are never read. Where the grid has one slot, it writes the result.
Ragged rows
    With ``cu_seqlens_q`` each request has its own number of rows, read on the device, and the grid
    has tiles for all rows together (``tile_of``). Only those that collect logits share them among
    the tiles of the longest request; there the tiles behind a request's last row return at once.
Softmax
    Masked logits are a real -inf; the only guard is that the running maximum counts as 0 while it
    is -inf. A key that no row of the tile may see is not read, so it may be NaN. Where rows see
    different keys (the tree, with a window also the first keys of the prefix), a value of NaN or
    infinity becomes 0, because 0 times that is NaN, and the logit of its key becomes NaN: a row
    that sees it says NaN throughout.
8 bits
    Few rows attend to a prefix of 8 bits by a loop of their own (`_pairs`).
Collecting
    One more dot of a few rows with the K tile that is already on chip. For logits these are the
    collected query rows; tile ``i`` takes the ``i``-th part of them. For scores it is the mean
    query, since ``mean_r(q_r . k) = (mean_r q_r) . k``, in 16-bit types as a sum of three parts
    that holds all 24 bits of it, so that rounding does not decide the ranking.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102

import triton
import triton.language as tl

from ._bfloat16 import cast
from ._blocks import (
    LOG2E,
    cache_rows,
    cap,
    dot_keys,
    finish,
    follow_previous,
    load_keys,
    load_wide,
    offset_of,
    softmax_step,
    split_size_of,
    tile_of,
)
from ._collect import collected_rows, fill_empty, scores_of
from ._eight_bits import scale_at, scale_of, times
from ._pairs import attend_pairs
from ._tree import attend_own, depth_of


# fmt: off
@triton.jit
def _attend_prefix(
    q, q_rest, m, l, acc, lower, b, begin, end,
    p_k, p_v, k_stride_b, k_stride_n, v_stride_b, v_stride_n, index_row, listed, page_row,
    k_scale, v_scale, scale_strides,
    q_collect, rest_collect, p_collect, ok_collect, lower_collect, scale, softcap,
    PAGE_SIZE: tl.constexpr, ALIKE: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTHS: tl.constexpr, BLOCK_N: tl.constexpr, COLLECT: tl.constexpr, DIFFER: tl.constexpr,
    ATTEND: tl.constexpr,
):
    # fmt: on
    """Collect of the prefix's keys [begin, end), if so, and ``ATTEND`` to them.

    Where rows ``DIFFER``, one sees those above its ``lower`` [M].
    """
    STAGES: tl.constexpr = 1 if DIFFER or not ATTEND else None
    # From 0: where a loop's start comes out of another loop, Triton forgets that rows are aligned.
    for n0 in tl.range(0, end - begin, BLOCK_N, num_stages=STAGES):
        n = begin + n0 + tl.arange(0, BLOCK_N)
        valid = n < end
        outer, inner = cache_rows(n, valid, b, index_row, listed, page_row, PAGE_SIZE)
        k_row = outer * k_stride_b + inner * k_stride_n
        v_row = k_row if ALIKE else outer * v_stride_b + inner * v_stride_n
        factor, vs = scale, None
        if k_scale is not None:
            ks = scale_of(k_scale, outer, inner, valid, scale_strides[0], scale_strides[1])
            factor = times(scale, ks, 1)
        if v_scale is not None:
            vs = scale_of(v_scale, outer, inner, valid, scale_strides[2], scale_strides[3])
        k, k_rest, v = load_keys(
            p_k + k_row, p_v + v_row, valid, vs, q.dtype, FORM, NATIVE, WIDTHS
        )
        if COLLECT != "none":
            if COLLECT == "scores":
                s = scores_of(q_collect, rest_collect, k, k_rest)
            else:
                s = dot_keys(q_collect, rest_collect, k, k_rest)  # [C, N]
            s = cap(s * factor, softcap, SOFTCAP)
            if WINDOW:
                s = tl.where(n[None, :] > lower_collect[:, None], s, float("-inf"))
            p = p_collect[:, None] + n[None, :]
            tl.store(p, cast(s, p.dtype.element_ty), mask=ok_collect[:, None] & valid[None, :])
        if ATTEND:
            visible = valid[None, :]
            if DIFFER:
                visible = visible & (n[None, :] > lower[:, None])
            m, l, acc = softmax_step(
                q, q_rest, k, k_rest, v, visible, m, l, acc, factor, softcap, SOFTCAP, vs, DIFFER
            )
    return m, l, acc


@triton.jit
def _nothing(sinks, h, row_ok, t, slot, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the softmax of no key but the sink, which has this logit and the value 0."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks is not None:
        m = tl.load(sinks + h, mask=row_ok & (tl.zeros_like(t) == slot), other=float("-inf"))
        m = m.to(tl.float32) * LOG2E
    return m, tl.where(m == float("-inf"), 0.0, 1.0), tl.zeros([BLOCK_M, BLOCK_V], tl.float32)


# All that varies from call to call, so that no call in the middle of decoding compiles. The others
# decide how wide loads and stores are: they are multiples of 16 or not by the model alone.
VARYING = [
    "lengths", "indices", "block_table", "tree_mask", "depths", "cu_seqlens_q", "cache_seqlens",
    "sinks", "lse", "masked", "T", "S", "capacity", "splits", "least", "most", "window",
    "num_kv_heads", "num_requests",
    "lengths_stride_b", "lengths_stride_l", "indices_stride_b", "indices_stride_l",
    "table_stride_b", "mask_stride_b", "mask_stride_t", "depths_stride_b", "cache_seqlens_stride_b",
    "lse_stride_i", "lse_stride_b", "lse_stride_t", "lse_stride_h",
    "k_scale", "v_scale", "k_scale_stride_b", "k_scale_stride_n", "k_scale_stride_h",
    "v_scale_stride_b", "v_scale_stride_n", "v_scale_stride_h",
]  # fmt: skip


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def split_kv_kernel(
    q, k_cache, v_cache, lengths, indices, block_table, k_tree, v_tree, tree_mask, depths,
    cu_seqlens_q, cache_seqlens, sinks, k_scale, v_scale, out, lse, collected,
    scale, softcap, masked, T, S, capacity, splits, least, most, window, num_kv_heads, num_requests,
    q_stride_b, q_stride_t, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h,
    k_scale_stride_b, k_scale_stride_n, k_scale_stride_h,
    v_scale_stride_b, v_scale_stride_n, v_scale_stride_h,
    lengths_stride_b, lengths_stride_l, indices_stride_b, indices_stride_l, table_stride_b,
    k_tree_stride_b, k_tree_stride_n, k_tree_stride_h,
    v_tree_stride_b, v_tree_stride_n, v_tree_stride_h,
    mask_stride_b, mask_stride_t, depths_stride_b, cache_seqlens_stride_b,
    out_stride_i, out_stride_b, out_stride_t, out_stride_h,
    lse_stride_i, lse_stride_b, lse_stride_t, lse_stride_h,
    collected_stride_b, collected_stride_r, collected_stride_h,
    WIDTHS: tl.constexpr, GROUP: tl.constexpr, PER_ROW: tl.constexpr, PADDED: tl.constexpr,
    PREFIX: tl.constexpr, TREE: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIKE: tl.constexpr,
    FORM: tl.constexpr, NATIVE: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    COLLECT: tl.constexpr, COLLECT_ROWS: tl.constexpr, TREE_STAGES: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Compute one slot's state of one tile of rows; see the module for the plan."""
    follow_previous(PDL)
    head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    tile = tl.program_id(0) // num_kv_heads
    slot = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)

    first_row = None
    RAGGED: tl.constexpr = cu_seqlens_q is not None
    if RAGGED:
        if COLLECT != "logits":
            lanes = tl.arange(0, 128)
            b, tile = tile_of(tile, lanes, cu_seqlens_q, num_requests, PADDED, BLOCK_M)
        first_row = tl.load(cu_seqlens_q + b)
        T = tl.load(cu_seqlens_q + b + 1) - first_row
        S = T
        first_row = first_row.to(tl.int64)
        if COLLECT == "none":
            if tile * BLOCK_M >= T * PADDED:
                return
    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    t = r // PADDED
    h = head * GROUP + r % PADDED
    row_ok = t < T
    if PADDED != GROUP:
        row_ok = row_ok & (r % PADDED < GROUP)
    own_list = head
    if PER_ROW:
        own_list = (tile * BLOCK_M // PADDED).to(tl.int64)
        if RAGGED:
            own_list += first_row  # of all requests' rows, without a stride over requests
    q += offset_of(b, first_row, q_stride_b, q_stride_t)
    index_row = indices
    if indices is not None:
        index_row = indices + b * indices_stride_b + own_list * indices_stride_l
    page_row = block_table
    if block_table is not None:
        page_row = block_table + b * table_stride_b
    depth_row = depths
    if depths is not None:
        depth_row = depths + offset_of(b, first_row, depths_stride_b, 1)
    TRIMMED: tl.constexpr = depths is not None
    mask_row = None
    whole_mask = None  # which says how deep a row is
    if TREE == "mask":
        mask_row = tree_mask.to(tl.pointer_type(tl.int32), bitcast=True)
        mask_row += 2 * offset_of(b, first_row, mask_stride_b, mask_stride_t)
        if WINDOW:
            whole_mask = mask_row

    length = 0
    begin = 0
    end = 0
    past = False
    depth = None
    lower = None
    listed = None
    if PREFIX:
        length = tl.load(lengths + b * lengths_stride_b + own_list * lengths_stride_l)
        if cache_seqlens is not None:
            listed = length
            whole = tl.load(cache_seqlens + b * cache_seqlens_stride_b)
            length = tl.where(listed < 0, whole, listed)
        if RAGGED:
            length = tl.where(T > 0, length, 0)  # who has no row collects nothing
        if WINDOW and COLLECT == "none":
            begin = tl.maximum(length - window, 0)  # no row sees a key before this one
        slots = tl.num_programs(1)
        split_size = split_size_of(length - begin, splits, least, most, slots, BLOCK_N)
        begin += slot * split_size
        end = tl.minimum(begin + split_size, length)
        past = (slot > 0) & (begin >= length)
    split_begin = begin
    if WINDOW:
        depth = depth_of(t, row_ok, T, S, depth_row, whole_mask, mask_stride_t, masked)
        lower = length - window + depth
        begin = tl.maximum(begin, tl.min(tl.where(row_ok, lower, length), 0) + 1)

    q_collect = None
    rest_collect = None
    p_collect = None
    ok_collect = None
    lower_collect = None
    if COLLECT != "none":
        q_collect, rest_collect, offset, ok_collect, lower_collect = collected_rows(
            q, head, tile, T, S, depth_row, whole_mask, mask_stride_t, masked,
            q_stride_t, q_stride_h, collected_stride_r, collected_stride_h,
            COLLECT, COLLECT_ROWS, RAGGED, GROUP, WIDTHS, BLOCK_C,
        )  # fmt: skip
        if WIDTHS[2] == 0:
            rest_collect = None
        p_collect = collected + b * collected_stride_b + offset
        if WINDOW:
            lower_collect += length - window
            first = tl.min(tl.where(ok_collect, lower_collect, length), 0) + 1
            begin = tl.maximum(split_begin, tl.minimum(begin, first))
        fill_empty(p_collect, ok_collect, split_begin, tl.minimum(begin, end), BLOCK_N)
        share = tl.cdiv(capacity - length, tl.num_programs(1))  # all slots write what lies behind
        begin_behind = length + slot * share
        end_behind = tl.minimum(begin_behind + share, capacity)
        fill_empty(p_collect, ok_collect, begin_behind, end_behind, BLOCK_N)
        if RAGGED:
            collects = tl.max(ok_collect.to(tl.int32), 0)
            past = past | ((tile * BLOCK_M >= T * GROUP) & (collects == 0))
    if past:
        return

    if k_scale is not None:
        k_scale = scale_at(k_scale, head, k_scale_stride_h, k_scale_stride_n)
    if v_scale is not None:
        v_scale = scale_at(v_scale, head, v_scale_stride_h, v_scale_stride_n)
    scale_strides = (k_scale_stride_b, k_scale_stride_n, v_scale_stride_b, v_scale_stride_n)
    p_q = q + t.to(tl.int64) * q_stride_t + h * q_stride_h
    q_tile, q_rest = load_wide(p_q, row_ok, WIDTHS[0], WIDTHS[1], WIDTHS[2])
    if WIDTHS[2] == 0:
        q_rest = None
    DV: tl.constexpr = WIDTHS[3]
    BLOCK_V: tl.constexpr = WIDTHS[4] if WIDTHS[4] else WIDTHS[1]
    IN_CACHE: tl.constexpr = k_tree is None
    TREE_FORM: tl.constexpr = FORM if IN_CACHE else ""
    # With 32 keys 64 rows of 4 warps spill on sm_90 beside what takes many registers.
    MUCH: tl.constexpr = COLLECT == "logits" or (WINDOW and SOFTCAP)
    LESS: tl.constexpr = MUCH and BLOCK_M == 64
    # So do 32 rows of latents, and 8 bits at the edge of a window with 64 keys.
    LATENT: tl.constexpr = WIDTHS[1] > 256
    MOST: tl.constexpr = 16 if LESS or LATENT else 32
    BLOCK_J: tl.constexpr = BLOCK_N if TREE == "chain" else min(BLOCK_N, MOST)
    BLOCK_E: tl.constexpr = min(BLOCK_N, MOST) if LATENT or FORM != "" else BLOCK_N
    k_own = k_cache if IN_CACHE else k_tree
    v_own = v_cache if IN_CACHE else v_tree
    m, l, acc = _nothing(sinks, h, row_ok, t, slot, BLOCK_M, BLOCK_V)
    if TREE != "none":
        if slot == 0:
            m, l, acc = attend_own(
                q_tile, q_rest, m, l, acc, t, row_ok, depth, b, first_row, T, S, length,
                window, k_own, v_own, head,
                k_tree_stride_b, k_tree_stride_n, k_tree_stride_h,
                v_tree_stride_b, v_tree_stride_n, v_tree_stride_h,
                page_row, mask_row, mask_stride_t, masked,
                k_scale, v_scale, scale_strides, scale, softcap,
                TREE, IN_CACHE, PAGE_SIZE, ALIKE, TREE_FORM, NATIVE, WINDOW, TRIMMED, SOFTCAP,
                WIDTHS, BLOCK_J, TREE_STAGES,
            )  # fmt: skip
    if PREFIX:
        if WINDOW:  # of whose first keys rows see different ones
            highest = tl.max(tl.where(row_ok, lower, begin - 1), 0)
            tiles = tl.cdiv(tl.maximum(highest + 1 - begin, 0), BLOCK_N)
            differing = tl.minimum(begin + tiles * BLOCK_N, end)
            if COLLECT != "none":  # apart from the rest, beside which logits would spill
                _attend_prefix(
                    q_tile, q_rest, m, l, acc, lower, b, begin, differing,
                    k_cache + head * k_stride_h, v_cache + head * v_stride_h,
                    k_stride_b, k_stride_n, v_stride_b, v_stride_n, index_row, listed, page_row,
                    k_scale, v_scale, scale_strides,
                    q_collect, rest_collect, p_collect, ok_collect, lower_collect, scale, softcap,
                    PAGE_SIZE, ALIKE, FORM, NATIVE, WINDOW, SOFTCAP, WIDTHS, BLOCK_N, COLLECT,
                    False, False,
                )  # fmt: skip
            m, l, acc = _attend_prefix(
                q_tile, q_rest, m, l, acc, lower, b, begin, differing,
                k_cache + head * k_stride_h, v_cache + head * v_stride_h,
                k_stride_b, k_stride_n, v_stride_b, v_stride_n, index_row, listed, page_row,
                k_scale, v_scale, scale_strides,
                q_collect, rest_collect, p_collect, ok_collect, lower_collect, scale, softcap,
                PAGE_SIZE, ALIKE, FORM, NATIVE, WINDOW, SOFTCAP, WIDTHS, BLOCK_E, "none",
                True, True,
            )  # fmt: skip
            begin = tl.maximum(begin, differing)
        if PAIRS:
            m, l, acc = attend_pairs(
                q_tile, m, l, acc, b, begin, end,
                k_cache + head * k_stride_h, v_cache + head * v_stride_h,
                k_stride_b, k_stride_n, v_stride_b, v_stride_n, index_row, listed, page_row,
                k_scale, v_scale, scale_strides, scale,
                PAGE_SIZE, ALIKE, FORM, NATIVE, PTX, WIDTHS, BLOCK_N,
            )  # fmt: skip
        else:
            m, l, acc = _attend_prefix(
                q_tile, q_rest, m, l, acc, lower, b, begin, end,
                k_cache + head * k_stride_h, v_cache + head * v_stride_h,
                k_stride_b, k_stride_n, v_stride_b, v_stride_n, index_row, listed, page_row,
                k_scale, v_scale, scale_strides,
                q_collect, rest_collect, p_collect, ok_collect, lower_collect, scale, softcap,
                PAGE_SIZE, ALIKE, FORM, NATIVE, WINDOW, SOFTCAP, WIDTHS, BLOCK_N, COLLECT,
                False, True,
            )  # fmt: skip

    state_out, state_lse = finish(m, l, acc)
    d = tl.arange(0, BLOCK_V)
    out += slot.to(tl.int64) * out_stride_i + offset_of(b, first_row, out_stride_b, out_stride_t)
    lse += slot.to(tl.int64) * lse_stride_i + offset_of(b, first_row, lse_stride_b, lse_stride_t)
    p_out = (out + t.to(tl.int64) * out_stride_t + h * out_stride_h)[:, None] + d[None, :]
    p_lse = lse + t * lse_stride_t + h * lse_stride_h
    mask = row_ok[:, None] & (d < DV)[None, :]
    tl.store(p_out, cast(state_out, out.dtype.element_ty), mask=mask)
    tl.store(p_lse, state_lse, mask=row_ok)
