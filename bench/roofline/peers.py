"""What users call today, on the same tensors: torch's own attention in each of its forms.

A peer answers with a part of the primitive's outputs, so that it is checked like the primitive.
Masks are made beforehand; whatever a caller would have to do in every call (repeat the heads,
copy pages or chosen tokens together) is part of the peer's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from .inputs import Prefix

Peer = Callable[[], dict[str, torch.Tensor]]
KeysAndValues = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def attention(
    q: torch.Tensor, keys: KeysAndValues, tree_mask: torch.Tensor | None, first: str = ""
) -> dict[str, Peer]:
    """Return SDPA three ways; the last T keys are the tree's, ``tree_mask`` None a causal chain.

    ``first`` names what ``keys`` has to do in every call before SDPA can start.
    """
    batch, rows, q_heads, head_dim = q.shape
    length, kv_heads = keys()[0].shape[1:3]
    group = q_heads // kv_heads
    mask = _full_mask(rows, length, tree_mask, q.device)
    packed_mask = None if mask is None else mask.repeat(group, 1)

    def grouped() -> dict[str, torch.Tensor]:
        k, v = (x.transpose(1, 2) for x in keys())
        out = scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=group > 1
        )
        return {"out": out.transpose(1, 2)}

    def repeated() -> dict[str, torch.Tensor]:
        k, v = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in keys())
        out = scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        return {"out": out.transpose(1, 2)}

    def packed() -> dict[str, torch.Tensor]:
        k, v = (x.transpose(1, 2) for x in keys())
        out = scaled_dot_product_attention(_pack(q, kv_heads), k, v, attn_mask=packed_mask)
        out = out.view(batch, kv_heads, group, rows, head_dim).permute(0, 3, 1, 2, 4)
        return {"out": out.reshape(q.shape)}

    forms = {"sdpa gqa": grouped, "sdpa repeated kv": repeated, "sdpa packed rows": packed}
    return {first + name: form for name, form in forms.items()}


def verify(
    q: torch.Tensor,
    keys: KeysAndValues,
    collect: str,
    collect_rows: tuple[int, ...],
    length: int,
    capacity: int,
) -> dict[str, Peer]:
    """SDPA, then a product of the collected rows with every cached key."""
    chosen = q[:, list(collect_rows)]

    def collected() -> torch.Tensor:
        k = keys()[0]
        logits = _logits(chosen, k[:, :length])  # [B, Hk, g * R, L]
        batch, kv_heads, _, _ = logits.shape
        if collect == "scores":
            return pad(logits.float().mean(2), (0, capacity - length), value=-math.inf)
        logits = logits.view(batch, kv_heads, -1, len(collect_rows), length)
        logits = logits.permute(0, 3, 1, 2, 4).flatten(2, 3)
        return pad(logits, (0, capacity - length), value=-math.inf)

    def both(attend: Peer) -> Peer:
        return lambda: {**attend(), "collected": collected()}

    plain = attention(q, keys, None)
    return {f"{name} + matmul": both(attend) for name, attend in plain.items()}


def gathered(prefix: Prefix, indices: torch.Tensor) -> KeysAndValues:
    """Return a copy of the chosen tokens followed by the tree's keys, anew in every call."""
    shared = indices.dim() == 2
    index = indices[..., None].long() if shared else indices.transpose(1, 2).long()
    index = index[..., None].expand(-1, -1, prefix.sizes.Hk, prefix.sizes.D)  # [B, K, Hk, D]

    def keys() -> tuple[torch.Tensor, torch.Tensor]:
        parts = ((prefix.k_cache, prefix.k_tree), (prefix.v_cache, prefix.v_tree))
        k, v = (torch.cat((cache.gather(1, index), tree), 1) for cache, tree in parts)
        return k, v

    return keys


def importance(q: torch.Tensor, k_cache: torch.Tensor, length: int) -> dict[str, Peer]:
    """Logits of all packed rows, then their mean."""

    def matmul() -> dict[str, torch.Tensor]:
        scores = _logits(q, k_cache[:, :length]).float().mean(2)
        return {"scores": pad(scores, (0, k_cache.shape[1] - length), value=-math.inf)}

    return {"matmul and mean": matmul}


def merge(outs: torch.Tensor, lses: torch.Tensor) -> dict[str, Peer]:
    """Weights from the log-sum-exps, in plain torch operations."""

    def eager() -> dict[str, torch.Tensor]:
        lse = lses.logsumexp(0)
        weights = (lses - lse).exp()
        return {"out": (weights[..., None] * outs).sum(0).to(outs.dtype), "lse": lse}

    return {"torch eager": eager}


def selection(
    scores: torch.Tensor, length: int, count: int, capacity: int, keep: tuple[int, int]
) -> dict[str, Peer]:
    """``torch.topk`` with the kept positions raised to infinity, then a sort of the positions."""
    first, last = keep

    def topk() -> dict[str, torch.Tensor]:
        raised = scores.clone()
        raised[..., :first] = math.inf
        raised[..., length - last : length] = math.inf
        indices = raised.topk(count).indices.sort().values
        return {"indices": pad(indices, (0, capacity - count), value=-1).int()}

    return {"topk and sort": topk}


def _full_mask(
    rows: int, length: int, tree_mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """Return [T, L + T], or None where a single row sees everything."""
    if rows == 1:
        return None
    mask = torch.ones(rows, length, dtype=torch.bool, device=device)
    mask[:, length - rows :] = (
        torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
        if tree_mask is None
        else tree_mask
    )
    return mask


def _pack(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return [B, Hk, g * T, D]: all rows that share a KV head as rows of one product."""
    batch, rows, q_heads, head_dim = q.shape
    grouped = q.view(batch, rows, kv_heads, q_heads // kv_heads, head_dim)
    return grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return scaled logits [B, Hk, g * T, L]."""
    return _pack(q * q.shape[-1] ** -0.5, k.shape[2]) @ k.permute(0, 2, 3, 1)
