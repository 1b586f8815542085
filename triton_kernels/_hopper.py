"""Which calls the Hopper kernel serves, and its launch."""

from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import _configs
from ._combine import combine, partial_states
from ._hopper_kernel import hopper_kernel
from ._launch import collected_strides, launch, strides

_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Matrix(NamedTuple):
    """A cache [outer, N, Hk, D] as the matrix [rows, columns] that TMA reads.

    Requests or pages lie ``rows_b`` rows apart, heads ``rows_h`` rows or ``columns_h`` columns.
    """

    rows: int
    columns: int
    rows_b: int
    rows_h: int
    columns_h: int


def matrix_of(cache) -> Matrix | None:
    """Return a cache as a matrix, or None if its strides make none."""
    outer, inner, heads, D = cache.shape
    b, n, h = strides(cache)[:3]
    if n == 0 or b % n:
        return None
    rows_h, columns_h = (h // n, 0) if h % n == 0 else (0, h)
    columns = columns_h * (heads - 1) + D
    if columns > n:
        return None
    rows = b // n * (outer - 1) + rows_h * (heads - 1) + inner
    return Matrix(rows, columns, b // n, rows_h, columns_h) if rows < 1 << 31 else None


def _described(cache, matrix, block_n):
    """Return the descriptor of boxes of ``block_n`` rows and one head's columns."""
    D = cache.shape[-1]
    layout = gl.NVMMASharedLayout.get_default_for([block_n, D], _ELEMENTS[cache.dtype])
    shape, steps = [matrix.rows, matrix.columns], [cache.stride(1), 1]
    return TensorDescriptor(cache, shape, steps, [block_n, D], layout)


def serves(config, q, k_cache, v_cache, out, call) -> bool:
    """Return whether a call of `attend` can be served: what TMA and 16-byte copies ask for.

    Collected logits are the rows' own, so a row is collected once, and ragged requests, of which
    short ones have one row for two, are left to the other kernel. So are scores of tiles of 128
    rows with Triton before 3.7, which cannot compile them.
    """
    ragged = call["cu_seqlens_q"] is not None
    if call["collect"] == "scores" and _configs.UNFENCED and config.block_m == 128:
        return False
    if call["collect"] == "logits":
        rows = {row % q.shape[1] for row in call["collect_rows"]}
        if ragged or len(rows) < len(call["collect_rows"]):
            return False
    if not call["softmax_scale"] > 0:  # nor NaN
        return False
    copied = [x for x in (q, k_cache, v_cache, call["k_tree"], call["v_tree"]) if x is not None]
    aligned = all(x.data_ptr() % 16 == 0 for x in (*copied, out))
    return aligned and all(stride % 8 == 0 for x in copied for stride in strides(x)[:3])


# fmt: off
def attend_on_hopper(
    config, q, k_cache, v_cache, lengths, out, lse, *,
    softmax_scale, softcap, k_tree, v_tree, tree_mask, depths, block_table, window, sinks,
    collect, collect_rows, collected, cu_seqlens_q, max_seqlen_q,
):
    # fmt: on
    """Launch the kernel for a call of `attend`, and the combine where it is needed.

    Ragged rows are [1, tokens] here.
    """
    batches, tokens, heads, D = q.shape
    B, T = batches, tokens
    if cu_seqlens_q is not None:
        B, T = cu_seqlens_q.shape[0] - 1, max_seqlen_q
    kv_heads = k_cache.shape[2]
    page_size = k_cache.shape[1] if block_table is not None else 0
    capacity = block_table.shape[1] * page_size if page_size else k_cache.shape[1]
    span = capacity if window is None or collected is not None else min(window, capacity)
    group = heads // kv_heads
    tiles = triton.cdiv(T * group, config.block_m)
    programs, requests = kv_heads * B * tiles, B
    if cu_seqlens_q is not None:
        tiles, requests = tokens * group // config.block_m + B, 1
        programs = min(programs, kv_heads * tiles)
    state_bytes = 4 * batches * tokens * heads * (D + 1)
    splits = _configs.splits(
        q.device, config, T * group, programs, span, state_bytes, alone=B == 1
    )
    states, state_lses = partial_states(splits.slots, out, lse)

    matrices = [matrix_of(cache) for cache in (k_cache, v_cache)]
    descriptors, places = (None, None), (0,) * 6
    if None not in matrices and page_size % config.block_n == 0:
        descriptors = (
            _described(k_cache, matrices[0], config.block_n),
            _described(v_cache, matrices[1], config.block_n),
        )
        places = [x for matrix in matrices for x in matrix[2:]]
    masked, given = tree_mask is not None, k_tree is not None
    if not masked:  # a chain runs the same kernel, and needs a pointer for it
        tree_mask = torch.empty((1, 1, 1), dtype=torch.int64, device=q.device)
    launch(
        hopper_kernel, (kv_heads * tiles, splits.slots, requests),
        q, k_cache, v_cache, lengths, block_table, k_tree, v_tree, tree_mask, depths, cu_seqlens_q,
        sinks, states, state_lses, collected, *descriptors,
        softmax_scale, softcap, int(masked), T, k_tree.shape[1] if given else T,
        capacity, splits.wanted, splits.least, splits.most, window or 0, kv_heads, B,
        *strides(q)[:3],
        *strides(k_cache)[:3],
        *strides(v_cache)[:3],
        *places,
        strides(lengths)[0],
        block_table.stride(0) if page_size else 0,
        *(strides(k_tree)[:3] if given else (0, 0, 0)),
        *(strides(v_tree)[:3] if given else (0, 0, 0)),
        *strides(tree_mask)[:2],
        strides(depths)[0] if depths is not None else 0,
        *strides(states)[:4],
        *strides(state_lses),
        *collected_strides(collected),
        D=D,
        GROUP=group,
        HEADS=triton.next_power_of_2(group),
        PAGE_SIZE=page_size,
        WINDOW=window is not None,
        SOFTCAP=softcap > 0,
        COLLECT=collect,
        COLLECT_ROWS=tuple(collect_rows),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        RING=config.ring,
        CONSUMER_REGISTERS=config.consumer_registers,
        REGISTERS=config.producer_registers,
        num_warps=4,
        **config.options,
    )  # fmt: skip
    if splits.slots > 1:
        combine(
            states,
            state_lses,
            out,
            lse,
            lengths=lengths,
            splits=splits,
            span=span,
            unit=config.block_n,
            cu_seqlens_q=cu_seqlens_q,
        )
