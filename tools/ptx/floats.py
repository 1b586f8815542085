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
