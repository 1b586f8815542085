"""The tree's block of the attention kernel: which of its keys a row sees, and attention to them.

A mask is read as 32-bit words, which take half the registers. A window counts positions, and what a
row sees of the tree is its path in the order of the keys: so a row stands as deep as it sees keys,
and its window leaves the last of them.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102

import triton
import triton.language as tl

from ._blocks import cache_rows, load_keys, offset_of, softmax_step
from ._eight_bits import scale_of, times


@triton.jit
def _lowest_bits(n):
    """Return 32-bit words whose lowest ``n`` bits are set; none below 0, all from 32 on."""
    bits = (1 << tl.minimum(tl.maximum(n, 0), 31)) - 1
    return tl.where(n >= 32, -1, bits)


@triton.jit
def _count_bits(word):
    """Return how many bits of 32-bit words are set."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x += x >> 8
    x += x >> 16
    return (x & 63).to(tl.int32)


@triton.jit
def _without_lowest(word, n):
    """Return 32-bit words without the lowest ``n`` of the bits that are set in them."""
    end = n * 0  # behind at most n of these bits, by bisection
    for step in tl.static_range(5):
        further = end + (16 >> step)
        end = tl.where(_count_bits(word & _lowest_bits(further)) <= n, further, end)
    return tl.where(_count_bits(word) <= n, 0, word & ~_lowest_bits(end))


