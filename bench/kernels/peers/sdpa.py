"""torch's scaled_dot_product_attention in the three forms that a grouped cache leaves."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from .task import Attention, Peer, pack, unpack


def why_not(device: torch.device) -> None:
    """Return None: torch is always here."""


def attention(task: Attention) -> dict[str, Peer]:
    """Return grouped heads with a bool mask, repeated KV heads, and packed rows."""
    q, rows = task.q, task.q.shape[1]
    kv_heads = task.keys_and_values()[0].shape[2]
    group = q.shape[2] // kv_heads
    mask = task.full_mask()
    packed_mask = None if mask is None else mask.repeat(group, 1)

    def grouped() -> dict[str, torch.Tensor]:
        k, v = (x.transpose(1, 2) for x in task.keys_and_values())
        out = scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=group > 1
        )
        return {"out": out.transpose(1, 2)}

    def repeated() -> dict[str, torch.Tensor]:
        k, v = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in task.keys_and_values())
        out = scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        return {"out": out.transpose(1, 2)}

    def packed() -> dict[str, torch.Tensor]:
        k, v = (x.transpose(1, 2) for x in task.keys_and_values())
        out = scaled_dot_product_attention(pack(q, kv_heads), k, v, attn_mask=packed_mask)
        return {"out": unpack(out, rows)}

    forms = {"sdpa gqa": grouped}
    if group > 1:  # with one query head per KV head all three are the same
        forms |= {"sdpa repeated kv": repeated, "sdpa packed rows": packed}
    return forms
