"""New keys and values, written into their slots of a cache.

A row is one head of one token; a program takes a tile of rows [R, D], of keys and of values. It
asks for them before it knows their slots, so the two latencies overlap.
"""

import triton
import triton.language as tl

from . import _sizes
from ._bfloat16 import cast
from ._blocks import load_rows
from ._eight_bits import FORMS, bytes_of, dynamic_scale, over, rounded, scale_strides
from ._launch import launch


@triton.jit
def store_rows(
    p_row, x, p_scale, valid, FORM: tl.constexpr, DYNAMIC: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the first ``D`` elements of valid rows [R, BLOCK_D] in the dtype they point to.

    Those of 8 bits are over the rows' scales, which lie at ``p_scale`` [R] or are chosen for it.
    """
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None]
    if D != BLOCK_D:
        mask = mask & (d < D)[None, :]
    if FORM != "":
        x = x.to(tl.float32)
        if DYNAMIC:
            scale = dynamic_scale(x, FORM)
            tl.store(p_scale, scale, mask=valid)
            x = over(x, scale[:, None])
        elif p_scale is not None:
            x = over(x, tl.load(p_scale, mask=valid, other=1.0)[:, None])
        x = rounded(x, FORM)
    elif x.dtype != p_row.dtype.element_ty:
        x = cast(x.to(tl.float32), p_row.dtype.element_ty)
    tl.store(p_row[:, None] + d[None, :], x, mask=mask)


VARYING = [
    "num_rows", "T", "slots_stride_b", "k_scale", "v_scale",
    "ks_stride_p", "ks_stride_s", "ks_stride_h", "vs_stride_p", "vs_stride_s", "vs_stride_h",
]  # fmt: skip


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def write_kv_kernel(
    k, v, k_cache, v_cache, slots, k_scale, v_scale, num_rows, T, page_size,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    kc_stride_p, kc_stride_s, kc_stride_h, vc_stride_p, vc_stride_s, vc_stride_h, slots_stride_b,
    ks_stride_p, ks_stride_s, ks_stride_h, vs_stride_p, vs_stride_s, vs_stride_h,
    FORM: tl.constexpr, DYNAMIC: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # fmt: on
    """Write a tile of rows; without ``page_size`` the slots of all pages are evenly spaced.

    ``v`` is None where there are no values to write.
    """
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    ok = r < num_rows
    token, h = r // HEADS, r % HEADS
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    new_k = load_rows(k + b * k_stride_b + t * k_stride_t + h * k_stride_h, ok, D, BLOCK_D)
    if v is not None:
        new_v = load_rows(v + b * v_stride_b + t * v_stride_t + h * v_stride_h, ok, DV, BLOCK_D)
    slot = tl.load(slots + b * slots_stride_b + t, mask=ok, other=-1).to(tl.int64)
    ok = slot >= 0
    p_ks, p_vs = k_scale, v_scale
    if k_scale is not None:
        p_ks = k_scale + h * ks_stride_h
    if v_scale is not None:
        p_vs = v_scale + h * vs_stride_h
    p_k = k_cache + h * kc_stride_h
    page = slot * 0
    if page_size is not None:
        page = slot // page_size
        p_k += page * kc_stride_p
        if ks_stride_s is not None:
            p_ks += page * ks_stride_p
        if vs_stride_s is not None:
            p_vs += page * vs_stride_p
        slot = slot % page_size
    if ks_stride_s is not None:
        p_ks += slot * ks_stride_s
    if vs_stride_s is not None:
        p_vs += slot * vs_stride_s
    store_rows(p_k + slot * kc_stride_s, new_k, p_ks, ok, FORM, DYNAMIC, D, BLOCK_D)
    if v is not None:
        p_v = v_cache + h * vc_stride_h + page * vc_stride_p + slot * vc_stride_s
        store_rows(p_v, new_v, p_vs, ok, FORM, DYNAMIC, DV, BLOCK_D)


def _strides(x):
    return (None, None, None) if x is None else x.stride()[:3]


def write_kv(k, v, k_cache, v_cache, slots, k_scale, v_scale, new_k_scale, new_v_scale):
    """Write k, v [B, T, Hk, D] into caches [pages, page_size, Hk, D] at slots [B, T].

    ``v`` and its cache may be None, or have a D of their own. A slot is
    ``page * page_size + offset``; negative ones are skipped. A cache of 8 bits holds rows over
    their scales, [Hk] or [pages, page_size, Hk], or over new ones, which are written.
    """
    form, dynamic = FORMS.get(k_cache.dtype, ""), new_k_scale is not None
    k_cache, v_cache = bytes_of(k_cache), None if v is None else bytes_of(v_cache)
    if dynamic:
        k_scale, v_scale = new_k_scale, new_v_scale
    B, T, heads, D = k.shape
    page_size = k_cache.shape[1]
    placed = [x for x in (k_cache, v_cache, k_scale, v_scale) if x is not None and x.dim() > 1]
    even = all(x.stride(0) == page_size * x.stride(1) for x in placed)
    num_rows = B * T * heads
    v_dim = D if v is None else v.shape[3]
    block_r, block_d, num_warps = _sizes.write_blocks(max(D, v_dim))
    launch(
        write_kv_kernel, (triton.cdiv(num_rows, block_r),),
        k, v, k_cache, v_cache, slots, k_scale, v_scale, num_rows, T, None if even else page_size,
        *k.stride()[:3], *_strides(v), *k_cache.stride()[:3], *_strides(v_cache),
        slots.stride(0), *scale_strides(k_scale), *scale_strides(v_scale),
        FORM=form, DYNAMIC=dynamic,
        HEADS=heads, D=D, DV=v_dim, BLOCK_R=block_r, BLOCK_D=block_d,
        num_warps=num_warps,
    )  # fmt: skip
