"""Merging two attention states over disjoint sets of keys."""

import torch

from .merge_states import merge_states


def merge_state(out_a, lse_a, out_b, lse_b):
    """Merge two states, outs [.., D] and lses [..], as `merge_states` does."""
    return merge_states(torch.stack([out_a, out_b]), torch.stack([lse_a, lse_b]))


def with_sinks(out, lse, sinks):
    """Add each head's sink [Hq] to a state: a logit in the denominator with no value behind it."""
    if sinks is None:
        return out, lse
    return merge_state(out, lse, torch.zeros_like(out), sinks.to(lse.dtype).expand_as(lse))
