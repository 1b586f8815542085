"""Merging two attention states over disjoint keys: the combine kernel on a pair."""

from ._combine import combine


def merge_state(out_a, lse_a, out_b, lse_b, out, lse):
    """Merge two states, outputs [B, T, Hq, D] and natural log-sum-exps [B, T, Hq]."""
    combine(out_a[None], lse_a[None], out, lse, pair=(out_b, lse_b))
