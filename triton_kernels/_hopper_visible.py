"""Which keys a row of a Gluon kernel sees, as words of 32 keys.

A slot's keys are its part of the prefix and, in a request's last slot, the tree behind it, which
begins at a multiple of 32: a word belongs to the prefix or to the tree, never to both.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102, SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._tree import _count_bits, _lowest_bits, _without_lowest

ROWS = gl.constexpr(64)  # of a group
WARPS = gl.constexpr(4)  # of a group, whose rows are those of one wgmma, or of the producer


@gluon.jit
def rows_of(tile, head, first, T, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """Return (tokens, query heads, which exist) of 64 rows of a tile from ``first`` on."""
    r = tile * BLOCK_M + first + gl.arange(0, ROWS, LAYOUT)
    t = r // GROUP
    return t, head * GROUP + r % GROUP, t < T


@gluon.jit
def _tree_word(j0, rows, mask, WINDOW: gl.constexpr, TRIMMED: gl.constexpr):
    """Return the tree's keys [j0, j0 + 32) that each row sees; they may lie outside of it."""
    t, last, depth, _ = rows
    mask_row, mask_stride_t, masked, S, window = mask
    listed = (last >= 0) & (t * 0 < masked)
    inside = (j0 >= 0) & (j0 < S)
    p_words = mask_row + t * (2 * mask_stride_t)
    word = gl.load(p_words + j0 // 32, mask=listed & inside, other=0) & _lowest_bits(S - j0)
    if WINDOW and not TRIMMED:
        dropped = gl.maximum(depth + 1 - window, 0)
        for before in range(0, gl.where(inside, j0, 0), 32):
            seen = _count_bits(gl.load(p_words + before // 32, mask=listed, other=0))
            dropped = gl.maximum(dropped - seen, 0)
        word = _without_lowest(word, dropped)
    chain = _lowest_bits(last + 1 - j0)
    if WINDOW:
        chain = chain & ~_lowest_bits(last + 1 - window - j0)
    return gl.where(listed, word, gl.where(inside, chain, 0))


# fmt: off
@gluon.jit
def visible_columns(
    c0, rows, slot, mask,
    WINDOW: gl.constexpr, TRIMMED: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr,
):
    # fmt: on
    """Return which of the slot's keys [c0, c0 + BLOCK_N) each row sees [M, BLOCK_N].

    ``rows`` are (token, last key of a chain, depth, position below the window) [M] each, ``slot``
    is (first position, how many keys of the prefix, where the tree begins, ...), ``mask`` the
    tree's (words, their stride, whether they count, keys, window).
    """
    t, _, _, lower = rows
    begin, keys, tree_at, _, _ = slot
    c = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    words = gl.full([ROWS, BLOCK_N], 0, gl.int32, LAYOUT)
    for i in gl.static_range(BLOCK_N // 32):
        first = c0 + 32 * i
        prefix = _lowest_bits(t * 0 + (keys - first))
        if WINDOW:
            prefix = prefix & ~_lowest_bits(lower + 1 - begin - first)
        word = prefix | _tree_word(first - tree_at, rows, mask, WINDOW, TRIMMED)
        words = gl.where((c // 32 == i)[None, :], word[:, None], words)
    return ((words >> (c % 32)[None, :]) & 1) != 0