@triton.jit
def depth_of(t, ok, T, S, depth_row, mask_row, mask_stride_t, masked):
    """Return the depths of tokens in the tree: as given, as their mask says, or a chain's."""
    depth = t + S - T
    if depth_row is not None:
        depth = tl.load(depth_row + t, mask=ok, other=0)
    elif mask_row is not None:
        seen = depth * 0
        for j0 in range(0, tl.where(masked > 0, S, 0), 32):
            word = tl.load(mask_row + t * (2 * mask_stride_t) + j0 // 32, mask=ok, other=0)
            seen += _count_bits(word & _lowest_bits(S - j0))
        depth = tl.where(masked > 0, seen - 1, depth)
    return depth


# fmt: off
@triton.jit
def _attend_keys(
    q, q_rest, m, l, acc, j, valid, visible, b, first_row, length,
    p_k, p_v, k_stride_b, k_stride_n, v_stride_b, v_stride_n, page_row,
    k_scale, v_scale, scale_strides, scale, softcap,
    IN_CACHE: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIKE: tl.constexpr, FORM: tl.constexpr,
    NATIVE: tl.constexpr, SOFTCAP: tl.constexpr, WIDTHS: tl.constexpr, DIFFER: tl.constexpr,
):
    # fmt: on
    """Attend to the tree's keys ``j`` [N]; those in the cache lie behind the prefix, and as it."""
    vs = None
    if IN_CACHE:
        outer, inner = cache_rows(length + j, valid, b, None, None, page_row, PAGE_SIZE)
        k_row = outer * k_stride_b + inner * k_stride_n
        v_row = k_row if ALIKE else outer * v_stride_b + inner * v_stride_n
        if k_scale is not None:
            ks = scale_of(k_scale, outer, inner, valid, scale_strides[0], scale_strides[1])
            scale = times(scale, ks, 1)
        if v_scale is not None:
            vs = scale_of(v_scale, outer, inner, valid, scale_strides[2], scale_strides[3])
    else:
        inner = j.to(tl.int64)
        k_row = offset_of(b, first_row, k_stride_b, k_stride_n) + inner * k_stride_n
        v_row = k_row
        if not ALIKE:
            v_row = offset_of(b, first_row, v_stride_b, v_stride_n) + inner * v_stride_n
    k, k_rest, v = load_keys(p_k + k_row, p_v + v_row, valid, vs, q.dtype, FORM, NATIVE, WIDTHS)
    return softmax_step(
        q, q_rest, k, k_rest, v, visible, m, l, acc, scale, softcap, SOFTCAP, vs, DIFFER
    )


# fmt: off
@triton.jit
def _attend_tree(
    q, q_rest, m, l, acc, t, row_ok, depth, b, first_row, T, S, length, window,
    p_k, p_v, k_stride_b, k_stride_n, v_stride_b, v_stride_n, page_row, mask_row, masked,
    k_scale, v_scale, scale_strides, scale, softcap,
    IN_CACHE: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIKE: tl.constexpr, FORM: tl.constexpr,
    NATIVE: tl.constexpr, WINDOW: tl.constexpr, TRIMMED: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTHS: tl.constexpr, BLOCK_J: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Attend to the tree's keys [0, S): if ``masked`` those in the row's mask, else the chain's.

    ``depth`` [M] and a mask that is not ``TRIMMED`` to the window yet say what the window drops.
    ``BLOCK_J`` keys share one word.
    """
    last = tl.where(row_ok, t + S - T, -1)
    listed = row_ok & (tl.zeros_like(t) < masked)
    end = tl.where(masked > 0, S, tl.max(last, 0) + 1)
    if WINDOW and not TRIMMED:
        dropped = tl.where(listed, tl.maximum(depth + 1 - window, 0), 0)
    for j0 in tl.range(0, end, BLOCK_J, num_stages=STAGES):
        j = j0 + tl.arange(0, BLOCK_J)
        valid = j < end
        word = tl.load(mask_row + j0 // 32, mask=listed, other=0) >> (j0 % 32)
        if WINDOW and not TRIMMED:
            word &= _lowest_bits(tl.minimum(end - j0, BLOCK_J))
            seen = _count_bits(word)
            word = _without_lowest(word, dropped)
            dropped = tl.maximum(dropped - seen, 0)
        chain = _lowest_bits(last + 1 - j0)
        if WINDOW:
            chain = chain & ~_lowest_bits(last + 1 - window - j0)
        word = tl.where(listed, word, chain)
        visible = (((word[:, None] >> (j - j0)[None, :]) & 1) != 0) & valid[None, :]
        # A node that no row sees may hold anything, as padding nodes do.
        valid = valid & (tl.max(visible.to(tl.int32), 0) != 0)
        m, l, acc = _attend_keys(
            q, q_rest, m, l, acc, j, valid, visible, b, first_row, length,
            p_k, p_v, k_stride_b, k_stride_n, v_stride_b, v_stride_n, page_row,
            k_scale, v_scale, scale_strides, scale, softcap,
            IN_CACHE, PAGE_SIZE, ALIKE, FORM, NATIVE, SOFTCAP, WIDTHS, True,
        )  # fmt: skip
    return m, l, acc


# fmt: off
@triton.jit
def _attend_chain(
    q, q_rest, m, l, acc, t, row_ok, b, first_row, T, S, length, window,
    p_k, p_v, k_stride_b, k_stride_n, v_stride_b, v_stride_n, page_row,
    k_scale, v_scale, scale_strides, scale, softcap,
    IN_CACHE: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIKE: tl.constexpr, FORM: tl.constexpr,
    NATIVE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, WIDTHS: tl.constexpr,
    BLOCK_J: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Attend to a chain's keys: what `_attend_tree` does where nothing is masked.

    Without words of a mask there are registers for more keys at a time, as a long chunk wants.
    """
    last = tl.where(row_ok, t + S - T, -1)
    end = tl.max(last, 0) + 1
    first = tl.min(tl.where(row_ok, last, end), 0)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first + 1 - window, 0)
    # Of the first keys of a window and from the first row's on, rows see different ones.
    alike = tl.maximum(first + 1 - begin, 0) // BLOCK_J * BLOCK_J + begin
    for part in tl.static_range(0 if WINDOW else 1, 3):
        upto = end
        if part == 0:
            upto = begin + tl.cdiv(tl.maximum(end - window - begin, 0), BLOCK_J) * BLOCK_J
            upto = tl.minimum(upto, end)
        if part == 1:
            upto = tl.maximum(alike, begin)
        # What is looked at on its way is not copied ahead: shared memory would not hold it.
        for j0 in tl.range(0, upto - begin, BLOCK_J, num_stages=STAGES if part == 1 else 1):
            j = begin + j0 + tl.arange(0, BLOCK_J)
            valid = j < end
            visible = valid[None, :]
            if part != 1:
                visible = j[None, :] <= last[:, None]
                if WINDOW:
                    visible = visible & (j[None, :] > last[:, None] - window)
            m, l, acc = _attend_keys(
                q, q_rest, m, l, acc, j, valid, visible, b, first_row, length,
                p_k, p_v, k_stride_b, k_stride_n, v_stride_b, v_stride_n, page_row,
                k_scale, v_scale, scale_strides, scale, softcap,
                IN_CACHE, PAGE_SIZE, ALIKE, FORM, NATIVE, SOFTCAP, WIDTHS, part != 1,
            )  # fmt: skip
        begin = upto
    return m, l, acc


# fmt: off
@triton.jit
def attend_own(
    q, q_rest, m, l, acc, t, row_ok, depth, b, first_row, T, S, length, window,
    p_k, p_v, head, k_stride_b, k_stride_n, k_stride_h, v_stride_b, v_stride_n, v_stride_h,
    page_row, mask_row, mask_stride_t, masked, k_scale, v_scale, scale_strides, scale, softcap,
    TREE: tl.constexpr, IN_CACHE: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIKE: tl.constexpr,
    FORM: tl.constexpr, NATIVE: tl.constexpr, WINDOW: tl.constexpr, TRIMMED: tl.constexpr,
    SOFTCAP: tl.constexpr, WIDTHS: tl.constexpr, BLOCK_J: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Attend to the tree's keys, or to a long chain's."""
    p_k += head * k_stride_h
    p_v += head * v_stride_h
    if TREE == "chain":
        m, l, acc = _attend_chain(
            q, q_rest, m, l, acc, t, row_ok, b, first_row, T, S, length, window,
            p_k, p_v, k_stride_b, k_stride_n, v_stride_b, v_stride_n, page_row,
            k_scale, v_scale, scale_strides, scale, softcap,
            IN_CACHE, PAGE_SIZE, ALIKE, FORM, NATIVE, WINDOW, SOFTCAP, WIDTHS, BLOCK_J, STAGES,
        )  # fmt: skip
    else:
        m, l, acc = _attend_tree(
            q, q_rest, m, l, acc, t, row_ok, depth, b, first_row, T, S, length, window,
            p_k, p_v, k_stride_b, k_stride_n, v_stride_b, v_stride_n, page_row,
            mask_row + t * (2 * mask_stride_t), masked,
            k_scale, v_scale, scale_strides, scale, softcap,
            IN_CACHE, PAGE_SIZE, ALIKE, FORM, NATIVE, WINDOW, TRIMMED, SOFTCAP, WIDTHS, BLOCK_J,
            STAGES,
        )  # fmt: skip
    return m, l, acc
