"""Caches of 8 bits: their elements as numbers, and numbers as their elements.

``FORM`` says what a cache holds: "int8", "e4m3", "e5m2", or "" for elements of 16 and 32 bits; the
bytes of the two float types are loaded as uint8. Every one of them is a number of bfloat16 and of
float16, so attention converts what it has loaded, exactly, and multiplies with scales elsewhere.
"""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102

import torch
import triton
import triton.language as tl

from ._bfloat16 import cast

FORMS = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
LEAST_SCALE = tl.constexpr(1e-6)  # that is chosen for a row


@triton.constexpr_function
def largest(form):
    """Return the largest number of a form."""
    return {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}[form]


def bytes_of(cache):
    """Return a cache as kernels load it."""
    floats = (torch.float8_e4m3fn, torch.float8_e5m2)
    return cache.view(torch.uint8) if cache.dtype in floats else cache


def scale_strides(scale):
    """Return the strides over outer, inner and heads; one scale per head has only the last."""
    if scale is None:
        return None, None, None
    return scale.stride() if scale.dim() == 3 else (None, None, scale.stride(0))


@triton.jit
def numbers(x, FORM: tl.constexpr, NATIVE: tl.constexpr):
    """Return elements as float32; ``NATIVE`` where a GPU has an instruction for e4m3.

    e5m2 is the upper half of a float16. e4m3 has its exponent and mantissa at other places of a
    float32, and another bias, which a product sets right for subnormal numbers too.
    """
    if FORM == "e5m2":
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FORM == "e4m3":
        if NATIVE:
            x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            bits = x.to(tl.uint32)
            magnitude = bits & 0x7F
            biased = ((bits & 0x80) << 24) | (magnitude << 20)
            value = biased.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
            x = tl.where(magnitude == 0x7F, float("nan"), value)
    return x.to(tl.float32)


@triton.jit
def _is_nan(x):
    """Return whether float32 is NaN, by its bits: of converted numbers, too."""
    return (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def rounded(x, FORM: tl.constexpr):
    """Return float32 as elements: to the nearest, even on ties, too large ones as the largest."""
    MOST: tl.constexpr = largest(FORM)
    unknown = _is_nan(x)
    x = tl.where(unknown, 0.0, tl.minimum(tl.maximum(x, -MOST), MOST))
    if FORM == "int8":
        code = ((x + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2**23: its step is 1
    else:
        # What is cut off a float32's mantissa, and how much greater its exponent's bias is.
        CUT: tl.constexpr = 20 if FORM == "e4m3" else 21
        BIAS: tl.constexpr = 120 if FORM == "e4m3" else 112
        STEP: tl.constexpr = 16384.0 if FORM == "e4m3" else 128.0  # its step is the subnormal one
        LEAST: tl.constexpr = 0.015625 if FORM == "e4m3" else 6.103515625e-05  # that is normal
        bits = x.to(tl.uint32, bitcast=True)
        sign = (bits >> 31) << 7
        bits = bits & 0x7FFFFFFF
        size = bits.to(tl.float32, bitcast=True)
        subnormal = (size + STEP).to(tl.uint32, bitcast=True) & 0xFF
        normal = (bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT
        code = tl.where(size < LEAST, subnormal, normal - (BIAS << (23 - CUT)))
        code = (tl.where(unknown, 0x7F, code) | sign).to(tl.uint8)
    return code


@triton.jit
def over(x, scale):
    """Return float32 divided by scales, rounded as IEEE says."""
    return tl.math.div_rn(x, tl.broadcast_to(scale, x.shape))


@triton.jit
def greatest_of(x):
    """Return the greatest magnitude of each row [R, ..], NaN where there is one in it."""
    unknown = tl.max(_is_nan(x).to(tl.int32), 1) != 0
    return tl.where(unknown, float("nan"), tl.max(tl.abs(x), 1))


@triton.jit
def greater(a, b):
    """Return the greater of magnitudes, NaN if one of them is."""
    return tl.where(_is_nan(a) | (b <= a), a, b)


@triton.jit
def scale_of_greatest(greatest, FORM: tl.constexpr):
    """Return the scales [R] at which the `greatest_of` each row is stored as the largest number."""
    MOST: tl.constexpr = largest(FORM)
    scale = tl.maximum(over(greatest, tl.full(greatest.shape, MOST, tl.float32)), LEAST_SCALE)
    return tl.where(_is_nan(greatest), float("nan"), scale)


@triton.jit
def dynamic_scale(x, FORM: tl.constexpr):
    """Return the scales [R] at which the greatest of each row is stored as the largest number."""
    return scale_of_greatest(greatest_of(x), FORM)


@triton.jit
def scale_at(p_scale, head, stride_h, stride_n):
    """Return a head's only scale, or where those of its tokens lie."""
    scale = p_scale + head * stride_h
    if stride_n is None:
        scale = tl.load(scale)
    return scale


@triton.jit
def scale_of(scale, outer, inner, valid, stride_b, stride_n):
    """Return the scales [N] of tokens, as `scale_at` says, or a number for all of them."""
    if stride_n is not None:
        scale = tl.load(scale + outer * stride_b + inner * stride_n, mask=valid, other=0.0)
    return scale


@triton.jit
def times(x, scale, AXIS: tl.constexpr):
    """Return x times a number, or times scales along an axis of a tile; as it is for None."""
    if scale is not None:
        if scale.type.is_block():
            scale = tl.expand_dims(scale, 1 - AXIS)
        x = x * scale
    return x


@triton.jit
def keys_in(dtype: tl.constexpr, k, FORM: tl.constexpr, NATIVE: tl.constexpr):
    """Return loaded keys in the dtype of queries; their scales belong to the logits."""
    if FORM != "":
        k = cast(numbers(k, FORM, NATIVE), dtype)
    return k


@triton.jit
def values_in(dtype: tl.constexpr, v, scale, FORM: tl.constexpr, NATIVE: tl.constexpr):
    """Return loaded values in the dtype of queries, times their scales if `weights_in` has none."""
    if FORM != "":
        v = numbers(v, FORM, NATIVE)
        if dtype == tl.float16:
            v = times(v, scale, 0)
        v = cast(v, dtype)
    return v


@triton.jit
def weights_in(dtype: tl.constexpr, p, scale):
    """Return the weights of values [M, N] in the dtype of queries, times the values' scales.

    The product is one of few elements here, but a float16 would lose what small scales make small.
    """
    if dtype != tl.float16:
        p = times(p, scale, 1)
    return cast(p, dtype)
