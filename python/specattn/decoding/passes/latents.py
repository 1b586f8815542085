"""Multi-head latent attention (MLA): its equations, absorbed and expanded.

A cached row is a latent and a turned key, one for all heads. Absorbed, queries become queries of
latents, and attention has one KV head whose values are a view of its keys. Expanded, keys and
values of heads are made of all latents: fewer operations where many rows attend to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specattn.blocks import Ops, Projection, Rotated, rotate
from specattn.decoding.model.latents import Latents, Turns
from specattn.ops import hybrid_tree_attention

EXPANDED_ROWS = 192
"""Rows of a request from which on expanding is faster."""

_EXPANDED_BYTES = 2**26  # of keys and values at a time, all heads of one at least


def latent_heads(
    ops: Ops, weights: Latents, x: torch.Tensor, turned: Rotated
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries [B, T, Hq, nope + rope] and rows [B, T, 1, rank + rope] of x [B, T, H]."""
    width = weights.kv.weight.shape[0]
    if weights.q_down is None or weights.q_norm is None:
        q, row = ops.linear(x, weights.q, weights.kv).split([len(weights.q.weight), width], -1)
    else:
        first = ops.linear(x, weights.q_down, weights.kv, keep=True)
        low, row = first.split([len(weights.q_down.weight), width], -1)
        q = ops.linear(ops.norm(low, weights.q_norm), weights.q)
    rank = weights.rank
    row = ops.norm_parts(row, (rank, weights.kv_norm), (width - rank, None))
    q, row = q.unflatten(-1, (weights.heads, -1)), row.unsqueeze(2)

    def turn(x: torch.Tensor, still: int) -> torch.Tensor:
        part = x[..., still:]
        return part.copy_(_turned(part, turned, weights.turns))

    return (
        ops.in_place(q, lambda q: turn(q, weights.nope)),
        ops.in_place(row, lambda row: turn(row, rank)),
    )


def absorbed(
    ops: Ops,
    weights: Latents,
    heads: tuple[torch.Tensor, torch.Tensor],
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return [B, T, Hq, Dv], by attention over latents of what `latent_heads` returns.

    ``attend(q, k, v)`` has queries [B, T, Hq, rank + rope] and one KV head; it returns
    [B, T, Hq, rank].
    """
    (q, row), nope = heads, weights.nope
    of_latents = ops.by_head(q[..., :nope], weights.k_up, q[..., nope:])
    return ops.by_head(attend(of_latents, row, row[..., : weights.rank]), weights.v_up)


def expanded(
    ops: Ops, weights: Latents, q: torch.Tensor, rows: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Return [.., Hq, Dv] of q [.., Hq, nope + rope], by keys and values made of cached rows.

    `rows` are [B, N, rank + rope], `options` those of `specattn.hybrid_tree_attention` over a
    cache. Keys and values are made of so many heads at a time that they take little memory.
    """
    latents, turned = rows.split([weights.rank, rows.shape[-1] - weights.rank], -1)
    width = q.shape[-1] + weights.up.shape[1] - weights.nope
    count = max(1, _EXPANDED_BYTES // (rows.shape[:2].numel() * width * rows.element_size()))
    outs = []
    for some, up in zip(q.split(count, -2), weights.up.split(count), strict=True):
        made = ops.linear(latents, Projection(up.flatten(0, 1), None)).unflatten(-1, (len(up), -1))
        still, v = made.split([weights.nope, made.shape[-1] - weights.nope], -1)
        k = torch.cat([still, turned.unsqueeze(2).expand(-1, -1, len(up), -1)], -1)
        given: Any = {"k_cache": k, "v_cache": v, "softmax_scale": weights.scaling, **options}
        outs.append(hybrid_tree_attention(some, k_tree=None, v_tree=None, **given)[0])
    return torch.cat(outs, -2)


def angles(embeddings: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Rotated:
    """Return what a model's rotary module says of rows, as cosines and sines [B, T, 1, half]."""
    if isinstance(embeddings, torch.Tensor):  # DeepSeek V2: a complex number for each
        return Rotated(embeddings.real.unsqueeze(2), embeddings.imag.unsqueeze(2))
    cos, sin = (x[..., : x.shape[-1] // 2].unsqueeze(2) for x in embeddings)
    return Rotated(cos, sin)


def _turned(x: torch.Tensor, by: Rotated, turns: Turns) -> torch.Tensor:
    """Return what is turned, computed in float32 at least."""
    pairs = x.to(by.cos.dtype)
    if turns != "halves":
        pairs = pairs.unflatten(-1, (-1, 2)).mT.flatten(-2)
    pairs = rotate(pairs, by.cos, by.sin)
    return pairs.unflatten(-1, (2, -1)).mT.flatten(-2) if turns == "neighbours" else pairs
