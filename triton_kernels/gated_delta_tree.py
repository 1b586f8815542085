"""The gated delta rule over a tree: a program for each request, head and block of value columns.

A program reads its block of the state once. What all rows' keys and queries say to it are two
products; then rows are solved in order: one that is final is taken out of those below it, weighed
by the product of its key with theirs and by what has decayed between the two. Between two nodes of
a path g is summed anew, of numbers that are at most 0, so nothing cancels. Other nodes are left out
by selection, not by a factor of 0: they may be NaN.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102

import triton
import triton.language as tl

from . import _sizes
from ._bfloat16 import cast, dot
from ._launch import launch
from ._states import MOST_ROWS, parents_of, paths_of, row_strides, rows_of

VARYING = [
    "parents", "cu_seqlens_q", "T", "query_scale", "parents_stride_b", "g_stride_b",
    "beta_stride_b", "stash_stride_b",
]  # fmt: skip


@triton.jit
def _column(x, here):
    """Return the column [T] of x [T, T] at which ``here`` [T] is true."""
    return tl.sum(tl.where(here[None, :], x, 0.0), 1)


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def gated_delta_kernel(
    q, k, v, g, beta, state, parents, cu_seqlens_q, out, stash, T, query_scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    v_stride_b, v_stride_t, v_stride_h, g_stride_b, g_stride_t, beta_stride_b, beta_stride_t,
    state_stride_b, state_stride_h, state_stride_k, parents_stride_b,
    out_stride_b, out_stride_t, out_stride_h, stash_stride_b, stash_stride_t, stash_stride_h,
    GROUP: tl.constexpr, L2_NORM: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):
    # fmt: on
    """Compute a block of columns of a head's outputs and updates, and a share of its stash."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    first, T = rows_of(b, cu_seqlens_q, T)
    if T <= 0:
        return
    i = tl.arange(0, BLOCK_T)
    row_ok = i < T
    row = first + i
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    column_ok = column < V_DIM
    ok = row_ok[:, None] & column_ok[None, :]
    p_q = q + b * q_stride_b + head // GROUP * q_stride_h + row[:, None] * q_stride_t
    p_k = k + b * k_stride_b + head // GROUP * k_stride_h + row[:, None] * k_stride_t
    p_state = state + b * state_stride_b + head * state_stride_h + column[None, :]
    p_stash = stash + b * stash_stride_b + head * stash_stride_h + row[:, None] * stash_stride_t

    known = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)  # S^T k, then what becomes d
    said = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)  # S^T q, then what becomes the output
    keys = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)  # of rows by keys
    queries = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    k_size = tl.zeros([BLOCK_T], tl.float32)
    q_size = tl.zeros([BLOCK_T], tl.float32)
    for c0 in tl.range(0, K_DIM, BLOCK_K):
        c = c0 + tl.arange(0, BLOCK_K)
        given = row_ok[:, None] & (c < K_DIM)[None, :]
        kc = tl.load(p_k + c[None, :], mask=given, other=0.0).to(tl.float32)
        qc = tl.load(p_q + c[None, :], mask=given, other=0.0).to(tl.float32)
        inside = (c < K_DIM)[:, None] & column_ok[None, :]
        s = tl.load(p_state + c[:, None].to(tl.int64) * state_stride_k, mask=inside, other=0.0)
        known = dot(kc, s, known)
        said = dot(qc, s, said)
        kt = tl.trans(kc)
        keys = dot(kc, kt, keys)
        queries = dot(qc, kt, queries)
        if L2_NORM:
            k_size += tl.sum(kc * kc, 1)
            q_size += tl.sum(qc * qc, 1)
    k_factor = tl.full([BLOCK_T], 1.0, tl.float32)
    q_factor = tl.full([BLOCK_T], 1.0, tl.float32)
    if L2_NORM:
        k_factor = tl.math.div_rn(k_factor, tl.math.sqrt_rn(k_size + 1e-6))
        q_factor = tl.math.div_rn(q_factor, tl.math.sqrt_rn(q_size + 1e-6))
    q_factor *= query_scale

    p_g = g + b * g_stride_b + head + row * g_stride_t
    decay = tl.load(p_g, mask=row_ok, other=0.0)
    p_beta = beta + b * beta_stride_b + head + row * beta_stride_t
    step = tl.load(p_beta, mask=row_ok, other=0.0)
    p_v = v + b * v_stride_b + head * v_stride_h + row[:, None] * v_stride_t + column[None, :]
    value = tl.load(p_v, mask=ok, other=0.0).to(tl.float32)

    p_parents = parents
    if parents is not None:
        p_parents = parents + b * parents_stride_b + first
    word = paths_of(parents_of(p_parents, i, T), i)
    on_path = ((word[:, None] >> i[None, :]) & 1) != 0
    since = tl.exp(tl.sum(tl.where(on_path, decay[None, :], 0.0), 1))
    d = step[:, None] * (value - (since * k_factor)[:, None] * known)
    said = (since * q_factor)[:, None] * said
    keys = keys * (step * k_factor)[:, None] * k_factor[None, :]
    queries = queries * q_factor[:, None] * k_factor[None, :]
    for j in range(0, T):
        here = i == j
        final = tl.sum(tl.where(here[:, None], d, 0.0), 0)
        path = tl.sum(tl.where(here, word, 0), 0)
        below = ((word >> j) & 1) != 0
        between = (((word & ~path)[:, None] >> i[None, :]) & 1) != 0
        behind = tl.exp(tl.sum(tl.where(between, decay[None, :], 0.0), 1))
        by_key = (behind * _column(keys, here))[:, None] * final[None, :]
        d = tl.where((below & (i != j))[:, None], d - by_key, d)
        by_query = (behind * _column(queries, here))[:, None] * final[None, :]
        said = tl.where(below[:, None], said + by_query, said)

    p_out = out + b * out_stride_b + head * out_stride_h + row[:, None] * out_stride_t
    tl.store(p_out + column[None, :], cast(said, out.dtype.element_ty), mask=ok)
    tl.store(p_stash + K_DIM + column[None, :], d, mask=ok)
    # Programs whose heads share keys deal these in parts, and write them to all of those heads.
    WIDE: tl.constexpr = 64
    share = block * GROUP + (head % GROUP).to(tl.int32)
    p_stash -= (head % GROUP) * stash_stride_h
    for c0 in tl.range(share * WIDE, K_DIM, tl.num_programs(0) * (GROUP * WIDE)):
        c = c0 + tl.arange(0, WIDE)
        given = row_ok[:, None] & (c < K_DIM)[None, :]
        kc = tl.load(p_k + c[None, :], mask=given, other=0.0).to(tl.float32) * k_factor[:, None]
        for member in tl.static_range(GROUP):
            tl.store(p_stash + member * stash_stride_h + c[None, :], kc, mask=given)
    if block == 0:
        p_decay = stash + b * stash_stride_b + head * stash_stride_h + row * stash_stride_t
        tl.store(p_decay + (K_DIM + V_DIM), tl.exp(decay), mask=row_ok)


