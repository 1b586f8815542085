"""What a layer's heads go through between their product and attention, in one launch.

Queries and keys are normed by head and turned where they lie, x being a head's first ``HALF``
channels and y its next ones::

    x, y = x cos - y sin, y cos + x sin

What is behind them stays. Keys and values then also go into the cache. A program takes a few heads
of one row, all queries, all keys or all values; it computes in float32 and rounds once. Positions
and slots are read on the device.
"""

import triton
import triton.language as tl

from . import _sizes
from ._bfloat16 import cast
from ._blocks import follow_previous, inverse_root, load_rows
from ._eight_bits import (
    FORMS,
    bytes_of,
    greater,
    greatest_of,
    over,
    rounded,
    scale_of_greatest,
)
from ._launch import early, launch, strides
from .write_kv import store_rows


@triton.jit
def _columns(p, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load what belongs to ``SIZE`` channels of every head, float32 [1, BLOCK]."""
    d = tl.arange(0, BLOCK)
    return tl.load(p + d, mask=d < SIZE, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store_part(
    p_row, x, scale, valid, FORM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Store ``SIZE`` elements of valid rows [H, BLOCK], those of 8 bits over the rows' scales."""
    d = tl.arange(0, BLOCK)
    if FORM != "":
        x = rounded(over(x.to(tl.float32), scale[:, None]), FORM)
    tl.store(p_row[:, None] + d[None, :], x, mask=valid[:, None] & (d < SIZE)[None, :])


# fmt: off
@triton.jit
def _turned(
    p_row, valid, weight, eps, p_cos, p_sin, HALF: tl.constexpr, REST: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):
    # fmt: on
    """Return rows [H, 2 HALF + REST], normed if there is a weight and turned: (x, y, the rest).

    Without a rest x stands in its place: functions cannot return None.
    """
    x = load_rows(p_row, valid, HALF, BLOCK).to(tl.float32)
    y = load_rows(p_row + HALF, valid, HALF, BLOCK).to(tl.float32)
    if REST:
        z = load_rows(p_row + 2 * HALF, valid, REST, BLOCK_R).to(tl.float32)
    if weight is not None:
        squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        if REST:
            squares += tl.sum(z * z, 1)
        r = inverse_root(squares, eps, 2 * HALF + REST)[:, None]
        x *= r * _columns(weight, HALF, BLOCK)
        y *= r * _columns(weight + HALF, HALF, BLOCK)
        if REST:
            z *= r * _columns(weight + 2 * HALF, REST, BLOCK_R)
    c, s = _columns(p_cos, HALF, BLOCK), _columns(p_sin, HALF, BLOCK)
    first = cast(x * c - y * s, p_row.dtype.element_ty)
    second = cast(y * c + x * s, p_row.dtype.element_ty)
    rest = first
    if REST:
        rest = cast(z, p_row.dtype.element_ty)
    tl.debug_barrier()  # several threads may load what one of them stores in its place
    return first, second, rest


# fmt: off
@triton.jit
def _store_all(
    p_row, first, second, rest, scale, valid, FORM: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):
    # fmt: on
    """Store what `_turned` returns."""
    _store_part(p_row, first, scale, valid, FORM, HALF, BLOCK)
    _store_part(p_row + HALF, second, scale, valid, FORM, HALF, BLOCK)
    if REST:
        _store_part(p_row + 2 * HALF, rest, scale, valid, FORM, REST, BLOCK_R)


VARYING = [
    "T", "positions", "capacity", "slot", "q_eps", "k_eps", "depths_stride_b", "depths_stride_t",
    "k_scale", "v_scale", "ks_stride_b", "ks_stride_n", "ks_stride_h",
    "vs_stride_b", "vs_stride_n", "vs_stride_h",
]  # fmt: skip


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def rotate_heads_kernel(
    heads, q_weight, k_weight, cos, sin, prefix, depths, k_cache, v_cache, k_scale, v_scale,
    T, positions, capacity, slot, q_eps, k_eps,
    stride_b, stride_t, stride_h, table_stride, depths_stride_b, depths_stride_t,
    kc_stride_b, kc_stride_n, kc_stride_h, vc_stride_b, vc_stride_n, vc_stride_h,
    ks_stride_b, ks_stride_n, ks_stride_h, vs_stride_b, vs_stride_n, vs_stride_h,
    FORM: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    # fmt: on
    """Norm, turn and store ``BLOCK_H`` heads of one row; without ``slot`` behind the prefix."""
    Q_BLOCKS: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    K_BLOCKS: tl.constexpr = (HK + BLOCK_H - 1) // BLOCK_H
    D: tl.constexpr = 2 * HALF + REST
    follow_previous(PDL)
    b, t = (tl.program_id(0) // T).to(tl.int64), tl.program_id(0) % T
    block = tl.program_id(1)
    begin = tl.load(prefix + b)
    step = t
    if depths is not None:
        step = tl.load(depths + b * depths_stride_b + t * depths_stride_t)
    # Rows that mean nothing may stand anywhere; what they read and write must not.
    position = tl.minimum(tl.maximum(begin + step, 0), positions - 1).to(tl.int64)
    p_cos, p_sin = cos + position * table_stride, sin + position * table_stride
    if slot is not None:
        begin = slot
    n = (begin + t).to(tl.int64) + tl.zeros([BLOCK_H], tl.int64)
    inside = (n >= 0) & (n < capacity)
    p_heads = heads + b * stride_b + t.to(tl.int64) * stride_t
    lane = tl.arange(0, BLOCK_H)
    if block < Q_BLOCKS:
        h = block * BLOCK_H + lane
        p_row = p_heads + h.to(tl.int64) * stride_h
        first, second, rest = _turned(
            p_row, h < HQ, q_weight, q_eps, p_cos, p_sin, HALF, REST, BLOCK, BLOCK_R
        )
        _store_all(p_row, first, second, rest, None, h < HQ, "", HALF, REST, BLOCK, BLOCK_R)
    elif block < Q_BLOCKS + K_BLOCKS:
        h = (block - Q_BLOCKS) * BLOCK_H + lane
        p_row = p_heads + (HQ + h).to(tl.int64) * stride_h
        first, second, rest = _turned(
            p_row, h < HK, k_weight, k_eps, p_cos, p_sin, HALF, REST, BLOCK, BLOCK_R
        )
        _store_all(p_row, first, second, rest, None, h < HK, "", HALF, REST, BLOCK, BLOCK_R)
        if k_cache is not None:
            valid = (h < HK) & inside
            scale = None
            if FORM != "":
                greatest = greater(
                    greatest_of(first.to(tl.float32)), greatest_of(second.to(tl.float32))
                )
                if REST:
                    greatest = greater(greatest, greatest_of(rest.to(tl.float32)))
                scale = scale_of_greatest(greatest, FORM)
                p_ks = k_scale + b * ks_stride_b + n * ks_stride_n + h.to(tl.int64) * ks_stride_h
                tl.store(p_ks, scale, mask=valid)
            p_k = k_cache + b * kc_stride_b + n * kc_stride_n + h.to(tl.int64) * kc_stride_h
            _store_all(p_k, first, second, rest, scale, valid, FORM, HALF, REST, BLOCK, BLOCK_R)
    elif v_cache is not None:
        h = (block - Q_BLOCKS - K_BLOCKS) * BLOCK_H + lane
        valid = (h < HK) & inside
        v = load_rows(p_heads + (HQ + HK + h).to(tl.int64) * stride_h, h < HK, D, BLOCK_D)
        p_vs = None
        if FORM != "":
            p_vs = v_scale + b * vs_stride_b + n * vs_stride_n + h.to(tl.int64) * vs_stride_h
        p_v = v_cache + b * vc_stride_b + n * vc_stride_n + h.to(tl.int64) * vc_stride_h
        store_rows(p_v, v, p_vs, valid, FORM, FORM != "", D, BLOCK_D)


def rotate_heads(heads, q_heads, norms, place, store):
    """Norm and turn heads [B, T, Hq + 2 Hk, D] where they lie: (queries, keys, values).

    ``norms`` are two of (weight [D], eps) or None, of queries and of keys. ``place`` is (cos, sin
    [positions, half], prefix [B], depths [B or 1, T] or None), ``store`` ((k_cache, v_cache) [B, N,
    Hk, D], slot or None, (k_scale, v_scale) [B, N, Hk] or None) or None, as `blocks.Place` and
    `blocks.Store` have them. A row behind the tables is turned as their last one, a slot outside of
    the cache is not written.
    """
    cos, sin, prefix, depths = place
    B, T, _, D = heads.shape
    kv_heads, half = (heads.shape[2] - q_heads) // 2, cos.shape[1]
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], 2)
    if B * T == 0:
        return q, k, v
    (k_cache, v_cache), slot, scales = store or ((None, None), None, (None, None))
    (q_weight, q_eps), (k_weight, k_eps) = (norm or (None, 0.0) for norm in norms)
    form, capacity = "", 0
    if store is not None:
        form, capacity = FORMS.get(k_cache.dtype, ""), k_cache.shape[1]
        k_cache, v_cache = bytes_of(k_cache), bytes_of(v_cache)
    rest = D - 2 * half
    block_h, num_warps = _sizes.rotate_blocks(D, max(q_heads, kv_heads))
    kinds = (q_heads, kv_heads, kv_heads if store is not None else 0)
    launch(
        rotate_heads_kernel, (B * T, sum(triton.cdiv(count, block_h) for count in kinds)),
        heads, q_weight, k_weight, cos, sin, prefix, depths, k_cache, v_cache, *scales,
        T, len(cos), capacity, slot, q_eps, k_eps,
        *strides(heads)[:3], cos.stride(0), *_strides(depths, 2),
        *_strides(k_cache, 3), *_strides(v_cache, 3), *_strides(scales[0], 3),
        *_strides(scales[1], 3),
        FORM=form, HQ=q_heads, HK=kv_heads, HALF=half, REST=rest,
        BLOCK_H=block_h, BLOCK=triton.next_power_of_2(max(half, 1)),
        BLOCK_R=triton.next_power_of_2(max(rest, 1)), BLOCK_D=triton.next_power_of_2(D),
        num_warps=num_warps, **early(heads.device),
    )  # fmt: skip
    return q, k, v


def _strides(x, count):
    return (None,) * count if x is None else strides(x)[:count]
