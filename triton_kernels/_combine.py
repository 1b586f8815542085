"""Merge attention states that cover disjoint sets of keys.

A state is a normalised output and a natural log-sum-exp. With ``m = max_i lse_i``::

    w_i = exp(lse_i - m),   out = sum_i w_i out_i / sum_i w_i,   lse = m + log(sum_i w_i)

An empty state (``lse = -inf``, or +inf as some libraries write it) has weight 0 and its output
does not count, so it may hold anything. The same kernel is the second half of split-KV attention
and the public ``merge_state`` and ``merge_states``.
"""

import torch
import triton
import triton.language as tl

from . import _configs
from ._bfloat16 import cast
from ._blocks import LN2, LOG2E, follow_previous, request_of, split_size_of
from ._launch import early, launch, strides


@triton.jit
def _absorb(m, l, acc, p_out, p_lse, out_stride_i, lse_stride_i, i, count, d, D: tl.constexpr):
    """Add the states ``i`` [I] below ``count`` [R] to m [R], l [R] and columns ``d`` of acc [R, D].

    No load waits for another: what an empty state holds is loaded too, and dropped.
    """
    i64 = i.to(tl.int64)
    used = i[None, :] < count[:, None]
    lse = tl.load(p_lse[:, None] + i64[None, :] * lse_stride_i, mask=used, other=float("-inf"))
    out = tl.load(
        p_out[:, None, None] + i64[None, :, None] * out_stride_i + d[None, None, :],
        mask=used[:, :, None] & (d < D)[None, None, :],
        other=0.0,
    ).to(tl.float32)  # [R, I, D]
    lse = tl.where(lse == float("inf"), float("-inf"), lse)  # [R, I]
    new_m = tl.maximum(m, tl.max(lse, 1))
    pivot = tl.where(new_m == float("-inf"), 0.0, new_m)
    weight = tl.exp2((lse - pivot[:, None]) * LOG2E)
    alpha = tl.exp2((m - pivot) * LOG2E)
    out = tl.where((lse == float("-inf"))[:, :, None], 0.0, out)
    acc = acc * alpha[:, None] + tl.sum(weight[:, :, None] * out, 1)
    l = l * alpha + tl.sum(weight, 1)
    return new_m, l, acc


