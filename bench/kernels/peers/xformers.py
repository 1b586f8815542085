"""Tree attention of xFormers, or of MSLK where it moved: prefix and tree apart, then a merge.

Written from its documentation; nobody has run it here.
"""

from __future__ import annotations

import importlib

import torch

from .task import Attention, Peer, needs

_MODULES = ("mslk.attention.tree_attention", "xformers.ops.tree_attention")


def why_not(device: torch.device) -> str | None:
    """Return why it is no peer on this device, or None."""
    reasons = [needs(module, device) for module in _MODULES]
    return None if None in reasons else reasons[-1]


def attention(task: Attention) -> dict[str, Peer]:
    """Return the tree call on a contiguous cache."""
    q, p = task.q, task.prefix
    if p is None or p.block_table is not None or q.dtype == torch.float32:
        return {}
    name = next(module for module in _MODULES if not needs(module, q.device))
    module = importlib.import_module(name)
    biases = importlib.import_module("xformers.ops.fmha.attn_bias")
    (batch, rows, q_heads, head_dim), kv_heads = q.shape, p.sizes.Hk
    group = q_heads // kv_heads

    def grouped(x: torch.Tensor) -> torch.Tensor:  # [B, M, Hk, D] -> [B, M, Hk, g, D]
        return x[:, :, :, None].expand(-1, -1, -1, group, -1)

    prefix_bias = biases.BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[rows] * batch,
        kv_padding=p.k_cache.shape[1],
        kv_seqlen=[p.sizes.L] * batch,
    )
    tree_bias = torch.zeros(rows, rows, dtype=q.dtype, device=q.device)
    tree_bias.masked_fill_(~task.tree_mask(), float("-inf"))

    def tree() -> dict[str, torch.Tensor]:
        out = module.tree_attention(
            q.view(batch, rows, kv_heads, group, head_dim),
            grouped(p.k_tree),
            grouped(p.v_tree),
            grouped(p.k_cache),
            grouped(p.v_cache),
            tree_bias,
            prefix_bias,
        )
        return {"out": out.reshape(q.shape)}

    return {"xformers tree": tree}
