"""A linear layer for 1 to 64 rows whose weights are codes of 8 or 4 bits, as `_codes` packs them.

What is multiplied is ``code - zero``, which is exact in 16 bits; products of up to 128 codes with
one scale are a chain of mma.m16n8k16 of their own, and their sum times the scale is added in
float32. Sums are never split, so a row has the same bits among any others (`linear_few_rows`).
Codes become numbers in registers: of 4 bits two neighbours stand in one, where a bitwise operation
makes them 128 + code (in float16 1024 + code), and an addition takes off 128 + zero. Floats of 8
bits take four instructions for two, on every GPU: few have one that makes a bfloat16 of them.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM108

import math

import torch
import triton
import triton.language as tl

from . import _configs, _sizes
from ._bfloat16 import cast
from ._blocks import let_next_start, wait_for_previous
from ._eight_bits import numbers as widened
from ._launch import early, launch
from .linear_few_rows import _load, _plus, _prefetch, _row_stride, _store

BLOCK = tl.constexpr(128)  # codes whose words lie together
FORMS = {  # of codes, and what kernels read them as
    torch.int8: ("int8", torch.int8),
    torch.uint8: ("int4", torch.int32),
    torch.float8_e4m3fn: ("e4m3", torch.uint8),
}
_STEPS = [f"{part}{of}_step" for part in ("", "second_", "third_") for of in ("scale", "zero")]
# Twice -128 as bfloat16, and -1024 as float16: a zero point is added to the last bits of both.
LESS_BFLOAT16 = tl.constexpr(0xC300C300 - 2**32)
LESS_FLOAT16 = tl.constexpr(0xE400E400 - 2**32)


@triton.jit
def _nibbles(words, zero, SHIFT: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """Return codes at a shift of words [N, 16], less zeros [N], as numbers [N, 32]."""
    words = words >> SHIFT
    if PTX and dtype == tl.bfloat16:
        less = tl.broadcast_to((zero * 0x10001 + LESS_BFLOAT16)[:, None], words.shape)
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t, one;
            mov.b32 one, 0x3f803f80;
            lop3.b32 t, $2, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 t, t, one, $3;
            mov.b32 {$0, $1}, t; }""",
            "=h,=h,r,r", [words, less], dtype=(tl.int16, tl.int16), is_pure=True, pack=1,
        )  # fmt: skip
    elif PTX and dtype == tl.float16:
        less = tl.broadcast_to((zero * 0x10001 + LESS_FLOAT16)[:, None], words.shape)
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t;
            lop3.b32 t, $2, 0x000f000f, 0x64006400, 0xea;
            add.rn.f16x2 t, t, $3;
            mov.b32 {$0, $1}, t; }""",
            "=h,=h,r,r", [words, less], dtype=(tl.int16, tl.int16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = (words & 15) - zero[:, None], ((words >> 16) & 15) - zero[:, None]
    pairs = tl.reshape(tl.join(low, high), (words.shape[0], 32))
    if PTX and dtype != tl.float32:
        pairs = pairs.to(dtype, bitcast=True)
    else:
        pairs = cast(pairs.to(tl.float32), dtype)
    return pairs


@triton.jit
def _bytes(codes, zero, dtype: tl.constexpr, PTX: tl.constexpr):
    """Return codes of 8 bits [N, C], less zeros [N] or None, as numbers.

    Beside 0x43 the sign's bit of a byte is the last of a bfloat16's exponent: of 128 + the seven
    others 128 is taken off, or 256. A float16 is 1024 + 128 + code.
    """
    if PTX and dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d, less;
            mov.b32 less, 0xbf80bf80;
            prmt.b32 a, $2, 0x43434343, 0x4140;
            prmt.b32 b, $2, 0x43434343, 0x4342;
            and.b32 c, a, 0xff80ff80;
            and.b32 d, b, 0xff80ff80;
            and.b32 a, a, 0xff7fff7f;
            and.b32 b, b, 0xff7fff7f;
            fma.rn.bf16x2 $0, c, less, a;
            fma.rn.bf16x2 $1, d, less, b; }""",
            "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
        if zero is not None:
            less = tl.broadcast_to((-zero).to(tl.float32).to(dtype)[:, None], codes.shape)
            numbers = tl.inline_asm_elementwise(
                """{ .reg .b32 one;
                mov.b32 one, 0x3f803f80;
                fma.rn.bf16x2 $0, $1, one, $2; }""",
                "=r,r,r", [numbers, less], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    elif PTX and dtype == tl.float16:
        less = tl.full((codes.shape[0],), -1152, tl.int32)
        if zero is not None:
            less -= zero
        less = tl.broadcast_to(less.to(tl.float32).to(dtype)[:, None], codes.shape)
        numbers = tl.inline_asm_elementwise(
            """{ .reg .b32 t, a, b;
            xor.b32 t, $2, 0x80808080;
            prmt.b32 a, t, 0x64646464, 0x4140;
            prmt.b32 b, t, 0x64646464, 0x4342;
            add.rn.f16x2 $0, a, $3;
            add.rn.f16x2 $1, b, $4; }""",
            "=r,=r,r,r,r", [codes, less], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        numbers = codes.to(tl.int32)
        if zero is not None:
            numbers -= zero[:, None]
        numbers = cast(numbers.to(tl.float32), dtype)
    return numbers


@triton.jit
def _floats(codes, dtype: tl.constexpr, PTX: tl.constexpr):
    """Return floats of 8 bits (e4m3) [N, C], which are loaded as uint8, as numbers.

    A byte between its own signs is moved to where the type has exponent and mantissa, whose bias is
    another: a product with a power of two sets that right, of subnormal numbers too.
    """
    if PTX and dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, times, nothing;
            mov.b32 times, 0x7b807b80;
            mov.b32 nothing, 0x80008000;
            prmt.b32 a, $2, 0, 0x9180;
            prmt.b32 b, $2, 0, 0xb3a2;
            shl.b32 a, a, 4;
            shl.b32 b, b, 4;
            and.b32 a, a, 0x87f087f0;
            and.b32 b, b, 0x87f087f0;
            fma.rn.bf16x2 $0, a, times, nothing;
            fma.rn.bf16x2 $1, b, times, nothing; }""",
            "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    elif PTX and dtype == tl.float16:
        numbers = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, times;
            mov.b32 times, 0x5c005c00;
            prmt.b32 a, $2, 0, 0x9180;
            prmt.b32 b, $2, 0, 0xb3a2;
            shl.b32 a, a, 7;
            shl.b32 b, b, 7;
            and.b32 a, a, 0xbf80bf80;
            and.b32 b, b, 0xbf80bf80;
            mul.rn.f16x2 $0, a, times;
            mul.rn.f16x2 $1, b, times; }""",
            "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        numbers = cast(widened(codes, "e4m3", False), dtype)
    return numbers


@triton.jit
def _of_group(p, row_ok, group, stride, WHOLE: tl.constexpr):
    """Load what rows [N] have for a group; 0 where there is no such row."""
    p += group * stride
    if WHOLE:
        x = tl.load(p)
    else:
        x = tl.load(p, mask=row_ok, other=0)
    return x


# fmt: off
@triton.jit
def _zeros(
    p, n, row_ok, group, stride, FORM: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr,
):
    # fmt: on
    """Return the codes of rows ``n`` [N] that mean zero in a group; None for 0.

    ``WORDS`` says that those of four rows are one element: bytes are not copied ahead of their use.
    """
    zero = None
    if p is not None:
        zero = _of_group(p, row_ok, group, stride, WHOLE)
        if WORDS:
            zero = zero << (24 - n % 4 * 8)
            if FORM == "int4":
                zero = (zero >> 24) & 0xFF
            else:
                zero = zero >> 24
        zero = zero.to(tl.int32)
    elif FORM == "int4":
        zero = tl.full(row_ok.shape, 8, tl.int32)
    return zero


# fmt: off
@triton.jit
def _numbers(
    words, p_weight, row_ok, zero, k, K, AT: tl.constexpr, dtype: tl.constexpr,
    FORM: tl.constexpr, WHOLE: tl.constexpr, DEEP: tl.constexpr, PTX: tl.constexpr,
):
    # fmt: on
    """Return the weights [K, N] of columns ``k``; of 4 bits those at ``AT`` of a block's words."""
    if FORM == "int4":
        numbers = _nibbles(words, zero, AT // 8, dtype, PTX)
    elif FORM == "int8":
        numbers = _bytes(_load(p_weight, row_ok, k, K, WHOLE, DEEP), zero, dtype, PTX)
    else:
        numbers = _floats(_load(p_weight, row_ok, k, K, WHOLE, DEEP), dtype, PTX)
    return numbers.T


@triton.jit
def _words(p_weight, row_ok, k0, FORM: tl.constexpr, WHOLE: tl.constexpr):
    """Load a block's codes of 4 bits, which is whole whatever K is: [N, 16] of 32 bits."""
    words = 0
    if FORM == "int4":
        words = _load(p_weight, row_ok, k0 // 8 + tl.arange(0, 16), 0, WHOLE, True)
    return words


# fmt: off
@triton.jit(do_not_specialize=["M", *_STEPS])
def linear_codes_kernel(
    x, weight, bias, up, residual, scale, zero, up_scale, up_zero, out,
    second, second_bias, second_scale, second_zero, third, third_bias, third_scale, third_zero,
    M, N, second_N, third_N, K, groups,
    x_stride, weight_stride, up_stride, residual_stride, out_stride,
    scale_stride, zero_stride, up_scale_stride, up_scale_step, up_zero_stride, up_zero_step,
    scale_step, second_scale_step, third_scale_step, zero_step, second_zero_step, third_zero_step,
    FORM: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, ACTIVATION: tl.constexpr,
    WORDS: tl.constexpr, WHOLE: tl.constexpr, DEEP: tl.constexpr, TWO: tl.constexpr,
    PTX: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STEP_BLOCKS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Compute a block of outputs of BLOCK_M rows, or of ``TWO`` times as many.

    ``FORM`` is "int8", "int4" or "e4m3". ``GROUP`` codes, None for all, share a scale. ``WHOLE``
    and ``DEEP`` say that N and K are multiples of BLOCK_N and of a block of codes. Of codes of 4
    bits weights are words of 32 bits. A step has ``STEP_BLOCKS`` blocks. Outputs of a ``second``
    and a ``third`` weight stand beside those of the first; their rows, and what groups have of
    these, are as far apart. Groups of scales are ``STEP`` times their steps apart.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    SUMMED: tl.constexpr = BLOCK if GROUP is None or GROUP >= BLOCK else GROUP  # by themselves
    COUNT: tl.constexpr = 32 if FORM == "int4" or SUMMED == 32 or dtype == tl.float32 else 64
    block = tl.program_id(0)
    before = 0  # outputs of the weights before this program's
    for other in tl.static_range(2):
        of = (
            (
                second, second_bias, second_N, second_scale, second_scale_step, second_zero,
                second_zero_step,
            ),
            (
                third, third_bias, third_N, third_scale, third_scale_step, third_zero,
                third_zero_step,
            ),
        )[other]  # fmt: skip
        if of[0] is not None:
            blocks = tl.cdiv(N, BLOCK_N)
            if block >= blocks:
                block -= blocks
                before += N
                weight, bias, N, scale, scale_step, zero, zero_step = of
    out += before
    if residual is not None:
        residual += before
    scale_step *= STEP  # what was chosen has no divisor for older Tritons
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok, row = n < N, n.to(tl.int64)
    p_x = x + m.to(tl.int64) * x_stride
    p_other = x + (m + BLOCK_M).to(tl.int64) * x_stride
    p_weight, p_scale = weight + row * weight_stride, scale + row * scale_stride
    p_up, p_up_scale, p_zero, p_up_zero = p_weight, p_scale, None, None
    if zero is not None:
        p_zero = zero + (row // 4 if WORDS else row * zero_stride)
    if up is not None:
        p_up, p_up_scale = up + row * up_stride, up_scale + row * up_scale_stride
        if up_zero is not None:
            p_up_zero = up_zero + (row // 4 if WORDS else row * up_zero_stride)
    if PDL:  # codes depend on no launch: meanwhile they come nearer
        width = K
        if FORM == "int4":
            width = tl.cdiv(K, 8)
        _prefetch(p_weight, n, N, weight_stride, width, WHOLE)
        if up is not None:
            _prefetch(p_up, n, N, up_stride, width, WHOLE)
    wait_for_previous(PDL)
    nothing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total, gate, more, more_gate = nothing, nothing, nothing, nothing  # ``more``: the second tile
    for step in tl.range(0, K, STEP_BLOCKS * BLOCK, num_stages=STAGES):
        for ahead in tl.static_range(0, STEP_BLOCKS * BLOCK, BLOCK):
            k0 = step + ahead
            words = _words(p_weight, n_ok, k0, FORM, WHOLE)
            if up is not None:
                up_words = _words(p_up, n_ok, k0, FORM, WHOLE)
            for first in tl.static_range(0, BLOCK, SUMMED):
                group = 0
                if GROUP is not None:
                    group = (k0 + first) // GROUP
                    if not DEEP:  # behind the last code x is 0
                        group = tl.minimum(group, groups - 1)
                z = _zeros(p_zero, n, n_ok, group, zero_step, FORM, WHOLE, WORDS)
                if up is not None:
                    up_z = _zeros(p_up_zero, n, n_ok, group, up_zero_step, FORM, WHOLE, WORDS)
                part, part_gate, part_more, part_more_gate = nothing, nothing, nothing, nothing
                for at in tl.static_range(first, first + SUMMED, COUNT):
                    k = k0 + at + tl.arange(0, COUNT)
                    rows = _load(p_x, m < M, k, K, False, DEEP)
                    w = _numbers(
                        words, p_weight, n_ok, z, k, K, at, dtype, FORM, WHOLE, DEEP, PTX
                    )
                    part = _plus(part, rows, w, PRECISION)
                    if TWO:
                        others = _load(p_other, m + BLOCK_M < M, k, K, False, DEEP)
                        part_more = _plus(part_more, others, w, PRECISION)
                    if up is not None:
                        u = _numbers(
                            up_words, p_up, n_ok, up_z, k, K, at, dtype, FORM, WHOLE, DEEP, PTX
                        )
                        part_gate = _plus(part_gate, rows, u, PRECISION)
                        if TWO:
                            part_more_gate = _plus(part_more_gate, others, u, PRECISION)
                s = _of_group(p_scale, n_ok, group, scale_step, WHOLE).to(tl.float32)[None, :]
                total += part * s
                if TWO:
                    more += part_more * s
                if up is not None:
                    t = _of_group(p_up_scale, n_ok, group, up_scale_step, WHOLE)
                    t = t.to(tl.float32)[None, :]
                    gate += part_gate * t
                    if TWO:
                        more_gate += part_more_gate * t
    let_next_start(PDL)
    _store(
        total, gate, m, n, M, n_ok, bias, residual, out, residual_stride, out_stride,
        ACTIVATION, up is not None, WHOLE,
    )  # fmt: skip
    if TWO:
        _store(
            more, more_gate, m + BLOCK_M, n, M, n_ok, bias, residual, out, residual_stride,
            out_stride, ACTIVATION, up is not None, WHOLE,
        )  # fmt: skip


def _strides(x):
    """Return how far rows lie apart, and groups, of which a row may have one."""
    if x is None:
        return 0, 0
    return x.stride(0), x.stride(1) if x.shape[1] > 1 else 0


def _has_words(zero):
    """Return whether the zero points of four rows can be read at once."""
    at_multiples = (zero.data_ptr() | zero.stride(1) | len(zero)) % 4 == 0
    return zero.stride(0) == 1 and at_multiples


def linear_codes(x, parts, up, activation, residual, out):
    """Write what `linear_few_rows` says, for codes with scales [N, groups] of any strides.

    Those of neighbouring rows should lie side by side: such are copied ahead of their use. `parts`
    are as `linear_parts` takes them, `up` is a weight, its scale and its zero, or thrice None.
    """
    weights, biases, scales, zeros = zip(*parts, strict=True)
    up, up_scale, up_zero = up
    (M, K), sizes, groups = x.shape, [len(weight) for weight in weights], scales[0].shape[1]
    form, read_as = FORMS[weights[0].dtype]
    group = BLOCK.value if form == "e4m3" else K // groups  # the last floats may be fewer
    *weights, up = (None if t is None else t.view(read_as) for t in (*weights, up))
    words = all(t is None or _has_words(t) for t in (*zeros, up_zero))
    if words:
        *zeros, up_zero = (
            None if t is None else t.t().view(torch.int32).t() for t in (*zeros, up_zero)
        )
    alike = [*zip(weights, biases, scales, zeros, strict=True), (None,) * 4, (None,) * 4]
    (weight, bias, scale, zero), second, third = alike[:3]
    scale_steps, zero_steps = ([_strides(part[i])[1] for part in alike[:3]] for i in (2, 3))
    step = math.gcd(16, *scale_steps)
    blocks, tiles = _sizes.code_blocks(x.device, x.dtype, M, sum(sizes), K, form, up is not None)
    outputs = sum(triton.cdiv(N, blocks.block_n) for N in sizes)
    launch(
        linear_codes_kernel, (outputs, triton.cdiv(M, tiles * blocks.block_m)),
        x, weight, bias, up, residual, scale, zero, up_scale, up_zero, out, *second, *third,
        M, *([*sizes, 0, 0][:3]), K, groups,
        *map(_row_stride, (x, weight, up, residual, out)),
        _strides(scale)[0], _strides(zero)[0], *_strides(up_scale), *_strides(up_zero),
        *(size // step for size in scale_steps), *zero_steps,
        FORM=form, GROUP=None if groups == 1 else group, STEP=step, ACTIVATION=activation,
        WORDS=words, WHOLE=all(N % blocks.block_n == 0 for N in sizes),
        DEEP=K % BLOCK.value == 0, TWO=tiles == 2, PTX=_configs.runs_ptx(x.device),
        PRECISION=blocks.precision, BLOCK_M=blocks.block_m, BLOCK_N=blocks.block_n,
        STEP_BLOCKS=blocks.block_k // BLOCK.value, STAGES=blocks.num_stages,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
        **blocks.options, **early(x.device),
    )  # fmt: skip
