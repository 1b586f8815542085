"""The producer of the Hopper kernel: four warps that bring K and V into shared memory.

Tiles that lie in the prefix whole come by TMA, two instructions a tile, where it can address them:
a cache whose rows are those of a matrix, in one piece or in pages that hold whole tiles. All others
are gathered row by row with 16-byte copies, which know pages of any size, the end of the prefix and
the tree behind it; what no row sees is 0, for it may hold anything.

Tiles that rows see differently (with a window the slot's first, and the one or two that hold the
prefix's end and the tree) are gathered as well, and their values looked at before any consumer
gets the tile: a weight of 0 times NaN would be NaN.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102, SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ._blocks import cache_rows
from ._gluon import load_rows, load_tensor
from ._hopper_visible import WARPS
from ._tree import _lowest_bits


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def _used_word(j0, mask, first_token, tokens):
    """Return which of the tree's keys [j0, j0 + 32) some row of the tile may see."""
    mask_row, mask_stride_t, masked, S, _ = mask
    word = -1
    if masked > 0:
        t = gl.arange(0, 128, gl.BlockedLayout([1], [32], [WARPS], [0]))
        p_words = mask_row + (first_token + t) * (2 * mask_stride_t) + j0 // 32
        words = gl.load(p_words, mask=(t < tokens) & (j0 < S), other=0)
        word = gl.reduce(words, 0, _or)
    return word & _lowest_bits(S - j0)


# fmt: off
@gluon.jit
def _copy_rows(
    buffer, c0, source, slot, mask, lookup,
    PAGE_SIZE: gl.constexpr, IN_CACHE: gl.constexpr, LAYOUT: gl.constexpr,
):
    # fmt: on
    """Copy the slot's keys [c0, c0 + N) into a buffer [N, D], 32 at a time."""
    p_cache, stride_b, stride_n, p_tree, tree_stride_n = source
    begin, keys, tree_at, _, _ = slot
    b, page_row, length, first_token, tokens = lookup
    BLOCK_N: gl.constexpr = buffer.shape[0]
    d = gl.arange(0, buffer.shape[1], gl.SliceLayout(0, LAYOUT))
    for r0 in gl.static_range(0, BLOCK_N, 32):
        r = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
        first = c0 + r0
        word = 0
        if first >= tree_at:
            word = _used_word(first - tree_at, mask, first_token, tokens)
        behind = first - tree_at + r
        in_tree = ((word >> r) & 1) != 0
        in_prefix = r < keys - first
        valid = in_prefix | in_tree
        position = begin + first + r
        if IN_CACHE:
            position = gl.where(in_tree, length + behind, position)
            in_prefix = valid
        outer, inner = cache_rows(
            position, in_prefix, b, None, None, page_row if PAGE_SIZE > 0 else None, PAGE_SIZE
        )
        p_row = p_cache + (outer * stride_b + inner * stride_n)
        if not IN_CACHE:
            p_row = gl.where(in_tree, p_tree + behind.to(gl.int64) * tree_stride_n, p_row)
        # What the launcher has made sure of is forgotten on the way into this partition.
        p = gl.max_contiguous(gl.multiple_of(p_row[:, None] + d[None, :], [1, 16]), [1, 8])
        load_rows(buffer.slice(r0, 32), p, mask=valid[:, None])


@gluon.jit
def _clean_values(buffer, odd, LAYOUT: gl.constexpr):
    """Make rows of values [N, D] 0 that hold NaN or infinity, and ``odd`` [N] 1 there, else 0."""
    BLOCK_N: gl.constexpr = buffer.shape[0]
    for r0 in gl.static_range(0, BLOCK_N, 8):
        rows = buffer.slice(r0, 8)
        v = rows.load(LAYOUT)
        found = gl.sum(v.to(gl.float32) * 0.0, 1) != 0.0
        rows.store(gl.where(found[:, None], gl.full(v.shape, 0, v.dtype, LAYOUT), v))
        odd.slice(r0, 8).store(found.to(gl.int8))


