"""The attention kernel of every primitive: split-KV flash attention over a prefix and a tree.

Rows
    The ``T * g`` query rows that share a KV head are packed, row ``r`` being token ``r // g`` and
    query head ``r % g`` of the group, and cut into tiles of ``BLOCK_M``: K and V are read once per
    tile, and a draft of few tokens fills a tensor-core tile.
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
    is -inf. A key that no row of the tile may see is not read, so it may be NaN.
Collecting
    One more dot of a few rows with the K tile that is already on chip. For logits these are the
    collected query rows; tile ``i`` takes the ``i``-th part of them. For scores it is the mean
    query, since ``mean_r(q_r . k) = (mean_r q_r) . k``, in 16-bit types as a sum of three parts
    that holds all 24 bits of it, so that rounding does not decide the ranking.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102

import torch
import triton
import triton.language as tl

from . import _configs
from ._bfloat16 import cast
from ._blocks import (
    LOG2E,
    cache_rows,
    cap,
    depth_of,
    dot_keys,
    fill_empty,
    finish,
    load_rows,
    lowest_bits,
    offset_of,
    softmax_step,
    split_in_three,
    split_size_of,
    tile_of,
)
from ._combine import combine
from ._launch import launch, strides


# fmt: off
@triton.jit
def _collected_rows(
    q, head, tile, T, S, depth_row,
    q_stride_t, q_stride_h, collected_stride_r, collected_stride_h,
    COLLECT: tl.constexpr, ROWS: tl.constexpr, RAGGED: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # fmt: on
    """Return what is collected: (queries [C, D], output offsets, which exist, their depths).

    ``ROWS`` are tokens, negative ones counted from ``T``. Of scores there is one row per KV head,
    as deep as the deepest of its tokens, because a key must be visible to all of them. Ragged
    requests may have no token at all.
    """
    c = tl.arange(0, BLOCK_C)
    if COLLECT == "scores":
        total = tl.zeros([BLOCK_D], tl.float32)
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
            p_q = q + t * q_stride_t + (head * GROUP + c) * q_stride_h
            total += tl.sum(load_rows(p_q, ok, D, BLOCK_D).to(tl.float32), 0)
            depth = tl.maximum(depth, depth_of(t, some, T, S, depth_row))
        queries = split_in_three(total / (len(ROWS) * GROUP), q.dtype.element_ty)
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
        depth = depth_of(t, some, T, S, depth_row)
        queries = load_rows(q + t * q_stride_t + h * q_stride_h, some, D, BLOCK_D)
        offset = (c // GROUP).to(tl.int64) * collected_stride_r + h * collected_stride_h
    return queries, offset, ok, depth


# fmt: off
@triton.jit
def _attend_prefix(
    q, m, l, acc, lower, b, begin, end,
    p_k, p_v, k_stride_b, k_stride_n, v_stride_b, v_stride_n, index_row, listed, page_row,
    q_collect, p_collect, ok_collect, lower_collect, scale, softcap,
    PAGE_SIZE: tl.constexpr, ALIKE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    COLLECT: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # fmt: on
    """Attend to the prefix's keys [begin, end); a row sees those above its ``lower`` [M]."""
    BLOCK_D: tl.constexpr = q.shape[1]
    for n0 in tl.range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        valid = n < end
        outer, inner = cache_rows(n, valid, b, index_row, listed, page_row, PAGE_SIZE)
        k_row = outer * k_stride_b + inner * k_stride_n
        v_row = k_row if ALIKE else outer * v_stride_b + inner * v_stride_n
        k = load_rows(p_k + k_row, valid, D, BLOCK_D)
        v = load_rows(p_v + v_row, valid, D, BLOCK_D)
        if COLLECT != "none":
            s = dot_keys(q_collect, k)  # [C, N]
            if COLLECT == "scores":
                s = tl.sum(s, 0)[None, :]
            s = cap(s * scale, softcap, SOFTCAP)
            if WINDOW:
                s = tl.where(n[None, :] > lower_collect[:, None], s, float("-inf"))
            p = p_collect[:, None] + n[None, :]
            tl.store(p, cast(s, p.dtype.element_ty), mask=ok_collect[:, None] & valid[None, :])
        visible = valid[None, :]
        if WINDOW:
            visible = visible & (n[None, :] > lower[:, None])
        m, l, acc = softmax_step(q, k, v, visible, m, l, acc, scale, softcap, SOFTCAP)
    return m, l, acc


