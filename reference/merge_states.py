"""Merging attention states over disjoint sets of keys."""

import torch

from ._attention import accumulation_dtype


def merge_states(outs, lses):
    """Merge n states, outs [n, .., D] and lses [n, ..], into one.

    With `m = max lse`, `w_i = exp(lse_i - m)` and `l = sum(w_i)`: `out = sum(w_i out_i) / l` and
    `lse = m + log(l)`. Of n empty states one empty state is left. An lse of +inf,
    which older kernels write for "no keys", is read as -inf.
    """
    result_dtype, dtype = outs.dtype, accumulation_dtype(outs.dtype)
    lses = lses.to(dtype)
    lses = lses.masked_fill(lses.isposinf(), -torch.inf)
    m = lses.amax(0)
    m = m.masked_fill(m.isneginf(), 0)
    weights = (lses - m).exp()
    l = weights.sum(0)
    # What an empty state holds is never read: it may be NaN.
    outs = outs.to(dtype).masked_fill(lses.isneginf()[..., None], 0)
    merged = (weights[..., None] * outs).sum(0) / l.masked_fill(l == 0, 1)[..., None]
    return merged.to(result_dtype), m + l.log()
