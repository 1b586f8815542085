"""Attention of few rows to a prefix of 8 bits: what fills a step of the loop is kept small.

Codes are loaded two by two, as elements of 16 bits, which is how matrix units' loads (ldmatrix)
take keys and, transposed, values; a register then holds two pairs, and becomes two registers of
float16: the pairs' first codes and their second ones. So columns are multiplied in two halves, even
and odd ones. Every code is a number of float16, whatever type queries have:

* queries are multiplied with a power of two of their row, whose inverse goes into the logits: what
  is lost of them is less than 2**-39 of their greatest element;
* weights are times the values' scales over a power of two, the greatest of all keys so far, and
  times ``2**14``: what is lost of them is less than 2**-38 of the greatest.

A running sum of weights per place of a tile is summed over places once, behind the loop.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102, SIM108

import triton
import triton.language as tl

from ._bfloat16 import cast, dot
from ._blocks import LOG2E, cache_rows, load_rows
from ._eight_bits import numbers, scale_of

LIFT = tl.constexpr(14.0)  # weights are 2**14 times as large: up to 2**15 with scales up to 2
EXPONENT = tl.constexpr(0x7F800000)  # of a float32
INVERSE = tl.constexpr(0x7F000000)  # less the bits of a power of two: those of its inverse
LEAST_UNIT = tl.constexpr(63 << 23)  # 2**-64, of values' scales


@triton.jit
def _halves(x):
    """Cut a tile [R, C] into its even and its odd columns."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def pairs(x, FORM: tl.constexpr, NATIVE: tl.constexpr, PTX: tl.constexpr):
    """Return the first and the second codes of pairs, int16, as numbers of float16."""
    if PTX and FORM == "int8":  # a byte of another sign beside 0x64 is 1024 + 128 + code
        first, second = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            lop3.b32 a, $2, 0x00ff00ff, $3, 0x6a;
            shr.u32 b, $2, 8;
            lop3.b32 b, b, 0x00ff00ff, $3, 0x6a;
            sub.rn.f16x2 $0, a, $3;
            sub.rn.f16x2 $1, b, $3; }""",
            "=r,=r,r,r", [x, tl.full(x.shape, 0x6480, tl.int16)],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif PTX and FORM == "e5m2":
        first, second = tl.inline_asm_elementwise(
            """{ prmt.b32 $0, $2, 0, 0x2404;
            and.b32 $1, $2, 0xff00ff00; }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif PTX and NATIVE:
        first, second = tl.inline_asm_elementwise(
            """{ .reg .b32 a;
            .reg .b16 b, c;
            prmt.b32 a, $2, 0, 0x3120;
            mov.b32 {b, c}, a;
            cvt.rn.f16x2.e4m3x2 $0, b;
            cvt.rn.f16x2.e4m3x2 $1, c; }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif PTX:  # as in `_linear_codes`; 480, which 0x7f would be, becomes NaN by another bit
        first, second = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, odd;
            and.b32 odd, $2, 0x7f7f7f7f;
            add.u32 odd, odd, 0x01010101;
            prmt.b32 a, $2, 0, 0xa280;
            shl.b32 a, a, 7;
            and.b32 a, a, 0xbf80bf80;
            mul.rn.f16x2 a, a, $3;
            shr.u32 b, $2, 1;
            and.b32 b, b, 0x3f803f80;
            lop3.b32 b, $2, 0x80008000, b, 0xea;
            mul.rn.f16x2 b, b, $3;
            .reg .b32 c, d;
            shl.b32 c, odd, 6;
            shr.u32 d, odd, 2;
            lop3.b32 $0, c, 0x20002000, a, 0xea;
            lop3.b32 $1, d, 0x20002000, b, 0xea; }""",
            "=r,=r,r,r", [x, tl.full(x.shape, 0x5C00, tl.int16)],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = x & 0xFF, (x >> 8) & 0xFF
        byte: tl.constexpr = tl.int8 if FORM == "int8" else tl.uint8
        first = cast(numbers(low.to(byte), FORM, NATIVE), tl.float16)
        second = cast(numbers(high.to(byte), FORM, NATIVE), tl.float16)
    return first, second


@triton.jit
def _exponents(x):
    """Return the bits of the power of two below each magnitude of float32; none for 0."""
    return x.to(tl.int32, bitcast=True) & EXPONENT


@triton.jit
def _queries(q, scale):
    """Return even and odd columns of queries as float16, and what makes their products logits."""
    q = q.to(tl.float32)
    # The greatest becomes 2**14 to 2**15; 15 is added so that the inverse is no subnormal number.
    exponent = tl.maximum(tl.max(_exponents(q), 1), 15 << 23)
    power = (-exponent + INVERSE + (14 << 23)).to(tl.float32, bitcast=True)
    power = tl.where(scale < 0, -power, power)  # so that the greatest product is the greatest logit
    even, odd = _halves(q * power[:, None])
    factor = (exponent - (14 << 23)).to(tl.float32, bitcast=True) * (tl.abs(scale) * LOG2E)
    return cast(even, tl.float16), cast(odd, tl.float16), factor


# fmt: off
@triton.jit
def attend_pairs(
    q, m, l, acc, b, begin, end,
    p_k, p_v, k_stride_b, k_stride_n, v_stride_b, v_stride_n, index_row, listed, page_row,
    k_scale, v_scale, scale_strides, scale,
    PAGE_SIZE: tl.constexpr, ALIKE: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr,
    PTX: tl.constexpr, WIDTHS: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # fmt: on
    """Attend to the prefix's keys [begin, end), all of which every row sees, as `softmax_step`."""
    q_even, q_odd, factor = _queries(q, scale)
    even, odd = _halves(acc * 2.0**LIFT)
    l = l * 2.0**LIFT
    places = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
    unit = 1.0  # of which `acc` is a multiple
    most = LEAST_UNIT
    for n0 in tl.range(0, end - begin, BLOCK_N):
        n = begin + n0 + tl.arange(0, BLOCK_N)
        valid = n < end
        outer, inner = cache_rows(n, valid, b, index_row, listed, page_row, PAGE_SIZE)
        k_row = outer * k_stride_b + inner * k_stride_n
        v_row = k_row if ALIKE else outer * v_stride_b + inner * v_stride_n
        unseen = tl.where(valid, 0.0, float("-inf"))
        ks = 1.0
        if k_scale is not None:
            ks = scale_of(k_scale, outer, inner, valid, scale_strides[0], scale_strides[1])
            if ks.type.is_block():
                ks = ks[None, :]
        p_first = (p_k + k_row).to(tl.pointer_type(tl.int16), bitcast=True)
        k = load_rows(p_first, valid, WIDTHS[0] // 2, WIDTHS[1] // 2)
        k_even, k_odd = pairs(k, FORM, NATIVE, PTX)
        s = dot(q_odd, tl.trans(k_odd), dot(q_even, tl.trans(k_even)))
        s = tl.fma(s, ks, unseen[None, :])
        new_m = tl.maximum(m, tl.max(s, 1) * factor)
        pivot = tl.where(new_m == float("-inf"), 0.0, new_m)  # -inf - -inf would be NaN
        p = tl.exp2(tl.fma(s, factor[:, None], (-pivot + LIFT)[:, None]))
        alpha = tl.exp2(m - pivot)
        m = new_m
        l = l * alpha
        places = tl.fma(places, alpha[:, None], p)
        if v_scale is not None:
            vs = scale_of(v_scale, outer, inner, valid, scale_strides[2], scale_strides[3])
            top = _exponents(vs)
            if vs.type.is_block():
                top = tl.max(top, 0)
            most = tl.minimum(tl.maximum(most, top), INVERSE)
            inverse = (-most + INVERSE).to(tl.float32, bitcast=True)
            alpha = alpha * (unit * inverse)
            unit = most.to(tl.float32, bitcast=True)
            vs = vs * inverse
            if vs.type.is_block():
                vs = vs[None, :]
            p = p * vs
        weights = cast(p, tl.float16)
        p_first = (p_v + v_row).to(tl.pointer_type(tl.int16), bitcast=True)
        v = load_rows(p_first, valid, WIDTHS[3] // 2, WIDTHS[4] // 2)
        v_even, v_odd = pairs(v, FORM, NATIVE, PTX)
        even = dot(weights, v_even, even * alpha[:, None])
        odd = dot(weights, v_odd, odd * alpha[:, None])
    acc = tl.reshape(tl.join(even, odd), acc.shape)
    return m, (l + tl.sum(places, 1)) * 2.0**-LIFT, acc * (unit * 2.0**-LIFT)