# fmt: off
@triton.jit
def _attend_tree(
    q, m, l, acc, t, row_ok, b, first_row, T, S, length, window,
    p_k, p_v, k_stride_b, k_stride_n, v_stride_b, v_stride_n, page_row, mask_row, masked,
    scale, softcap,
    IN_CACHE: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIKE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_J: tl.constexpr,
):
    # fmt: on
    """Attend to the tree's keys [0, S): if ``masked`` those in the row's mask, else the chain's.

    A mask is trimmed to the window already. ``BLOCK_J`` keys share one 32-bit word of it.
    """
    BLOCK_D: tl.constexpr = q.shape[1]
    last = tl.where(row_ok, t + S - T, -1)
    listed = row_ok & (tl.zeros_like(t) < masked)
    end = tl.where(masked > 0, S, tl.max(last, 0) + 1)
    for j0 in tl.range(0, end, BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        valid = j < end
        word = tl.load(mask_row + j0 // 32, mask=listed, other=0)
        first = j0 // 32 * 32  # of the word
        chain = lowest_bits(last + 1 - first)
        if WINDOW:
            chain = chain & ~lowest_bits(last + 1 - window - first)
        word = tl.where(listed, word, chain)
        visible = (((word[:, None] >> (j % 32)[None, :]) & 1) != 0) & valid[None, :]
        # A node that no row sees may hold anything, as padding nodes do.
        valid = valid & (tl.max(visible.to(tl.int32), 0) != 0)
        if IN_CACHE:
            outer, inner = cache_rows(length + j, valid, b, None, None, page_row, PAGE_SIZE)
            k_row = outer * k_stride_b + inner * k_stride_n
            v_row = k_row if ALIKE else outer * v_stride_b + inner * v_stride_n
        else:
            inner = j.to(tl.int64)
            k_row = offset_of(b, first_row, k_stride_b, k_stride_n) + inner * k_stride_n
            v_row = k_row
            if not ALIKE:
                v_row = offset_of(b, first_row, v_stride_b, v_stride_n) + inner * v_stride_n
        k = load_rows(p_k + k_row, valid, D, BLOCK_D)
        v = load_rows(p_v + v_row, valid, D, BLOCK_D)
        m, l, acc = softmax_step(q, k, v, visible, m, l, acc, scale, softcap, SOFTCAP)
    return m, l, acc


# All that varies from call to call, so that no call in the middle of decoding compiles. The others
# decide how wide loads and stores are: they are multiples of 16 or not by the model alone.
VARYING = [
    "lengths", "indices", "block_table", "tree_mask", "depths", "cu_seqlens_q", "cache_seqlens",
    "sinks", "lse", "masked", "T", "S", "capacity", "splits", "least", "most", "window",
    "num_kv_heads", "num_requests",
    "lengths_stride_b", "lengths_stride_h", "indices_stride_b", "indices_stride_h",
    "table_stride_b", "mask_stride_b", "mask_stride_t", "depths_stride_b", "cache_seqlens_stride_b",
    "lse_stride_i", "lse_stride_b", "lse_stride_t", "lse_stride_h",
]  # fmt: skip


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def split_kv_kernel(
    q, k_cache, v_cache, lengths, indices, block_table, k_tree, v_tree, tree_mask, depths,
    cu_seqlens_q, cache_seqlens, sinks, out, lse, collected,
    scale, softcap, masked, T, S, capacity, splits, least, most, window, num_kv_heads, num_requests,
    q_stride_b, q_stride_t, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h,
    lengths_stride_b, lengths_stride_h, indices_stride_b, indices_stride_h, table_stride_b,
    k_tree_stride_b, k_tree_stride_n, k_tree_stride_h,
    v_tree_stride_b, v_tree_stride_n, v_tree_stride_h,
    mask_stride_b, mask_stride_t, depths_stride_b, cache_seqlens_stride_b,
    out_stride_i, out_stride_b, out_stride_t, out_stride_h,
    lse_stride_i, lse_stride_b, lse_stride_t, lse_stride_h,
    collected_stride_b, collected_stride_r, collected_stride_h,
    D: tl.constexpr, GROUP: tl.constexpr, PREFIX: tl.constexpr, TREE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ALIKE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    COLLECT: tl.constexpr, COLLECT_ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # fmt: on
    """Compute one slot's state of one tile of rows; see the module for the plan."""
    head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    tile = tl.program_id(0) // num_kv_heads
    slot = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)

    first_row = None
    RAGGED: tl.constexpr = cu_seqlens_q is not None
    if RAGGED:
        if COLLECT != "logits":
            b, tile = tile_of(tile, cu_seqlens_q, num_requests, GROUP, BLOCK_M)
        first_row = tl.load(cu_seqlens_q + b)
        T = tl.load(cu_seqlens_q + b + 1) - first_row
        S = T
        first_row = first_row.to(tl.int64)
        if COLLECT == "none":
            if tile * BLOCK_M >= T * GROUP:
                return
    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    t = r // GROUP
    h = head * GROUP + r % GROUP
    row_ok = t < T
    q += offset_of(b, first_row, q_stride_b, q_stride_t)
    index_row = indices
    if indices is not None:
        index_row = indices + b * indices_stride_b + head * indices_stride_h
    page_row = block_table
    if block_table is not None:
        page_row = block_table + b * table_stride_b
    depth_row = depths
    if depths is not None:
        depth_row = depths + offset_of(b, first_row, depths_stride_b, 1)

    length = 0
    begin = 0
    end = 0
    past = False
    lower = None
    listed = None
    if PREFIX:
        length = tl.load(lengths + b * lengths_stride_b + head * lengths_stride_h)
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
        lower = length - window + depth_of(t, row_ok, T, S, depth_row)
        begin = tl.maximum(begin, tl.min(tl.where(row_ok, lower, length), 0) + 1)

    q_collect = None
    p_collect = None
    ok_collect = None
    lower_collect = None
    if COLLECT != "none":
        q_collect, offset, ok_collect, lower_collect = _collected_rows(
            q, head, tile, T, S, depth_row,
            q_stride_t, q_stride_h, collected_stride_r, collected_stride_h,
            COLLECT, COLLECT_ROWS, RAGGED, GROUP, D, BLOCK_C, BLOCK_D,
        )  # fmt: skip
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

    q_tile = load_rows(q + t * q_stride_t + h * q_stride_h, row_ok, D, BLOCK_D)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks is not None:  # a key with this logit and the value 0
        m = tl.load(sinks + h, mask=row_ok & (tl.zeros_like(t) == slot), other=float("-inf"))
        m = m.to(tl.float32) * LOG2E
    l = tl.where(m == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if TREE:
        if slot == 0:
            # Read as 32-bit words, which take half the registers.
            mask_row = tree_mask.to(tl.pointer_type(tl.int32), bitcast=True)
            mask_row += 2 * (
                offset_of(b, first_row, mask_stride_b, mask_stride_t) + t * mask_stride_t
            )
            IN_CACHE: tl.constexpr = k_tree is None
            # With 32 keys 64 rows of 4 warps spill on sm_90 beside what takes many registers.
            MUCH: tl.constexpr = COLLECT == "logits" or (WINDOW and SOFTCAP)
            LESS: tl.constexpr = MUCH and BLOCK_M == 64
            BLOCK_J: tl.constexpr = min(BLOCK_N, 16 if LESS else 32)
            m, l, acc = _attend_tree(
                q_tile, m, l, acc, t, row_ok, b, first_row, T, S, length, window,
                (k_cache if IN_CACHE else k_tree) + head * k_tree_stride_h,
                (v_cache if IN_CACHE else v_tree) + head * v_tree_stride_h,
                k_tree_stride_b, k_tree_stride_n, v_tree_stride_b, v_tree_stride_n,
                page_row, mask_row, masked, scale, softcap,
                IN_CACHE, PAGE_SIZE, ALIKE, WINDOW, SOFTCAP, D, BLOCK_J,
            )  # fmt: skip
    if PREFIX:
        m, l, acc = _attend_prefix(
            q_tile, m, l, acc, lower, b, begin, end,
            k_cache + head * k_stride_h, v_cache + head * v_stride_h,
            k_stride_b, k_stride_n, v_stride_b, v_stride_n, index_row, listed, page_row,
            q_collect, p_collect, ok_collect, lower_collect, scale, softcap,
            PAGE_SIZE, ALIKE, WINDOW, SOFTCAP, COLLECT, D, BLOCK_N,
        )  # fmt: skip

    state_out, state_lse = finish(m, l, acc)
    d = tl.arange(0, BLOCK_D)
    out += slot.to(tl.int64) * out_stride_i + offset_of(b, first_row, out_stride_b, out_stride_t)
    lse += slot.to(tl.int64) * lse_stride_i + offset_of(b, first_row, lse_stride_b, lse_stride_t)
    p_out = (out + t * out_stride_t + h * out_stride_h)[:, None] + d[None, :]
    p_lse = lse + t * lse_stride_t + h * lse_stride_h
    mask = row_ok[:, None] & (d < D)[None, :]
    tl.store(p_out, cast(state_out, out.dtype.element_ty), mask=mask)
    tl.store(p_lse, state_lse, mask=row_ok)


def attend(
    q,
    k_cache,
    v_cache,
    lengths,
    out,
    lse,
    *,
    softmax_scale,
    softcap=0.0,
    tree=True,
    k_tree=None,
    v_tree=None,
    tree_mask=None,
    depths=None,
    block_table=None,
    indices=None,
    window=None,
    sinks=None,
    collect="none",
    collect_rows=(),
    collected=None,
    cache_seqlens=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
):
    """Launch the family for one primitive: the split-KV kernel, then the combine if it is needed.

    Parameters
    ----------
    k_cache, v_cache, lengths
        The prefix and how many keys of it count, [B, 1 or Hk]: cached tokens, or with ``indices``
        selected ones. ``None`` where there is only a tree.
    tree, k_tree, v_tree
        Whether there is a tree, and its keys [B, S, Hk, D]; without these they are the ``T`` cache
        entries behind the prefix.
    indices
        Selected positions [B, 1 or Hk, K].
    collected
        [B, R, Hq, N] for ``collect="logits"``, [B, Hk, N] for "scores"; N the cache's capacity.
    cache_seqlens
        [B]: with it a length of -1 stands for that many cached keys, whatever ``indices`` say.
    cu_seqlens_q, max_seqlen_q
        [B + 1]: where each request's rows begin and end, at most so many. Then ``q``, ``out`` and
        ``lse``, the tree's keys, mask and depths have rows [tokens] instead of [B, T].
    """
    if cu_seqlens_q is not None:
        rows = (q, out, lse, k_tree, v_tree, tree_mask, depths)
        q, out, lse, k_tree, v_tree, tree_mask, depths = (x if x is None else x[None] for x in rows)
    batches, tokens, heads, D = q.shape
    B, T = batches, tokens
    if cu_seqlens_q is not None:
        B, T = cu_seqlens_q.shape[0] - 1, max_seqlen_q
    prefix = k_cache is not None
    kv_heads = (k_cache if prefix else k_tree).shape[2]
    group = heads // kv_heads
    page_size = k_cache.shape[1] if block_table is not None else 0
    capacity = 0
    if prefix and (indices is None or cache_seqlens is not None):
        capacity = block_table.shape[1] * page_size if page_size else k_cache.shape[1]
    if indices is not None:
        capacity = max(capacity, indices.shape[2])
    span = capacity if window is None or collected is not None else min(window, capacity)

    lookups = (block_table is not None) + (indices is not None)
    config = _configs.attention_config(q.device, q.dtype, T * group, D, lookups)
    tiles = triton.cdiv(T * group, config.block_m)
    requests, num_requests = B, None
    if cu_seqlens_q is not None:
        num_requests = B
        if collect != "logits":
            tiles, requests = tokens * group // config.block_m + B, 1
    programs = kv_heads * min(requests * tiles, triton.cdiv(B * T * group, config.block_m))
    state_bytes = 4 * batches * tokens * heads * (D + 1)
    splits = _configs.splits(q.device, config, programs, span, state_bytes)
    slots = splits.slots
    direct = slots == 1
    if direct:
        states, state_lses = out[None], lse[None]
    else:
        shape = (slots, batches, tokens, heads)
        states = torch.empty((*shape, D), dtype=torch.float32, device=q.device)
        state_lses = torch.empty(shape, dtype=torch.float32, device=q.device)
    block_c = group
    if collect == "logits":
        block_c = max(16, triton.cdiv(len(collect_rows) * group, tiles))
    cache_strides = strides(k_cache)[:3] + strides(v_cache)[:3] if prefix else (0,) * 6
    has_tree_keys = k_tree is not None
    tree_strides = strides(k_tree)[:3] + strides(v_tree)[:3] if has_tree_keys else cache_strides
    # K and V nearly always lie alike: then one set of addresses serves both.
    alike = cache_strides[:3] == cache_strides[3:] and tree_strides[:3] == tree_strides[3:]
    masked = tree_mask is not None
    if tree and not masked:  # a chain runs the same kernel, and needs a pointer for it
        tree_mask = torch.empty((1, 1, 1), dtype=torch.int64, device=q.device)
    launch(
        split_kv_kernel, (kv_heads * tiles, slots, requests),
        q, k_cache, v_cache, lengths, indices, block_table, k_tree, v_tree, tree_mask, depths,
        cu_seqlens_q, cache_seqlens, sinks, states, state_lses, collected,
        softmax_scale, softcap, int(masked), T, k_tree.shape[1] if has_tree_keys else T,
        capacity, splits.wanted, splits.least, splits.most, window or 0, kv_heads, num_requests,
        *strides(q)[:3],
        *cache_strides,
        *(strides(lengths) if prefix else (0, 0)),
        *(strides(indices)[:2] if indices is not None else (0, 0)),
        block_table.stride(0) if page_size else 0,
        *tree_strides,
        *(strides(tree_mask)[:2] if tree_mask is not None else (0, 0)),
        strides(depths)[0] if depths is not None else 0,
        cache_seqlens.stride(0) if cache_seqlens is not None else None,
        *strides(states)[:4],
        *strides(state_lses),
        *_collected_strides(collected),
        D=D,
        GROUP=group,
        PREFIX=prefix,
        TREE=tree,
        PAGE_SIZE=page_size,
        ALIKE=alike,
        WINDOW=window is not None,
        SOFTCAP=softcap > 0,
        COLLECT=collect,
        COLLECT_ROWS=tuple(collect_rows),
        BLOCK_C=triton.next_power_of_2(block_c),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=config.block_d,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **config.options,
    )  # fmt: skip
    if not direct:
        combine(
            states,
            state_lses,
            out,
            lse,
            lengths=lengths,
            splits=splits,
            span=span,
            unit=config.block_n,
            cache_seqlens=cache_seqlens,
            cu_seqlens_q=cu_seqlens_q,
        )


def _collected_strides(collected):
    """Return the strides over requests, rows and heads; scores have no rows."""
    if collected is None:
        return 0, 0, 0
    if collected.dim() == 3:
        return collected.stride(0), 0, collected.stride(1)
    return collected.stride()[:3]
