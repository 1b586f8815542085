"""torch.nn.attention.varlen: flash attention over packed requests; chains only.

Written from its documentation; nobody has run it here.
"""

from __future__ import annotations

import torch

from .task import Attention, Peer, needs


def why_not(device: torch.device) -> str | None:
    """Return why it is no peer on this device, or None."""
    return needs("torch.nn.attention.varlen", device)


def attention(task: Attention) -> dict[str, Peer]:
    """Return the causal call where the tree is a chain."""
    from torch.nn.attention.varlen import varlen_attn

    q, rows = task.q, task.q.shape[1]
    if not task.chain or q.dtype == torch.float32:
        return {}
    batch, length = task.keys_and_values()[0].shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)

    def packed() -> dict[str, torch.Tensor]:
        k, v = (x.flatten(0, 1) for x in task.keys_and_values())
        out = varlen_attn(
            q.flatten(0, 1),
            k,
            v,
            starts * rows,
            starts * length,
            rows,
            length,
            window_size=(-1, 0),
            enable_gqa=q.shape[2] != k.shape[1],
        )
        return {"out": out.view_as(q)}

    return {"torch varlen": packed}