@gluon.jit
def _pick(second, a, b):
    """Return one of two tuples of scalars."""
    x0, x1, x2, x3, x4 = a
    y0, y1, y2, y3, y4 = b
    return (
        gl.where(second, y0, x0), gl.where(second, y1, x1), gl.where(second, y2, x2),
        gl.where(second, y3, x3), gl.where(second, y4, x4),
    )  # fmt: skip


# fmt: off
@gluon.jit
def _gather(
    work, first, stop, looked,
    RING: gl.constexpr, PAGE_SIZE: gl.constexpr, IN_CACHE: gl.constexpr, LAYOUT: gl.constexpr,
):
    # fmt: on
    """Bring the tiles [first, stop) row by row; look at the first ``looked`` and the last ones."""
    shared, _, _, sources, slot, mask, lookup, _ = work
    _, ring, full, empty, _, odd = shared
    k_source, v_source = sources
    _, _, _, whole, _ = slot
    BLOCK_N: gl.constexpr = ring.shape[1]
    for item in range(2 * first, 2 * stop):
        at = item % RING
        tile = item // 2
        source = _pick((item & 1) != 0, k_source, v_source)
        mbarrier.wait(empty.index(at), (item // RING & 1) ^ 1)
        _copy_rows(
            ring.index(at), tile * BLOCK_N, source, slot, mask, lookup,
            PAGE_SIZE, IN_CACHE, LAYOUT,
        )  # fmt: skip
        if (tile >= looked) & (tile < whole):
            async_copy.mbarrier_arrive(full.index(at))
            mbarrier.arrive(full.index(at), count=1)
        elif (item & 1) != 0:  # the keys wait for what their values are
            async_copy.commit_group()
            async_copy.wait_group(0)
            _clean_values(ring.index(at), odd.index(tile % odd.shape[0]), LAYOUT)
            fence_async_shared()
            mbarrier.arrive(full.index(at - 1), count=1)
            mbarrier.arrive(full.index(at), count=1)


# fmt: off
@gluon.jit
def produce(
    work, RING: gl.constexpr, TMA: gl.constexpr, PAGE_SIZE: gl.constexpr, IN_CACHE: gl.constexpr,
    WINDOW: gl.constexpr,
):
    # fmt: on
    """Bring all tiles of a slot, K and V in turn, each into the next buffer of the ring."""
    shared, descs, places, _, slot, _, lookup, tiles = work
    _, ring, full, empty, _, _ = shared
    k_desc, v_desc = descs
    begin, _, _, whole, highest = slot
    BLOCK_N: gl.constexpr = ring.shape[1]
    D: gl.constexpr = ring.shape[2]
    BYTES: gl.constexpr = 2 * BLOCK_N * D
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    looked = 0
    if WINDOW:  # which hides keys up to the ``highest`` position from some row
        looked = gl.minimum(gl.cdiv(gl.maximum(highest + 1 - begin, 0), BLOCK_N), whole)
    gathered = 0
    if TMA:
        gathered = whole
        if WINDOW:
            _gather(work, 0, looked, looked, RING, PAGE_SIZE, IN_CACHE, LAYOUT)
        b, page_row, _, _, _ = lookup
        k_row, k_rows, k_column, v_row, v_rows, v_column = places
        for i in range(looked, whole):
            n = begin + i * BLOCK_N
            page = b.to(gl.int32)
            if PAGE_SIZE > 0:
                page = gl.load(page_row + n // PAGE_SIZE)
                n = n % PAGE_SIZE
            at = 2 * i % RING
            phase = (2 * i // RING & 1) ^ 1
            mbarrier.wait(empty.index(at), phase)
            mbarrier.expect(full.index(at), BYTES)
            row = k_row + page * k_rows + n
            load_tensor(k_desc, [row, k_column], full.index(at), ring.index(at))
            mbarrier.wait(empty.index(at + 1), phase)
            mbarrier.expect(full.index(at + 1), BYTES)
            row = v_row + page * v_rows + n
            load_tensor(v_desc, [row, v_column], full.index(at + 1), ring.index(at + 1))
    _gather(work, gathered, tiles, looked, RING, PAGE_SIZE, IN_CACHE, LAYOUT)
