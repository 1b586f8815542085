"""Two operations that Triton's interpreter gets wrong for bfloat16, set right; plain on a GPU.

The interpreter keeps bfloat16 as integers: its dot multiplies the bits, and its casts truncate,
and take what lies below the least normal number for that number.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, acc=None):
    """Return ``a @ b (+ acc)``, accumulated in float32 and never in TF32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Return the float32 tensor ``x`` rounded to the nearest value of ``dtype``."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40  # NaN, without the bits that might carry all of it
        x = tl.where(x == x, nearest, quiet).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
