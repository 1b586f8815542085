"""FlashInfer: paged decoding, prefill with a custom mask, merge_state. Planning is not timed.

Written from its documentation; nobody has run it here.
"""

from __future__ import annotations

import math

import torch

from .task import Attention, Peer, needs

_WORKSPACE = 128 << 20  # bytes, as its documentation takes


def why_not(device: torch.device) -> str | None:
    """Return why it is no peer on this device, or None."""
    return needs("flashinfer", device)


def attention(task: Attention) -> dict[str, Peer]:
    """Return decoding for one row, else prefill with the tree as a mask over all keys."""
    import flashinfer

    q, p = task.q, task.prefix
    if p is None or q.dtype == torch.float32:
        return {}
    (batch, rows, q_heads, head_dim), kv_heads = q.shape, p.sizes.Hk
    length = p.sizes.L + rows
    page_size = p.k_cache.shape[1] if p.block_table is not None else 16
    pages = math.ceil(length / page_size)
    k, v = (x.view(-1, page_size, kv_heads, head_dim) for x in (p.k_cache, p.v_cache))
    table = p.block_table
    if table is None:  # a contiguous cache is one whose pages lie in order
        table = torch.arange(len(k), dtype=torch.int32, device=q.device).view(batch, -1)
    steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    last = torch.full_like(steps[1:], length - (pages - 1) * page_size)
    where = (steps * pages, table[:, :pages].flatten(), last)
    heads = (q_heads, kv_heads, head_dim, page_size)
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
    if rows == 1:
        name = "flashinfer decode"
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(*where, *heads, q_data_type=q.dtype)
    else:
        name = "flashinfer prefill"
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        mask = task.full_mask().expand(batch, -1, -1).flatten()
        wrapper.plan(steps * rows, *where, *heads, custom_mask=mask, q_data_type=q.dtype)
    return {name: lambda: {"out": wrapper.run(q.flatten(0, 1), (k, v)).view_as(q)}}


def merge(outs: torch.Tensor, lses: torch.Tensor) -> dict[str, Peer]:
    """Return merge_state for two states; its log-sum-exp has base 2."""
    if len(outs) != 2 or why_not(outs.device):
        return {}
    import flashinfer

    flat = [x.flatten(0, 1) for x in outs]
    bits = [(x * math.log2(math.e)).flatten(0, 1) for x in lses]

    def merged() -> dict[str, torch.Tensor]:
        out, lse = flashinfer.merge_state(flat[0], bits[0], flat[1], bits[1])
        return {"out": out.view_as(outs[0]), "lse": lse.view_as(lses[0]) * math.log(2)}

    return {"flashinfer merge_state": merged}
