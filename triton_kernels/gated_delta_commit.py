"""The state behind accepted rows, in place: a program for each request, head and block of columns.

Rows are added from the last to the first, each decayed by those behind it; then the state, which is
read and written once.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102

import triton
import triton.language as tl

from . import _sizes
from ._launch import launch
from ._states import row_strides, rows_of

VARYING = [
    "nodes", "counts", "cu_seqlens_q", "stash_stride_b", "nodes_stride_b", "counts_stride_b",
]  # fmt: skip


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def gated_delta_commit_kernel(
    state, stash, nodes, counts, cu_seqlens_q,
    state_stride_b, state_stride_h, state_stride_k, stash_stride_b, stash_stride_t, stash_stride_h,
    nodes_stride_b, counts_stride_b,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, DECAYS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):
    # fmt: on
    """Advance a block of columns of one state; nothing where nothing is accepted."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    count = tl.load(counts + b * counts_stride_b).to(tl.int32)
    if count <= 0:
        return
    first, _ = rows_of(b, cu_seqlens_q, 0)
    c = tl.arange(0, BLOCK_K)
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (c < K_DIM)[:, None] & (column < V_DIM)[None, :]
    p_state = state + b * state_stride_b + head * state_stride_h
    p_state += c[:, None].to(tl.int64) * state_stride_k + column[None, :]
    before = tl.load(p_state, mask=inside, other=0.0)
    stash += b * stash_stride_b + head * stash_stride_h
    added = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    behind = tl.full([BLOCK_K], 1.0, tl.float32)
    for step in range(0, count):
        node = count - 1 - step
        if nodes is not None:
            node = tl.load(nodes + b * nodes_stride_b + node).to(tl.int32)
        p_row = stash + (first + node) * stash_stride_t
        k = tl.load(p_row + c, mask=c < K_DIM, other=0.0)
        d = tl.load(p_row + K_DIM + column, mask=column < V_DIM, other=0.0)
        added += (behind * k)[:, None] * d[None, :]
        if DECAYS == 1:
            behind *= tl.load(p_row + (K_DIM + V_DIM))
        else:
            behind *= tl.load(p_row + (K_DIM + V_DIM) + c, mask=c < K_DIM, other=0.0)
    tl.store(p_state, behind[:, None] * before + added, mask=inside)


def gated_delta_commit(state, stash, nodes, counts, cu_seqlens_q, max_seqlen_q):
    """Advance ``state`` [B, Hv, Dk, Dv] along the first ``counts`` [B] of ``nodes`` [B, P].

    ``stash`` is [B, T, Hv, Ds], or [tokens, Hv, Ds] with ``cu_seqlens_q``.
    """
    B, heads, k_dim, v_dim = state.shape
    block_k, block_v, num_warps = _sizes.commit_blocks(k_dim, v_dim)
    launch(
        gated_delta_commit_kernel, (triton.cdiv(v_dim, block_v), heads, B),
        state, stash, nodes, counts, cu_seqlens_q,
        *state.stride()[:3], *row_strides(stash, cu_seqlens_q is not None), stash.stride(-2),
        0 if nodes is None else nodes.stride(0), counts.stride(0),
        K_DIM=k_dim, V_DIM=v_dim, DECAYS=stash.shape[-1] - k_dim - v_dim,
        BLOCK_K=block_k, BLOCK_V=block_v, num_warps=num_warps,
    )  # fmt: skip
