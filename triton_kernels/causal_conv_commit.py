"""The inputs that a short convolution keeps behind accepted rows, in place."""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102

import triton
import triton.language as tl

from . import _sizes
from ._launch import launch
from ._states import row_strides, rows_of

VARYING = [
    "nodes", "counts", "cu_seqlens_q", "channels", "nodes_stride_b", "counts_stride_b",
]  # fmt: skip


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def causal_conv_commit_kernel(
    kept, x, nodes, counts, cu_seqlens_q, channels,
    kept_stride_b, kept_stride_t, x_stride_b, x_stride_t, nodes_stride_b, counts_stride_b,
    KEPT: tl.constexpr, BLOCK_C: tl.constexpr,
):
    # fmt: on
    """Keep a block of channels' last inputs; nothing is written where nothing is accepted.

    A thread has channels of its own and goes from the oldest input to the newest, so it reads what
    moves up before that is overwritten.
    """
    b = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + b * counts_stride_b).to(tl.int32)
    if count <= 0:
        return
    first, _ = rows_of(b, cu_seqlens_q, 0)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    kept += b * kept_stride_b
    for place in tl.static_range(KEPT):
        source = place + count
        p_input = kept + source * kept_stride_t
        if source >= KEPT:
            node = source - KEPT
            if nodes is not None:
                node = tl.load(nodes + b * nodes_stride_b + node).to(tl.int32)
            p_input = x + b * x_stride_b + (first + node) * x_stride_t
        moved = tl.load(p_input + c, mask=inside)
        tl.store(kept + place * kept_stride_t + c, moved, mask=inside)


def causal_conv_commit(conv_state, x, nodes, counts, cu_seqlens_q, max_seqlen_q):
    """Move ``conv_state`` [B, K - 1, C] along the first ``counts`` [B] of ``nodes`` [B, P].

    ``x`` is [B, T, C], or [tokens, C] with ``cu_seqlens_q``.
    """
    B, kept, channels = conv_state.shape
    block_c, num_warps = _sizes.conv_commit_block()
    launch(
        causal_conv_commit_kernel, (triton.cdiv(channels, block_c), B),
        conv_state, x, nodes, counts, cu_seqlens_q, channels,
        *conv_state.stride()[:2], *row_strides(x, cu_seqlens_q is not None),
        0 if nodes is None else nodes.stride(0), counts.stride(0),
        KEPT=kept, BLOCK_C=block_c, num_warps=num_warps,
    )  # fmt: skip