# As in `_split_kv`: strides of `out` are left, which decide how wide it is loaded and stored.
VARYING = [
    "lses", "lses_b", "lengths", "cache_seqlens", "cu_seqlens_q", "lse",
    "num_rows", "num_states", "T", "HQ", "num_requests", "span", "splits", "least", "most", "unit",
    "lses_stride_i", "lses_stride_b", "lses_stride_t", "lses_stride_h",
    "lses_b_stride_b", "lses_b_stride_t", "lses_b_stride_h",
    "lengths_stride_b", "lengths_stride_l", "cache_seqlens_stride_b",
    "lse_stride_b", "lse_stride_t", "lse_stride_h",
]  # fmt: skip


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    outs, lses, outs_b, lses_b, lengths, cache_seqlens, cu_seqlens_q, out, lse,
    num_rows, num_states, T, HQ, num_requests, span, splits, least, most, unit,
    outs_stride_i, outs_stride_b, outs_stride_t, outs_stride_h,
    lses_stride_i, lses_stride_b, lses_stride_t, lses_stride_h,
    outs_b_stride_b, outs_b_stride_t, outs_b_stride_h,
    lses_b_stride_b, lses_b_stride_t, lses_b_stride_h,
    lengths_stride_b, lengths_stride_l, cache_seqlens_stride_b,
    out_stride_b, out_stride_t, out_stride_h,
    lse_stride_b, lse_stride_t, lse_stride_h,
    D: tl.constexpr, GROUP: tl.constexpr, PER_ROW: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Merge all states of a block of rows (request, token, query head), in a block of columns."""
    follow_previous(PDL)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = row < num_rows
    b = (row // (T * HQ)).to(tl.int64)
    t = row // HQ % T
    h = row % HQ

    count = tl.zeros([BLOCK_R], tl.int32) + num_states
    if lengths is not None:
        owner = b
        if cu_seqlens_q is not None:
            owner = request_of(t, cu_seqlens_q, num_requests).to(tl.int64)
        own = t if PER_ROW else h // GROUP
        p_length = lengths + owner * lengths_stride_b + own * lengths_stride_l
        length = tl.load(p_length, mask=row_ok, other=0)
        if cache_seqlens is not None:
            p_length = cache_seqlens + owner * cache_seqlens_stride_b
            length = tl.where(length < 0, tl.load(p_length, mask=row_ok, other=0), length)
        keys = tl.minimum(length, span)
        size = split_size_of(keys, splits, least, most, num_states, unit)
        count = tl.maximum((keys + size - 1) // size, 1)
    count = tl.where(row_ok, count, 0)

    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)

    t, h = t.to(tl.int64), h.to(tl.int64)
    p_out = outs + b * outs_stride_b + t * outs_stride_t + h * outs_stride_h
    p_lse = lses + b * lses_stride_b + t * lses_stride_t + h * lses_stride_h
    for i0 in range(0, tl.max(count, 0), BLOCK_I):
        i = i0 + tl.arange(0, BLOCK_I)
        m, l, acc = _absorb(
            m, l, acc, p_out, p_lse, outs_stride_i, lses_stride_i, i, count, d, D
        )
    if outs_b is not None:
        p_out = outs_b + b * outs_b_stride_b + t * outs_b_stride_t + h * outs_b_stride_h
        p_lse = lses_b + b * lses_b_stride_b + t * lses_b_stride_t + h * lses_b_stride_h
        i = tl.arange(0, 1)
        m, l, acc = _absorb(m, l, acc, p_out, p_lse, 0, 0, i, row_ok.to(tl.int32), d, D)

    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    result = cast(acc / l[:, None], out.dtype.element_ty)
    result_lse = tl.where(empty, float("-inf"), m + tl.log2(l) * LN2)
    p_out = out + b * out_stride_b + t * out_stride_t + h * out_stride_h
    p_lse = lse + b * lse_stride_b + t * lse_stride_t + h * lse_stride_h
    tl.store(p_out[:, None] + d[None, :], result, mask=row_ok[:, None] & (d < D)[None, :])
    if tl.program_id(1) == 0:
        tl.store(p_lse, result_lse, mask=row_ok)


def partial_states(slots, out, lse):
    """Return where ``slots`` states go [slots, *]: into ``out`` and ``lse``, or a workspace."""
    if slots == 1:
        return out[None], lse[None]
    float32 = {"dtype": torch.float32, "device": out.device}
    return torch.empty((slots, *out.shape), **float32), torch.empty((slots, *lse.shape), **float32)


def combine(
    outs,
    lses,
    out,
    lse,
    *,
    pair=None,
    lengths=None,
    splits=None,
    span=0,
    unit=0,
    cache_seqlens=None,
    cu_seqlens_q=None,
    per_row=False,
):
    """Merge states along dimension 0 of ``outs`` [n, B, T, Hq, D] and ``lses`` [n, B, T, Hq].

    ``pair`` = (out, lse) is one more state, not stacked with the others. Without ``lengths`` all
    ``n`` states count. With ``lengths`` [B, 1 or Hk], or ``per_row`` [B, T], a list's are as many
    as it has splits, cut by ``splits`` and ``unit`` from ``min(length, span)`` keys; the others are
    not read. A length of -1 stands for that of ``cache_seqlens`` [B]. With ``cu_seqlens_q`` [B + 1]
    the rows of all requests are one batch: ``outs`` [n, 1, tokens, Hq, D].
    """
    num_states, B, T, heads, D = outs.shape
    outs_b, lses_b = pair or (None, None)
    at_once = min(_configs.COMBINED, num_states) if splits else num_states
    block_r, block_i, block_d, num_warps = _configs.combine_blocks(
        outs.device, at_once, D, cu_seqlens_q is not None
    )
    num_rows = B * T * heads
    launch(
        combine_kernel, (triton.cdiv(num_rows, block_r), triton.cdiv(D, block_d)),
        outs, lses, outs_b, lses_b, lengths, cache_seqlens, cu_seqlens_q, out, lse,
        num_rows, num_states, T, heads,
        cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else None,
        *((span, splits.wanted, splits.least, splits.most, unit) if splits else (None,) * 5),
        *strides(outs)[:4],
        *lses.stride(),
        *(strides(outs_b)[:3] if pair else (0, 0, 0)),
        *(lses_b.stride() if pair else (0, 0, 0)),
        *(strides(lengths) if lengths is not None else (0, 0)),
        cache_seqlens.stride(0) if cache_seqlens is not None else None,
        *strides(out)[:3],
        *lse.stride(),
        D=D,
        GROUP=heads // lengths.shape[1] if lengths is not None and not per_row else 1,
        PER_ROW=per_row,
        BLOCK_R=block_r,
        BLOCK_I=block_i,
        BLOCK_D=block_d,
        num_warps=num_warps,
        **early(outs.device),
    )  # fmt: skip