def not_served(q, k, v, g, beta, state, parents, query_scale, l2_norm, starts, most, *written):
    """Return why the kernel does not take a call, or None."""
    if g.dim() == v.dim():
        return "a decay per channel"
    rows = q.shape[1] if starts is None else most
    return f"{rows} rows of a request, more than {MOST_ROWS}" if rows > MOST_ROWS else None


def gated_delta_tree(
    q, k, v, g, beta, state, parents, query_scale, l2_norm, cu_seqlens_q, max_seqlen_q, out, stash
):
    """Write what a tree's rows say of ``state`` to ``out``, and what a commit needs to ``stash``.

    Rows are [B, T, ..], or [tokens, ..] with ``cu_seqlens_q``; ``parents`` is [B or 1, T].
    """
    ragged = cu_seqlens_q is not None
    B, heads, k_dim, v_dim = state.shape
    rows = max_seqlen_q if ragged else q.shape[1]
    blocks = _sizes.state_blocks(q.device, B * heads, rows, v_dim)
    block_t, block_k, block_v, num_warps = blocks
    of_heads = [(*row_strides(x, ragged), x.stride(-2)) for x in (q, k, v, out, stash)]
    launch(
        gated_delta_kernel, (triton.cdiv(v_dim, block_v), heads, B),
        q, k, v, g, beta, state, parents, cu_seqlens_q, out, stash, rows, query_scale,
        *of_heads[0], *of_heads[1], *of_heads[2],
        *row_strides(g, ragged), *row_strides(beta, ragged),
        *state.stride()[:3], 0 if parents is None or ragged else row_strides(parents, False)[0],
        *of_heads[3], *of_heads[4],
        GROUP=heads // k.shape[-2], L2_NORM=l2_norm, K_DIM=k_dim, V_DIM=v_dim,
        BLOCK_T=block_t, BLOCK_K=block_k, BLOCK_V=block_v, num_warps=num_warps,
    )  # fmt: skip
