"""flash-attn 2, 3 and 4: no custom masks, so chains only; the cache is read in place.

Written from their documentation; nobody has run it here.
"""

from __future__ import annotations

import torch

from .task import Attention, Peer, needs

_MODULES = {
    "flash-attn 2": "flash_attn",
    "flash-attn 3": "flash_attn_interface",
    "flash-attn 4": "flash_attn.cute",
}


def why_not(device: torch.device) -> str | None:
    """Return why none of the three is a peer on this device, or None."""
    reasons = {name: needs(module, device) for name, module in _MODULES.items()}
    return None if None in reasons.values() else reasons["flash-attn 2"]


def attention(task: Attention) -> dict[str, Peer]:
    """Return those that are installed and take this cache: 2 and 4 contiguous, 3 any page size."""
    p, device = task.prefix, task.q.device
    if p is None or not task.chain or task.q.dtype == torch.float32:
        return {}
    lengths = p.lengths + task.q.shape[1]
    found: dict[str, Peer] = {}
    if p.block_table is None and not needs("flash_attn", device):
        from flash_attn import flash_attn_with_kvcache as two

        found["flash-attn 2"] = lambda: {
            "out": two(task.q, p.k_cache, p.v_cache, cache_seqlens=lengths, causal=True)
        }
    if not needs("flash_attn_interface", device):
        from flash_attn_interface import flash_attn_with_kvcache as three

        found["flash-attn 3"] = lambda: {
            "out": three(
                task.q,
                p.k_cache,
                p.v_cache,
                cache_seqlens=lengths,
                page_table=p.block_table,
                causal=True,
            )
        }
    if p.block_table is None and not needs("flash_attn.cute", device):
        from flash_attn.cute import flash_attn_func as four

        found["flash-attn 4"] = lambda: {
            "out": four(task.q, *task.keys_and_values(), causal=True)[0]
        }
    return found
