"""The 16-bit and tensor-core float formats as float32 and back, and the rounding that PTX names."""

import numpy as np

LEAST_NORMAL = np.float32(2.0**-126)


def from_bf16(bits):
    """Return bfloat16 bits [..] as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x):
    """Return float32 rounded to the nearest even bfloat16, as bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), nearest)


def from_f16(bits):
    """Return float16 bits as float32."""
    return bits.view(np.float16).astype(np.float32)


def to_f16(x):
    """Return float32 rounded to the nearest even float16, as bits."""
    return x.astype(np.float16).view(np.uint16)


def to_tf32(bits):
    """Return float32 bits as tensor cores read them: without the last 13 bits."""
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def flush(x):
    """Return float32 with subnormal numbers replaced by zeros of their sign (``.ftz``)."""
    return np.where(np.abs(x) < LEAST_NORMAL, np.copysign(np.float32(0), x), x)


def from_f32(bits):
    """Return float32 bits as float32."""
    return bits.view(np.float32)


SHORT = {"bf16": (from_bf16, to_bf16), "f16": (from_f16, to_f16)}


def _f16_of_bytes(exponent_bits, mantissa_bits, bias, *, infinite):
    """Return the 256 numbers of a float of 8 bits as bits of float16, which has all of them."""
    codes = np.arange(256)
    exponents = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissas = codes & ((1 << mantissa_bits) - 1)
    subnormal = exponents == 0
    size = (mantissas / (1 << mantissa_bits) + ~subnormal) * 2.0 ** (
        np.maximum(exponents, 1) - bias
    )
    last = exponents == (1 << exponent_bits) - 1
    if infinite:
        size = np.where(last, np.where(mantissas == 0, np.inf, np.nan), size)
    else:
        size = np.where(codes & 0x7F == 0x7F, np.nan, size)
    bits = np.where(codes & 0x80, -size, size).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(size), np.uint16(0x7FFF), bits)


TO_F16 = {
    "e4m3": _f16_of_bytes(4, 3, 7, infinite=False),
    "e5m2": _f16_of_bytes(5, 2, 15, infinite=True),
}


def unpack(x, kind):
    """Return elements of a 16-bit float type as float32: [n], or [n, 2] of a packed type."""
    kind, packed, _ = kind.partition("x2")
    bits = x.view(np.uint16)
    return SHORT[kind][0](bits.reshape(-1, 2) if packed else bits)


def pack(x, kind):
    """Round float32 to a 16-bit float type; the inverse of `unpack`."""
    kind, packed, _ = kind.partition("x2")
    bits = SHORT[kind][1](x)
    return np.ascontiguousarray(bits).view(np.uint32).ravel() if packed else bits
