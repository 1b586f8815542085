"""A linear layer for 1 to 64 rows: a program for each block of outputs reads its weights once.

Rows [M, K] are padded to 16, 32 or twice 32, weights lie as [N, K]. A sum is one chain of
mma.m16n8k16 along K; it is never split, and 64 rows are two products, since one would become wgmma,
which sums otherwise. So a row has the same bits among any others. A float32 is the sum of two TF32,
of which three products are made, as exact as to 2^-22: fused multiply-adds would read shared memory
with conflicts, four times as long as the weights take. Tensor cores cut sums off instead of
rounding them, so 32 products (16 if K is no multiple) are summed by themselves.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM108

import torch
import triton
import triton.language as tl

from . import _sizes
from ._bfloat16 import cast, dot
from ._blocks import let_next_start, wait_for_previous
from ._launch import early, launch

MOST_ROWS = 64
MOST_PARTS = 3  # weights that one launch multiplies with


@triton.jit
def _load(p_row, row_ok, k, K, ALL: tl.constexpr, DEEP: tl.constexpr):
    """Load columns ``k`` of rows [R, BLOCK_K]; rows not ``row_ok`` and columns beyond K are 0.

    ``ALL`` says that all rows are there, ``DEEP`` that all columns are.
    """
    p = p_row[:, None] + k[None, :]
    if DEEP:
        if ALL:
            tile = tl.load(p)
        else:
            tile = tl.load(p, mask=row_ok[:, None], other=0.0)
    else:
        inside = (k < K)[None, :]
        if not ALL:
            inside = inside & row_ok[:, None]
        tile = tl.load(p, mask=inside, other=0.0)
    return tile


@triton.jit
def _prefetch(p_row, n, N, stride, K, WHOLE: tl.constexpr):
    """Ask for the first KiB of rows ``n`` to come to L2; in place of one behind the last, of that.

    ``WHOLE`` says that there is none.
    """
    SIZE: tl.constexpr = p_row.dtype.element_ty.primitive_bitwidth // 8
    if not WHOLE:
        p_row += (tl.minimum(n, N - 1) - n).to(tl.int64) * stride
    k = tl.minimum(tl.arange(0, 8) * (128 // SIZE), K - 1)
    line = p_row[:, None] + k[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def _plus(total, rows, w, PRECISION: tl.constexpr):
    """Return sums [rows, outputs] with the products of a tile added."""
    if PRECISION == "tf32x3":
        # The last argument keeps Triton from making the addition a part of the product.
        total += tl.dot(rows, w, input_precision="tf32x3", max_num_imprecise_acc=32)
    else:
        total = dot(rows, w, total)
    return total


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Return an activation of a float32 tensor."""
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    if ACTIVATION == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    if ACTIVATION == "gelu_tanh":  # (1 + tanh(y)) / 2 is the sigmoid of 2 y, where nothing cancels
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return x


