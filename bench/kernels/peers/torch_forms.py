"""What torch offers for attention to a grouped cache with a tree behind it."""

from __future__ import annotations

import functools
import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from .task import Attention, Peer, pack, unpack

_FLASH = {
    "cpu": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    "cuda": torch.ops.aten._scaled_dot_product_flash_attention,
}


def sdpa(task: Attention) -> dict[str, Peer]:
    """Return grouped heads with a bool mask, repeated KV heads, and packed rows."""
    q, rows = task.q, task.q.shape[1]
    kv_heads = task.keys_and_values()[0].shape[2]
    group = q.shape[2] // kv_heads
    mask = task.full_mask()
    packed_mask = None if mask is None else mask.repeat(group, 1)

    def grouped() -> dict[str, torch.Tensor]:
        k, v = task.heads_first()
        out = scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=group > 1
        )
        return {"out": out.transpose(1, 2)}

    def repeated() -> dict[str, torch.Tensor]:
        k, v = (x.repeat_interleave(group, dim=1) for x in task.heads_first())
        out = scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        return {"out": out.transpose(1, 2)}

    def packed() -> dict[str, torch.Tensor]:
        k, v = task.heads_first()
        out = scaled_dot_product_attention(pack(q, kv_heads), k, v, attn_mask=packed_mask)
        return {"out": unpack(out, rows)}

    forms = {"sdpa gqa": grouped}
    if group > 1:  # with one query head per KV head all three are the same
        forms |= {"sdpa repeated kv": repeated, "sdpa packed rows": packed}
    return forms


def composition(task: Attention) -> dict[str, Peer]:
    """Return LongSpec's composition: flash attention to the prefix, a masked product, a merge.

    Section 3.3 of arXiv 2502.17421: the prefix needs no mask, so torch's flash kernel serves, and
    hands out the log-sum-exp that the merge takes. On a GPU it takes 16-bit types only.
    """
    q, rows = task.q, task.q.shape[1]
    kv_heads, length = task.keys_and_values()[0].shape[2], task.keys_and_values()[0].shape[1] - rows
    if length < 1 or (q.is_cuda and q.dtype == torch.float32):
        return {}
    scale = q.shape[-1] ** -0.5
    hidden = ~task.tree_mask().repeat(q.shape[2] // kv_heads, 1)

    def composed() -> dict[str, torch.Tensor]:
        k, v = task.heads_first()
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


@functools.cache
def _flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(task: Attention) -> dict[str, Peer]:
    """Return one compiled call; each new shape takes half a minute of compilation on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask

    q, rows = task.q, task.q.shape[1]
    k = task.keys_and_values()[0]
    length, grouped = k.shape[1] - rows, q.shape[2] != k.shape[2]
    tree = task.tree_mask()

    def visible(b, h, row, key):
        return (key < length) | tree[row, (key - length).clamp(min=0)]

    mask = create_block_mask(visible, None, None, rows, length + rows, device=q.device)

    def compiled() -> dict[str, torch.Tensor]:
        k, v = task.heads_first()
        out = _flex_attention()(q.transpose(1, 2), k, v, block_mask=mask, enable_gqa=grouped)
        return {"out": out.transpose(1, 2)}

    return {"flex attention": compiled}
