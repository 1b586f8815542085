"""Counts of few blocks, scaled, beside counts of all of them."""

import torch

import specattn

from ..launch import emulated
from ..machine import Options


def both():
    """Return the counts of each launch of a hybrid call, of all blocks and of a sample."""
    q, k_tree, v_tree = (torch.randn(1, 1, heads, 64).bfloat16() for heads in (8, 4, 4))
    k, v = torch.randn(2, 1, 384, 4, 64).bfloat16()
    lengths = torch.tensor([384], dtype=torch.int32)
    counts = []
    for sample in (False, True):
        with emulated("sm_80", Options(sample=sample), split_size=64) as launches:
            specattn.hybrid_tree_attention(q, k, v, lengths, k_tree, v_tree)
        counts.append([(x.name, x.counts) for x in launches])
    return counts
