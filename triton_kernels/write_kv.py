"""New keys and values, written into their slots of a cache.

A row is one head of one token; a program takes a tile of rows [R, D], of keys and of values. It
asks for them before it knows their slots, so the two latencies overlap.
"""

import triton
import triton.language as tl

from . import _configs
from ._bfloat16 import cast
from ._blocks import load_rows
from ._launch import launch


@triton.jit
def _store_rows(p_row, x, valid, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the first ``D`` elements of valid rows [R, BLOCK_D] in the dtype they point to."""
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None]
    if D != BLOCK_D:
        mask = mask & (d < D)[None, :]
    if x.dtype != p_row.dtype.element_ty:
        x = cast(x.to(tl.float32), p_row.dtype.element_ty)
    tl.store(p_row[:, None] + d[None, :], x, mask=mask)


# fmt: off
@triton.jit(do_not_specialize=["num_rows", "T"])
def write_kv_kernel(
    k, v, k_cache, v_cache, slots, num_rows, T, page_size,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    kc_stride_p, kc_stride_s, kc_stride_h, vc_stride_p, vc_stride_s, vc_stride_h, slots_stride_b,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # fmt: on
    """Write a tile of rows; without ``page_size`` the slots of all pages are evenly spaced."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    ok = r < num_rows
    token, h = r // HEADS, r % HEADS
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    new_k = load_rows(k + b * k_stride_b + t * k_stride_t + h * k_stride_h, ok, D, BLOCK_D)
    new_v = load_rows(v + b * v_stride_b + t * v_stride_t + h * v_stride_h, ok, D, BLOCK_D)
    slot = tl.load(slots + b * slots_stride_b + t, mask=ok, other=-1).to(tl.int64)
    ok = slot >= 0
    p_k, p_v = k_cache + h * kc_stride_h, v_cache + h * vc_stride_h
    if page_size is not None:
        page = slot // page_size
        p_k, p_v = p_k + page * kc_stride_p, p_v + page * vc_stride_p
        slot = slot % page_size
    _store_rows(p_k + slot * kc_stride_s, new_k, ok, D, BLOCK_D)
    _store_rows(p_v + slot * vc_stride_s, new_v, ok, D, BLOCK_D)


def write_kv(k, v, k_cache, v_cache, slots):
    """Write k, v [B, T, Hk, D] into caches [pages, page_size, Hk, D] at slots [B, T].

    A slot is ``page * page_size + offset``; negative ones are skipped.
    """
    B, T, heads, D = k.shape
    page_size = k_cache.shape[1]
    even = all(x.stride(0) == page_size * x.stride(1) for x in (k_cache, v_cache))
    num_rows = B * T * heads
    block_r, block_d, num_warps = _configs.write_blocks(D)
    launch(
        write_kv_kernel, (triton.cdiv(num_rows, block_r),),
        k, v, k_cache, v_cache, slots, num_rows, T, None if even else page_size,
        *k.stride()[:3], *v.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
        slots.stride(0),
        HEADS=heads, D=D, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=num_warps,
    )  # fmt: skip
