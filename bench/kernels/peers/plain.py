"""Peers in plain torch, as a caller writes them, for tasks that no library has a call for."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from ..inputs import Prefix
from .task import Attention, KeysAndValues, Peer, pack


def verify(
    task: Attention,
    attend: dict[str, Peer],
    collect: str,
    collect_rows: tuple[int, ...],
    capacity: int,
) -> dict[str, Peer]:
    """Attention by any peer, then a product of the collected rows with every cached key."""
    chosen = task.q[:, list(collect_rows)]
    length = task.keys_and_values()[0].shape[1] - task.q.shape[1]

    def collected() -> torch.Tensor:
        k = task.keys_and_values()[0]
        logits = _logits(chosen, k[:, :length])  # [B, Hk, g * R, L]
        batch, kv_heads, _, _ = logits.shape
        if collect == "scores":
            return pad(logits.float().mean(2), (0, capacity - length), value=-math.inf)
        logits = logits.view(batch, kv_heads, -1, len(collect_rows), length)
        logits = logits.permute(0, 3, 1, 2, 4).flatten(2, 3)
        return pad(logits, (0, capacity - length), value=-math.inf)

    def both(one: Peer) -> Peer:
        return lambda: {**one(), "collected": collected()}

    return {f"{name} + matmul": both(one) for name, one in attend.items()}


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


def _logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return scaled logits [B, Hk, g * T, L]."""
    return pack(q * q.shape[-1] ** -0.5, k.shape[2]) @ k.permute(0, 2, 3, 1)


def linear(
    x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None = None
) -> dict[str, Peer]:
    """One product, or a gated one in three steps."""

    def layer() -> dict[str, torch.Tensor]:
        out = torch.nn.functional.linear(x, weight)
        if up is not None:
            out = torch.nn.functional.silu(out) * torch.nn.functional.linear(x, up)
        return {"out": out}

    return {"torch linear": layer}


def room_for(
    k: torch.Tensor, positions: torch.Tensor, capacity: int
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return two caches of NaN, and what lies at ``positions`` of each, a run of them, as views."""
    batch, rows, heads, head_dim = k.shape
    caches = [k.new_full((batch, capacity, heads, head_dim), math.nan) for _ in range(2)]
    first = int(positions[0])
    written = (cache[:, first : first + rows] for cache in caches)
    return caches, dict(zip(("k", "v"), written, strict=True))


def writes(
    k: torch.Tensor, v: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, capacity: int
) -> dict[str, Peer]:
    """Advanced indexing, and ``index_copy_`` of all requests' tokens; each into its own cache."""
    (k_cache, v_cache), indexed = room_for(k, positions, capacity)
    caches, copied = room_for(k, positions, capacity)
    k_flat, v_flat = (cache.flatten(0, 1) for cache in caches)
    slots = (requests * capacity + positions).flatten()

    def indexing() -> dict[str, torch.Tensor]:
        k_cache[requests, positions] = k
        v_cache[requests, positions] = v
        return indexed

    def index_copy() -> dict[str, torch.Tensor]:
        k_flat.index_copy_(0, slots, k.flatten(0, 1))
        v_flat.index_copy_(0, slots, v.flatten(0, 1))
        return copied

    return {"indexing": indexing, "index_copy": index_copy}
