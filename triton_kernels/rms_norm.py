"""Norms of rows, what a sub-layer adds to the residual stream, and gates: a program for each row.

``x / sqrt(mean(x^2) + eps) * weight``, computed in float32 and rounded once. A row's bits depend on
the row alone.
"""

import torch
import triton
import triton.language as tl

from . import _sizes
from ._bfloat16 import cast
from ._blocks import follow_previous, inverse_root
from ._launch import early, launch
from .linear_few_rows import activated


@triton.jit
def _row(p, outer, inner, outer_stride, inner_stride):
    return p + outer * outer_stride + inner * inner_stride


VARYING = ["inner", "eps", "factor"]


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def norm_kernel(
    x, weight, residual, out, inner, eps, factor,
    x_stride_o, x_stride_i, residual_stride_o, residual_stride_i, out_stride_o, out_stride_i,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Norm one row of x; with a residual, write ``residual + factor * norm(x)``."""
    follow_previous(PDL)
    o, i = (tl.program_id(0) // inner).to(tl.int64), (tl.program_id(0) % inner).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < WIDTH
    row = tl.load(_row(x, o, i, x_stride_o, x_stride_i) + d, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        row *= inverse_root(tl.sum(row * row, 0), eps, WIDTH)
        row *= tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        p_residual = _row(residual, o, i, residual_stride_o, residual_stride_i)
        row = tl.load(p_residual + d, mask=inside, other=0.0).to(tl.float32) + factor * row
    p_out = _row(out, o, i, out_stride_o, out_stride_i)
    tl.debug_barrier()  # several threads may load what one of them stores in its place
    tl.store(p_out + d, cast(row, out.dtype.element_ty), mask=inside)


# fmt: off
@triton.jit(do_not_specialize=["inner"])
def gate_kernel(
    x, gate, out, inner, width, x_stride_o, x_stride_i, gate_stride_o, gate_stride_i,
    out_stride_o, out_stride_i, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Write ``activation(gate) * x`` of some columns of one row."""
    follow_previous(PDL)
    o, i = (tl.program_id(0) // inner).to(tl.int64), (tl.program_id(0) % inner).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    p_gate = _row(gate, o, i, gate_stride_o, gate_stride_i)
    value = activated(tl.load(p_gate + d, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    value *= tl.load(_row(x, o, i, x_stride_o, x_stride_i) + d, mask=inside, other=0.0)
    p_out = _row(out, o, i, out_stride_o, out_stride_i)
    tl.store(p_out + d, cast(value, out.dtype.element_ty), mask=inside)


def rms_norm(x, weight, eps, out=None):
    """Return normed rows of x [.., H], in ``out``, which may be x, if that is given."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _norm(x, weight, None, out, eps, 1.0)
    return out


def add_norm(x, added, factor, weight, eps):
    """Return x, to which ``factor * norm(added)`` was added; it is not normed without a weight."""
    _norm(added, weight, x, x, eps, factor)
    return x


def gate(x, gate, activation):
    """Return ``activation(gate) * x``, both [.., N]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    outer, inner, rows = _rows(x, gate, out)
    width, (block, num_warps) = x.shape[-1], _sizes.gate_blocks()
    launch(
        gate_kernel, (outer * inner, triton.cdiv(width, block)),
        x, gate, out, inner, width, *rows, ACTIVATION=activation, BLOCK=block,
        num_warps=num_warps, **early(x.device),
    )  # fmt: skip
    return out


def _norm(x, weight, residual, out, eps, factor):
    if out.numel() == 0:
        return
    outer, inner, rows = _rows(x, out if residual is None else residual, out)
    block, num_warps = _sizes.norm_blocks(x.shape[-1])
    launch(
        norm_kernel, (outer * inner,),
        x, weight, residual, out, inner, float(eps), float(factor), *rows,
        WIDTH=x.shape[-1], BLOCK=block, num_warps=num_warps, **early(x.device),
    )  # fmt: skip


def _rows(*tensors):
    """Return how the rows of tensors [.., H] of one shape are counted, by two numbers.

    (How many of the first, how many of the second, how far rows lie apart: [outer, inner] of each
    tensor.) Dimensions that lie one behind the other in all of them are one.
    """
    merged = []
    for dim, size in enumerate(tensors[0].shape[:-1]):
        if size == 1:
            continue
        steps = [x.stride(dim) for x in tensors]
        together = merged and all(a == size * b for a, b in zip(merged[-1][1], steps, strict=True))
        if together:
            size *= merged.pop()[0]
        merged.append((size, steps))
    if len(merged) > 2:
        raise ValueError(f"x: expected rows of two strides at most, got {merged}")
    while len(merged) < 2:
        merged.insert(0, (1, [0] * len(tensors)))
    (outer, far), (inner, near) = merged
    return outer, inner, [stride for pair in zip(far, near, strict=True) for stride in pair]