# fmt: off
@triton.jit
def _store(
    total, gate, m, n, M, n_ok, bias, residual, out, residual_stride, out_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr,
):
    # fmt: on
    """Finish sums [rows, outputs], round once and store them."""
    mask = m[:, None] < M
    if not WHOLE:
        mask = mask & n_ok[None, :]
    if bias is not None:
        total += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    total = activated(total, ACTIVATION)
    if GATED:
        total *= gate
    row = m.to(tl.int64)[:, None]
    if residual is not None:
        p_residual = residual + row * residual_stride + n[None, :]
        total += tl.load(p_residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + n[None, :], cast(total, out.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit(do_not_specialize=["M"])
def linear_few_rows_kernel(
    x, weight, bias, up, residual, out, second, second_bias, third, third_bias,
    M, N, second_N, third_N, K, x_stride, weight_stride, up_stride, residual_stride, out_stride,
    ACTIVATION: tl.constexpr, WHOLE: tl.constexpr, DEEP: tl.constexpr, TWO: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # fmt: on
    """Compute a block of outputs of BLOCK_M rows, or of ``TWO`` times as many.

    ``WHOLE`` and ``DEEP`` say that N and K are multiples of BLOCK_N and BLOCK_K. Outputs of a
    ``second`` and a ``third`` weight, whose rows are as far apart, stand beside those of the first.
    """
    block = tl.program_id(0)
    before = 0  # outputs of the weights before this program's
    for other in tl.static_range(2):
        of = ((second, second_bias, second_N), (third, third_bias, third_N))[other]
        if of[0] is not None:
            blocks = tl.cdiv(N, BLOCK_N)
            if block >= blocks:
                block -= blocks
                before += N
                weight, bias, N = of
    out += before
    if residual is not None:
        residual += before
    m, n = tl.arange(0, BLOCK_M), block * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < N
    p_x = x + m.to(tl.int64) * x_stride
    p_other = x + (m + BLOCK_M).to(tl.int64) * x_stride
    p_weight = weight + n.to(tl.int64) * weight_stride
    p_up = p_weight
    if up is not None:
        p_up = up + n.to(tl.int64) * up_stride
    if PDL:  # weights depend on no launch: meanwhile they come nearer
        _prefetch(p_weight, n, N, weight_stride, K, WHOLE)
        if up is not None:
            _prefetch(p_up, n, N, up_stride, K, WHOLE)
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate, more, more_gate = total, total, total  # ``more`` is of the second tile of rows
    for k0 in tl.range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        rows = _load(p_x, m < M, k, K, False, DEEP)
        w = _load(p_weight, n_ok, k, K, WHOLE, DEEP).T
        total = _plus(total, rows, w, PRECISION)
        if TWO:
            others = _load(p_other, m + BLOCK_M < M, k, K, False, DEEP)
            more = _plus(more, others, w, PRECISION)
        if up is not None:
            u = _load(p_up, n_ok, k, K, WHOLE, DEEP).T
            gate = _plus(gate, rows, u, PRECISION)
            if TWO:
                more_gate = _plus(more_gate, others, u, PRECISION)
    let_next_start(PDL)  # which before would take places from programs that read weights
    _store(
        total, gate, m, n, M, n_ok, bias, residual, out, residual_stride, out_stride,
        ACTIVATION, up is not None, WHOLE,
    )  # fmt: skip
    if TWO:
        _store(
            more, more_gate, m + BLOCK_M, n, M, n_ok, bias, residual, out, residual_stride,
            out_stride, ACTIVATION, up is not None, WHOLE,
        )  # fmt: skip


def not_served(x, weight, bias, up, *others):
    """Return why the kernel does not take a call, or None."""
    if any(t is not None and not _in_words(t) for t in (weight, up)):
        return "codes of 4 bits whose rows begin beside multiples of four bytes"
    return f"{len(x)} rows, more than {MOST_ROWS}" if len(x) > MOST_ROWS else None


def _in_words(weight):
    """Return whether rows of packed codes can be read by 32 bits."""
    return weight.dtype != torch.uint8 or (weight.data_ptr() | weight.stride(0)) % 4 == 0


def _row_stride(x):
    """Return how far rows lie apart; of a single row, which may say anything, as if it had more."""
    if x is None:
        return 0
    return x.stride(0) if len(x) > 1 else x.shape[1]


def linear_few_rows(
    x, weight, bias, up, activation, residual, scale, zero, up_scale, up_zero, out
):
    """Write ``act(x weight^T + bias) * (x up^T) + residual`` for x [M, K], weights [N, K]."""
    _multiply(x, [(weight, bias, scale, zero)], (up, up_scale, up_zero), activation, residual, out)


def linear_parts(x, parts, residual, out):
    """Write ``x weight^T + bias`` of weights [.., K] side by side, plus residual.

    `parts` are up to three of weight, bias, scale and zero. Rows of all weights are as far apart;
    all have biases, scales and zero points, or none has, and those of rows are as far apart.
    """
    _multiply(x, parts, (None, None, None), None, residual, out)


def _multiply(x, parts, up, activation, residual, out):
    if len(x) == 0:
        return
    weights, biases, scales, _ = zip(*parts, strict=True)
    if scales[0] is not None:
        from ._linear_codes import linear_codes  # which is made of parts of this file

        linear_codes(x, parts, up, activation, residual, out)
        return
    (M, K), sizes, up = x.shape, [len(weight) for weight in weights], up[0]
    blocks = _sizes.linear_blocks(x.device, x.dtype, M, sum(sizes), K, up is not None)
    (weight, bias), second, third = ([*zip(weights, biases, strict=True)] + [(None, None)] * 2)[:3]
    launch(
        linear_few_rows_kernel, (sum(triton.cdiv(N, blocks.block_n) for N in sizes),),
        x, weight, bias, up, residual, out, *second, *third,
        M, *([*sizes, 0, 0][:3]), K, *map(_row_stride, (x, weight, up, residual, out)),
        ACTIVATION=activation, WHOLE=all(N % blocks.block_n == 0 for N in sizes),
        DEEP=K % blocks.block_k == 0, TWO=M > 32, PRECISION=blocks.precision,
        BLOCK_M=blocks.block_m, BLOCK_N=blocks.block_n, BLOCK_K=blocks.block_k,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages, **blocks.options,
        **early(x.device),
    )  # fmt: skip
