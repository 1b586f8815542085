"""Caches of 8 bits: a stored number times its scale is the number that is meant.

A scale is float32: one per head [Hk], or one per token and head, in the layout of the cache without
its last dimension. None is 1. Arithmetic decides about odd ones: what a scale of 0 multiplies is 0,
and whoever sees a key or value whose scale is NaN says NaN.
"""

import torch

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
EIGHT_BITS = tuple(MOST)
LEAST_SCALE = 1e-6  # that is chosen for a token


def dequantised(tokens, scale, dtype):
    """Return stored tokens [.., D] times their scales [..], in `dtype`; others as they are."""
    if tokens.dtype not in EIGHT_BITS:
        return tokens
    tokens = tokens.to(dtype)
    return tokens if scale is None else tokens * scale.to(dtype)[..., None]


def quantised(x, scale, dtype):
    """Return x [.., D] over its scales [..], rounded to the nearest that 8 bits say, even on ties.

    It is computed in float32. What is too large becomes the largest, which int8 has as far below
    zero as above; NaN stays NaN, and becomes 0 in int8, which has none.
    """
    x = x.float() / (1.0 if scale is None else scale[..., None])
    x = x.clamp(-MOST[dtype], MOST[dtype])
    return x.round().nan_to_num(0).to(dtype) if dtype == torch.int8 else x.to(dtype)


def dynamic_scale(x, dtype):
    """Return the scales [..] at which the greatest of each x [.., D] is stored as the largest."""
    return (x.float().abs().amax(-1) / MOST[dtype]).clamp(min=LEAST_SCALE)
