"""What a decoder computes, as a function of `ops`: its layers' equations, each stated once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from specattn.blocks import Norm, Ops, Projection, Rotation, Store
from specattn.decoding.model.parts import Attention, GatedMLP, Layer, Parts, SubLayer
from specattn.decoding.model.recurrent import GatedDelta
from specattn.decoding.passes.attention import HEAD
from specattn.decoding.passes.recurrent import gated_delta
from specattn.distributed.tensor import TensorParallel
from specattn.states import StateRows

Attend = Callable[[int, Any, torch.Tensor], torch.Tensor]
"""``attend(n, weights, x)``: outputs [B, T, Hq, Dv] of layer n, given what it reads [B, T, H], and
its `Attention` or `Latents`. `rotated` or `latent_heads` is the first half of it."""

Recall = Callable[[int], StateRows]
"""``recall(n)``: the state of layer n, of those that keep one, and room for what a pass leaves."""


class Streams:
    """Where a pass over tokens of a shape [B, T] leaves the residual stream behind some layers.

    `whole` [B, T, H * layers] has them side by side, in the order of `layers`; its type is that of
    `like` [.., H].
    """

    def __init__(self, layers: Sequence[int], like: torch.Tensor, shape: Sequence[int]):
        width = like.shape[-1]
        self.whole = like.new_empty(*shape, width * len(layers))
        self._parts = list(zip(layers, self.whole.split(width, -1), strict=True))

    def take(self, ops: Ops, layer: int, x: torch.Tensor) -> None:
        """Copy the stream behind a layer, or what the head reads, where it is wanted."""
        for wanted, part in self._parts:
            if wanted == layer:
                ops.copy(x, part)


def decoder(
    ops: Ops, parts: Parts, tokens: torch.Tensor, attend: Attend, recall: Recall,
    streams: Streams | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the logits [B, T, V] of tokens [B, T], and their features (`features`)."""
    read, found = features(ops, parts, tokens, attend, recall, streams)
    return _logits(ops, parts, read), found


