"""A short causal convolution over a tree: a program for each request and block of channels.

What is kept and the tree's rows are one table of inputs, read once; each tap gathers from it the
rows one step further up. Above an input that is kept lies the one before.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102

import triton
import triton.language as tl

from . import _sizes
from ._bfloat16 import cast
from ._launch import launch
from ._states import MOST_ROWS, row_strides, rows_of

VARYING = ["parents", "bias", "cu_seqlens_q", "T", "channels", "parents_stride_b"]


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def causal_conv_kernel(
    x, weight, bias, kept, parents, cu_seqlens_q, out, T, channels,
    x_stride_b, x_stride_t, weight_stride_c, kept_stride_b, kept_stride_t, parents_stride_b,
    out_stride_b, out_stride_t,
    TAPS: tl.constexpr, SILU: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr,
):
    # fmt: on
    """Convolve a block of channels of one request's rows; inputs are [kept, rows] [I, C]."""
    b = tl.program_id(1).to(tl.int64)
    first, T = rows_of(b, cu_seqlens_q, T)
    if T <= 0:
        return
    KEPT: tl.constexpr = TAPS - 1
    place = tl.arange(0, BLOCK_I)
    row = place - KEPT
    row_ok = (row >= 0) & (row < T)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    p_x = x + b * x_stride_b + (first + row)[:, None] * x_stride_t + c[None, :]
    p_kept = kept + b * kept_stride_b + place[:, None] * kept_stride_t + c[None, :]
    p_input = tl.where((row < 0)[:, None], p_kept, p_x)
    known = ((row < 0) | row_ok)[:, None] & inside[None, :]
    inputs = tl.load(p_input, mask=known, other=0.0).to(tl.float32)
    above = place - 1
    if parents is not None:
        p_parents = parents + b * parents_stride_b + first + row
        parent = tl.load(p_parents, mask=row_ok, other=0).to(tl.int32) + KEPT
        above = tl.where(row < 0, above, parent)
    above = tl.maximum(above, 0)
    at = place
    total = tl.zeros([BLOCK_I, BLOCK_C], tl.float32)
    for step in tl.static_range(TAPS):
        w = tl.load(weight + c * weight_stride_c + (KEPT - step), mask=inside, other=0.0)
        seen = inputs
        if step > 0:
            at = tl.gather(above, at, 0)
            seen = tl.gather(inputs, tl.broadcast_to(at[:, None], inputs.shape), 0)
        total += seen * w.to(tl.float32)[None, :]
    if bias is not None:
        total += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    p_out = out + b * out_stride_b + (first + row)[:, None] * out_stride_t + c[None, :]
    tl.store(p_out, cast(total, out.dtype.element_ty), mask=row_ok[:, None] & inside[None, :])


def not_served(x, weight, bias, conv_state, parents, activation, starts, most, out):
    """Return why the kernel does not take a call, or None."""
    rows = x.shape[1] if starts is None else most
    return f"{rows} rows of a request, more than {MOST_ROWS}" if rows > MOST_ROWS else None


def causal_conv_tree(
    x, weight, bias, conv_state, parents, activation, cu_seqlens_q, max_seqlen_q, out
):
    """Convolve rows ``x`` [B, T, C], or [tokens, C] with ``cu_seqlens_q``, along their paths."""
    ragged = cu_seqlens_q is not None
    B, kept, channels = conv_state.shape
    rows = max_seqlen_q if ragged else x.shape[1]
    block_i, block_c, num_warps = _sizes.conv_blocks(rows + kept)
    launch(
        causal_conv_kernel, (triton.cdiv(channels, block_c), B),
        x, weight, bias, conv_state, parents, cu_seqlens_q, out, rows, channels,
        *row_strides(x, ragged), weight.stride(0), *conv_state.stride()[:2],
        0 if parents is None or ragged else row_strides(parents, False)[0],
        *row_strides(out, ragged),
        TAPS=kept + 1, SILU=activation == "silu", BLOCK_I=block_i, BLOCK_C=block_c,
        num_warps=num_warps,
    )  # fmt: skip
