"""An accepted path of a tree moved behind its root, in the caches of all layers by one launch.

Each program moves some columns of a token's row, in one layer's keys or values of one request. A
path's nodes ascend, so a row moves towards the root, over rows that have been read or mean nothing.
"""

import triton
import triton.language as tl

from ._launch import Prepared, launch, strides

ROWS = 16  # that are read before any of them is written
COLUMNS = 256


# fmt: off
@triton.jit(do_not_specialize=["width", "nodes_stride_b", "counts_stride_b"])
def move_path_kernel(
    storage, nodes, counts, seqlens,
    width, stride_l, stride_b, stride_n, nodes_stride_b, counts_stride_b,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    """Move a block of columns of the rows of one path."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    layer, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    count = tl.load(counts + b * counts_stride_b).to(tl.int32)
    root = tl.load(seqlens + b).to(tl.int64)
    p_root = storage + layer * stride_l + b * stride_b + root * stride_n + column[None, :]
    for first in range(0, count, ROWS):
        step = first + tl.arange(0, ROWS)
        node = tl.load(nodes + b * nodes_stride_b + step, mask=step < count, other=0)
        place = step + 1
        moved = ((step < count) & (node != place))[:, None] & (column < width)[None, :]
        rows = tl.load(p_root + node[:, None] * stride_n, mask=moved)
        tl.debug_barrier()
        tl.store(p_root + place[:, None].to(tl.int64) * stride_n, rows, mask=moved)


def _move(storage, nodes, counts, seqlens):
    """Move rows ``seqlens + nodes`` to ``seqlens + 1`` and on, in place.

    ``storage`` [layers, sides, B, N, heads, row], a token's heads side by side; of ``nodes``, int64
    [B, depth], the first ``counts`` [B]; ``seqlens`` int32 [B], the root's place.
    """
    layers, sides, batch, _, heads, row = storage.shape
    _, stride_l, stride_b, stride_n = storage.stride()[:4]
    launch(
        move_path_kernel, (triton.cdiv(heads * row, COLUMNS), layers * sides, batch),
        storage, nodes, counts, seqlens,
        heads * row, stride_l, stride_b, stride_n, strides(nodes)[0], strides(counts)[0],
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip


move_path = Prepared(_move, plain=[])
