"""LongSpec's composition: torch's flash attention to the prefix, a masked product, a merge.

Section 3.3 of arXiv 2502.17421, written here from what torch offers: the prefix needs no mask, so
its flash kernel serves, and hands out the log-sum-exp that the merge takes.
"""

from __future__ import annotations

import math

import torch

from .task import Attention, Peer, pack, unpack

_FLASH = {
    "cpu": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    "cuda": torch.ops.aten._scaled_dot_product_flash_attention,
}


def why_not(device: torch.device) -> None:
    """Return None: torch is always here."""


def attention(task: Attention) -> dict[str, Peer]:
    """Return the composition; on a GPU flash attention takes 16-bit types only."""
    q, rows = task.q, task.q.shape[1]
    kv_heads, length = task.keys_and_values()[0].shape[2], task.keys_and_values()[0].shape[1] - rows
    if length < 1 or (q.is_cuda and q.dtype == torch.float32):
        return {}
    scale = q.shape[-1] ** -0.5
    hidden = ~task.tree_mask().repeat(q.shape[2] // kv_heads, 1)

    def composed() -> dict[str, torch.Tensor]:
        k, v = (x.transpose(1, 2) for x in task.keys_and_values())
        packed = pack(q, kv_heads)
        far, far_lse = _FLASH[q.device.type](packed, k[:, :, :length], v[:, :, :length])[:2]
        logits = (packed @ k[:, :, length:].transpose(-1, -2)).float() * scale
        logits.masked_fill_(hidden, -math.inf)
        near_lse = logits.logsumexp(-1)
        near = (logits - near_lse[..., None]).exp().to(q.dtype) @ v[:, :, length:]
        lse = torch.logaddexp(far_lse, near_lse)
        out = far * (far_lse - lse).exp()[..., None] + near * (near_lse - lse).exp()[..., None]
        return {"out": unpack(out.to(q.dtype), rows), "lse": unpack(lse, rows)}

    return {"flash + masked matmul + merge": composed}