def features(
    ops: Ops, parts: Parts, tokens: torch.Tensor, attend: Attend, recall: Recall,
    streams: Streams | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return what the head reads of tokens [B, T], [B, T, H]; and again, or what `streams` took."""
    x = _embedded(ops, parts, tokens)
    for n, layer in enumerate(parts.layers):
        x = run_layer(ops, n, layer, x, attend, recall, parts.tensor_parallel)
        if streams is not None:
            streams.take(ops, n + 1, x)
    read = ops.norm(x, parts.norm, keep=True)
    if streams is None:
        return read, read
    streams.take(ops, HEAD, read)
    return read, streams.whole


def rotated(
    ops: Ops, weights: Attention, x: torch.Tensor, head_dim: int, place: Rotation,
    store: Store | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return queries, keys and values [B, T, heads, D], normed and rotated; store the latter."""
    heads = ops.linear(x, weights.q, weights.k, weights.v)
    sizes = [len(one.weight) for one in (weights.q, weights.k, weights.v)]
    norms: tuple[Norm | None, ...] = (weights.q_norm, weights.k_norm)
    if weights.norms_whole_rows:
        heads = ops.norm_parts(heads, *zip(sizes, (*norms, None), strict=True))
        norms = None, None
    q_heads, shape = sizes[0] // head_dim, (-1, head_dim)
    by_head: Any = {"norms": norms, "store": store}
    return ops.rotate(heads.unflatten(-1, shape), q_heads, place, **by_head)


def run_layer(
    ops: Ops,
    n: int,
    layer: Layer,
    x: torch.Tensor,
    attend: Attend,
    recall: Recall,
    ranks: TensorParallel | None = None,
) -> torch.Tensor:
    """Return the residual stream behind a layer."""
    weights, mlp = layer.attention, layer.mlp
    read = entered(ops, layer.around_attention, x)
    if isinstance(weights, GatedDelta):
        out = gated_delta(ops, weights, read, recall(n))
    else:
        out = attend(n, weights, read).flatten(2)
        if isinstance(weights, Attention) and weights.gate is not None:
            out = ops.gate(out, ops.linear(read, weights.gate), "sigmoid")
    x = _left(ops, layer.around_attention, out, weights.out, x, ranks)
    read = entered(ops, layer.around_mlp, x)
    if isinstance(mlp, GatedMLP):
        inner = ops.linear(read, mlp.gate, mlp.up, gate=mlp.activation)
        return _left(ops, layer.around_mlp, inner, mlp.down, x, ranks)
    return _added(ops, layer.around_mlp, x, ops.step(lambda: _first(mlp(read))))


def entered(ops: Ops, around: SubLayer, x: torch.Tensor) -> torch.Tensor:
    """Return what a sub-layer reads."""
    return x if around.norm is None else ops.norm(x, around.norm)


def _left(
    ops: Ops,
    around: SubLayer,
    read: torch.Tensor,
    last: Projection,
    x: torch.Tensor,
    ranks: TensorParallel | None,
) -> torch.Tensor:
    """Return the residual stream behind a sub-layer's last product."""
    if around.out_norm is None and around.factor == 1.0 and ranks is None:
        return ops.linear(read, last, residual=x)
    added = ops.linear(read, last)
    if ranks is not None:
        added = ops.in_place(added, lambda part: ranks.sum_in_place("layers", part))
    return _added(ops, around, x, added)


def _added(ops: Ops, around: SubLayer, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return ``x + factor * out_norm(added)``."""
    return ops.add(x, added, around.factor, around.out_norm)


def _embedded(ops: Ops, parts: Parts, tokens: torch.Tensor) -> torch.Tensor:
    """Return the residual stream before the first layer; each rank may have some embeddings."""
    weight, ranks, scale = parts.embedding, parts.tensor_parallel, parts.embedding_scale
    if ranks is None:
        x = ops.rows(weight, tokens)
    else:
        x = ops.step(lambda: _own_embeddings(weight, tokens, ranks))
    return x if scale == 1.0 else ops.in_place(x, lambda rows: rows.mul_(scale))


def _own_embeddings(
    weight: torch.Tensor, tokens: torch.Tensor, ranks: TensorParallel
) -> torch.Tensor:
    local = tokens - ranks.rank * len(weight)
    others = (local < 0) | (local >= len(weight))
    x = nn.functional.embedding(local.masked_fill(others, 0), weight)
    ranks.sum_in_place("layers", x.masked_fill_(others[..., None], 0.0))
    return x


def _logits(ops: Ops, parts: Parts, features: torch.Tensor) -> torch.Tensor:
    ranks = parts.tensor_parallel
    own = ops.logits(features, parts.head)
    return own if ranks is None else ops.step(lambda: _joined(own, ranks))


def _joined(own: torch.Tensor, ranks: TensorParallel) -> torch.Tensor:
    """Return the logits of all ranks' parts of the vocabulary."""
    out = own.new_empty(*own.shape[:-1], own.shape[-1] * ranks.size)
    ranks.join("layers", own.flatten(0, -2), out.flatten(0, -2))
    return out


def _first(output: Any) -> torch.Tensor:
    """Return what a module adds to the stream: a mixture of experts returns more beside it."""
    return output[0] if isinstance(output, tuple) else output


def stored(
    ops: Ops, weights: Attention, read: torch.Tensor, head_dim: int, place: Rotation, store: Store
) -> None:
    """Store the keys and values alone of what a layer's attention reads [B, T, H]."""
    heads, norm = ops.linear(read, weights.k, weights.v), weights.k_norm
    if weights.norms_whole_rows:
        widths = len(weights.k.weight), len(weights.v.weight)
        heads, norm = ops.norm_parts(heads, (widths[0], norm), (widths[1], None)), None
    heads = heads.unflatten(-1, (-1, head_dim))
    ops.rotate(heads, 0, place, norms=(None, norm), store=store)
