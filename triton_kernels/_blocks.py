"""Device functions that the attention kernels are built from: loads, addresses, one softmax step.

Shapes in comments are tiles: M query rows, N keys, C collected rows, D the padded head dimension.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102, SIM108

import triton
import triton.language as tl

from ._bfloat16 import dot
from ._eight_bits import keys_in, values_in, weights_in

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def follow_previous(PDL: tl.constexpr):
    """Wait for what earlier launches write, and let the next one start in the meantime.

    ``PDL``: this launch may have started before the ones before it have ended.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for what earlier launches write; before, this one may look at nothing of that."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next launch start once all programs are here: it takes places beside them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def inverse_root(squares, eps, WIDTH: tl.constexpr):
    """Return ``1 / sqrt(squares / WIDTH + eps)``, as exactly as float32 has it."""
    root = tl.sqrt_rn(squares * (1.0 / WIDTH) + eps)
    return tl.div_rn(tl.zeros_like(root) + 1.0, root)


@triton.jit
def load_rows(p_row, valid, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows of ``D`` elements [N, BLOCK_D]; invalid rows and the padding of D are 0."""
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None]
    if D != BLOCK_D:
        mask = mask & (d < D)[None, :]
    return tl.load(p_row[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def load_wide(p_row, valid, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):
    """Load rows of ``D`` elements as `load_rows` does: (the first BLOCK_D, their rest).

    512 + 64 elements as one power of two would be 1024. Without a rest the first part stands in its
    place: functions cannot return None.
    """
    first = load_rows(p_row, valid, BLOCK_D if BLOCK_R else D, BLOCK_D)
    rest = first
    if BLOCK_R:
        rest = load_rows(p_row + BLOCK_D, valid, D - BLOCK_D, BLOCK_R)
    return first, rest


# fmt: off
@triton.jit
def load_keys(
    p_k, p_v, valid, v_scale, dtype: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr,
    WIDTHS: tl.constexpr,
):
    # fmt: on
    """Load keys and values [N]: (the keys, their rest, the values) in ``dtype``.

    ``WIDTHS`` are D, its parts as `load_wide` has them, Dv and its padded width; this is 0 where
    values are the first part of their keys, which is then loaded once for both.
    """
    k, rest = load_wide(p_k, valid, WIDTHS[0], WIDTHS[1], WIDTHS[2])
    k = keys_in(dtype, k, FORM, NATIVE)
    if WIDTHS[2]:
        rest = keys_in(dtype, rest, FORM, NATIVE)
    v = k
    if WIDTHS[4]:
        v = load_rows(p_v, valid, WIDTHS[3], WIDTHS[4])
        v = values_in(dtype, v, v_scale, FORM, NATIVE)
    return k, rest, v


@triton.jit
def offset_of(b, first_row, stride_b, stride_t):
    """Return how far a request's rows begin; ragged ones at ``first_row`` of all requests'."""
    offset = b * stride_b
    if first_row is not None:
        offset = first_row * stride_t
    return offset


@triton.jit
def request_of(t, cu_seqlens_q, num_requests):
    """Return which request owns each ragged row ``t`` [R]: as many as end before it come first."""
    b = tl.zeros_like(t)
    for i0 in range(0, num_requests, 128):
        i = i0 + tl.arange(0, 128)
        end = tl.load(cu_seqlens_q + 1 + i, mask=i < num_requests, other=0x7FFFFFFF)
        b += tl.sum((end[None, :] <= t[:, None]).to(tl.int32), 1)
    return b


@triton.jit
def tile_of(index, lanes, cu_seqlens_q, num_requests, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (request, its tile) of the ``index``-th tile of all requests' rows.

    A request's tiles begin at ``first_row * GROUP // BLOCK_M + request``: no sum over the requests
    before it is needed, there is room for its rows, and every request has a tile. ``lanes`` are the
    numbers from 0 to 127, in a layout where kernels have such.
    """
    b = 0
    for i0 in range(1, num_requests, 128):
        i = i0 + lanes
        row = tl.load(cu_seqlens_q + i, mask=i < num_requests, other=0)
        begun = (row * GROUP // BLOCK_M + i <= index) & (i < num_requests)
        b += tl.sum(begun.to(tl.int32), 0)
    first = tl.load(cu_seqlens_q + b) * GROUP // BLOCK_M + b
    return b.to(tl.int64), index - first


@triton.jit
def split_size_of(keys, splits, least, most, slots, unit):
    """Return how many keys one split of a request takes; its own ``keys`` [...] decide.

    There are ``splits`` of them, which fill the GPU; fewer where they had less than ``least`` keys,
    a multiple where they still have ``most``, at most ``slots``. The grid's slots are this number
    for as many keys as the cache has room for, so that its capacity does not show. A multiple of
    ``unit``.
    """
    count = splits * tl.maximum(keys // (most * splits), 1)
    count = tl.minimum(count, (keys + least - 1) // least)
    count = tl.maximum(tl.minimum(count, slots), 1)
    size = (keys + count - 1) // count
    return tl.maximum((size + unit - 1) // unit, 1) * unit


@triton.jit
def cache_rows(n, valid, b, index_row, listed, page_row, PAGE_SIZE: tl.constexpr):
    """Return the locations of the prefix's keys ``n`` [N]: (request, position) or (page, slot).

    The three kinds of prefix are one map: ``index_row`` (or None) turns ``n`` into a position,
    which it is already where ``listed`` (or None), how many indices there are, is -1; ``page_row``
    (or None) turns a position into a page and a slot.
    """
    position = n
    if index_row is not None:
        if listed is None:
            position = tl.load(index_row + n, mask=valid, other=0)
        else:
            index = tl.load(index_row + n, mask=valid & (n < listed), other=0)
            position = tl.where(n < listed, index, n)
    outer = b
    inner = position.to(tl.int64)
    if page_row is not None:
        outer = tl.load(page_row + position // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        inner = inner % PAGE_SIZE
    return outer, inner


@triton.jit
def cap(s, softcap, SOFTCAP: tl.constexpr):
    """Return ``softcap * tanh(s / softcap)``, by its series where the closed form cancels."""
    if SOFTCAP:
        x = s / softcap
        e = tl.exp2(tl.abs(x) * LOG2E * -2.0)
        closed = (1.0 - e) / (1.0 + e)
        x2 = x * x
        series = x * (1.0 - x2 * (1 / 3 - x2 * (2 / 15 - x2 * (17 / 315))))
        s = softcap * tl.where(x2 < 0.01, series, tl.where(x < 0, -closed, closed))
    return s


@triton.jit
def _halves(x):
    """Cut a tile [R, D] into two of [R, D / 2]."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def dot_keys(q, q_rest, k, k_rest):
    """Return ``q @ k.T`` [M, N], rests included; a D of 256 in float32 at once would spill."""
    if q.dtype == tl.float32:
        if q.shape[1] > 128:
            q_low, q_high = _halves(q)
            k_low, k_high = _halves(k)
            return dot(q_high, tl.trans(k_high), dot(q_low, tl.trans(k_low)))
    s = dot(q, tl.trans(k))
    if q_rest is not None:
        s = dot(q_rest, tl.trans(k_rest), s)
    return s


# fmt: off
@triton.jit
def softmax_step(
    q, q_rest, k, k_rest, v, visible, m, l, acc, scale, softcap, SOFTCAP: tl.constexpr,
    v_scale=None, DIFFER: tl.constexpr = False,
):
    # fmt: on
    """Update the running softmax (m [M], l [M], acc [M, Dv]) by a tile of keys, in base 2.

    ``scale`` is a number or [1, N]. ``v_scale``, a number or [N], is one that values lack. Where
    rows ``DIFFER`` in which keys they see, a weight of 0 times NaN would be NaN: a value that is
    none becomes 0, and its key's logit NaN, so that who sees it says NaN.
    """
    s = dot_keys(q, q_rest, k, k_rest)
    if SOFTCAP:
        s = cap(s * scale, softcap, SOFTCAP) * LOG2E
    else:
        s = s * (scale * LOG2E)
    if DIFFER:
        no_number = tl.sum(v.to(tl.float32) * 0.0, 1)  # if it is not 0
        if v_scale is not None:
            no_number += v_scale * 0.0
            v_scale = tl.where(v_scale * 0.0 != 0.0, 0.0, v_scale)
        odd = no_number != 0.0
        v = tl.where(odd[:, None], tl.zeros_like(v), v)
        s = tl.where(odd[None, :], float("nan"), s)
    s = tl.where(visible, s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1))
    pivot = tl.where(new_m == float("-inf"), 0.0, new_m)  # -inf - -inf would be NaN
    p = tl.exp2(s - pivot[:, None])
    alpha = tl.exp2(m - pivot)
    l = l * alpha + tl.sum(p, 1)
    acc = dot(weights_in(v.dtype, p, v_scale), v, acc * alpha[:, None])
    return new_m, l, acc


@triton.jit
def finish(m, l, acc):
    """Return the state (out [M, D], natural lse [M]) of a running softmax; (0, -inf) if empty."""
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    return acc / l[:, None], tl.where(empty, float("-inf"), (m + tl.log2(l)) * LN2)
