"""The operators that blocks of models are written with, and torch's own for them.

A block is a function of `ops`: given `TORCH` it computes, over any number of rows, on any device,
with gradients; given a recorder (`specattn.blocks.recorder`) it leaves kernel calls over
fixed memory behind, and captured by a CUDA graph it is one launch. So its equations stand once.

Rows are [B, T, width], heads [B, T, heads, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, gelu, linear, pad, rms_norm, silu, softplus

from specattn.blocks.gated_delta import Convolution, Gates, gated_delta
from specattn.blocks.operands import (
    Drawing,
    Norm,
    Place,
    Projection,
    Rotation,
    Store,
    halves,
    projection,
    whole,
)
from specattn.ops import (
    hybrid_tree_attention,
    select_topk,
    sparse_gather_attention,
    verify_attention,
    write_kv,
)
from specattn.reference.add_gumbel_noise import add_gumbel_noise
from specattn.reference.tree_mask import WORD_BITS, pack_tree_mask
from specattn.states import StateRows

_GROUP = 32  # tokens of a group in `top_tokens`, at most
_LARGE = 2**14  # vocabularies from here on are looked through by groups


class Ops:
    """Torch's operators.

    What a recorder returns holds until the same operator runs again on rows as wide, unless it is
    told to `keep` it.
    """

    def embed(self, tokens: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """Return the embeddings [B, T, H] of tokens [B, T]."""
        return module(tokens)

    def rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return rows of x [.., H] by their number among all of them: index [B, T]."""
        return embedding(index, x.flatten(0, -2))

    def beside(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return rows side by side, [B, T, 2 H]."""
        return torch.cat([first, second], -1)

    def copy(self, x: torch.Tensor, to: torch.Tensor) -> None:
        """Copy rows to where others read them: both [B, T, H]."""
        to.copy_(x)

    def stack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return n tensors [.., H] as one, [.., n, H]."""
        return torch.stack(list(parts), -2)

    def norm(self, x: torch.Tensor, norm: Norm, *, keep: bool = False) -> torch.Tensor:
        """Return normed rows. The weight goes the way of x: under autocast their types differ."""
        return rms_norm(x, x.shape[-1:], norm.weight.to(x.dtype), norm.eps)

    def norm_parts(self, x: torch.Tensor, *parts: tuple[int, Norm | None]) -> torch.Tensor:
        """Norm parts of rows, each so many columns wide: x itself in a recording."""
        pieces = x.split([width for width, _ in parts], -1)
        normed = [p if n is None else self.norm(p, n) for p, (_, n) in zip(pieces, parts)]  # noqa: B905
        return torch.cat(normed, -1)

    def linear(
        self,
        x: torch.Tensor,
        *projections: Projection,
        gate: str | None = None,
        activation: str | None = None,
        residual: torch.Tensor | None = None,
        keep: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return products with up to three weights side by side, [B, T, N].

        With `gate`, an activation, there are two, and the result is ``gate(first) * second``. With
        `activation` there is one, which it is applied to. `residual` is added; in a recording the
        sum takes its place, unless it is to be kept. `into`, dense, is where others leave products.
        """
        found = [linear(x, whole(weight, x.dtype), bias) for weight, bias in projections]
        if gate is not None:
            out = ACTIVATIONS[gate](found[0]) * found[1]
        else:
            out = found[0] if len(found) == 1 else torch.cat(found, -1)
        if activation is not None:
            out = ACTIVATIONS[activation](out)
        if into is not None:
            return into.copy_(out)
        return out if residual is None else residual + out

    def by_head(
        self, x: torch.Tensor, weight: torch.Tensor, beside: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return products of heads [B, T, H, K], each with a weight of its own, [H, N, K].

        `beside`, [B, T, H, R], stands behind them: the result is [B, T, H, N + R].
        """
        product = torch.matmul(x.flatten(0, 1).transpose(0, 1), weight.mT).transpose(0, 1)
        product = product.unflatten(0, x.shape[:2])
        return product if beside is None else torch.cat([product, beside], -1)

    def gate(self, x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
        """Return ``activation(gate) * x``, both [B, T, N]."""
        return ACTIVATIONS[activation](gate) * x

    def gates(
        self, b: torch.Tensor, a: torch.Tensor, gates: Gates
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return g and beta [B, T, Hv], at least in float32, of the products that make them."""
        dtype = torch.promote_types(a.dtype, torch.float32)
        beta = b.to(dtype).sigmoid() * gates.most_beta
        return softplus(a.to(dtype) + gates.bias.to(dtype)) * gates.rate.to(dtype), beta

    def gated_delta(
        self,
        x: torch.Tensor,
        convolution: Convolution,
        g: torch.Tensor,
        beta: torch.Tensor,
        k_heads: int,
        rows: StateRows,
    ) -> torch.Tensor:
        """Return the outputs [B, T, Hv, Dv] of a layer with a state, as `gated_delta` says."""
        return gated_delta(x, convolution, g, beta, k_heads, rows)

    def head(self, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """Return the logits [B, T, V] of a model's head."""
        return module(x)

    def logits(self, x: torch.Tensor, head: Projection) -> torch.Tensor:
        """Return the same of a head by its weights."""
        return linear(x, whole(head.weight, x.dtype), head.bias)

    def in_place(self, x: torch.Tensor, function: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """Return x, which a function in Python has changed; it does so in every replay."""
        function(x)
        return x

    def add(
        self, x: torch.Tensor, added: torch.Tensor, factor: float = 1.0, norm: Norm | None = None
    ) -> torch.Tensor:
        """Return ``x + factor * norm(added)``: in a recording, and on a GPU, x itself."""
        added = added if norm is None else self.norm(added, norm)
        return torch.add(x, added, alpha=factor)

    def step(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what a function in Python returns, which is called again in every replay."""
        return function()

    def rotate(
        self,
        heads: torch.Tensor,
        q_heads: int,
        place: Rotation,
        *,
        norms: tuple[Norm | None, Norm | None] = (None, None),
        store: Store | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values of heads; queries and keys normed by head and rotated.

        `store` is where keys and values are written.
        """
        kv_heads = (heads.shape[2] - q_heads) // 2
        q, k, v = heads.split([q_heads, kv_heads, kv_heads], 2)
        q, k = (x if n is None else self.norm(x, n) for x, n in zip((q, k), norms, strict=True))
        if isinstance(place, Place) and place.depths is None:
            steps = torch.arange(heads.shape[1], dtype=torch.int32, device=heads.device)
            place = place._replace(depths=steps[None])
        cos, sin = place.cos_sin(heads.dtype)
        q, k = (rotate(x, cos, sin) if x.shape[2] else x for x in (q, k))
        if store is not None:
            _put(store, place, k, v)
        return q, k, v

    def write_rows(
        self, x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: Any = None
    ) -> None:
        """Write rows [B, T, heads, D] alone, such as latents, as `specattn.write_kv` does keys.

        One of 8 bits has a `scale` for each row, which is chosen for it.
        """
        how: Any = {} if scale is None else {"k_scale": scale, "scale": "dynamic"}
        write_kv(x, None, cache, None, slots, **how)

    def hybrid_tree_attention(self, q: torch.Tensor, *read: Any, **options: Any) -> torch.Tensor:
        """Return the outputs of `specattn.hybrid_tree_attention`, by its arguments."""
        return hybrid_tree_attention(q, *read, **_public(options))[0]

    def verify_attention(
        self, q: torch.Tensor, *read: Any, scores: torch.Tensor, rows: Sequence[int], **options: Any
    ) -> torch.Tensor:
        """Do the same, and write the mean `scores` of some rows: `specattn.verify_attention`."""
        options |= {"collect": "scores", "collect_rows": rows, "collected": scores}
        options["per_head"] = scores.dim() == 3
        attend: Any = verify_attention
        return attend(q, *read, **_public(options))[0]

    def sparse_gather_attention(self, q: torch.Tensor, *read: Any, **options: Any) -> torch.Tensor:
        """Return the outputs of `specattn.sparse_gather_attention`, by its arguments."""
        return sparse_gather_attention(q, *read, **_public(options))[0]

    def select(
        self, scores: torch.Tensor, prefix: torch.Tensor, newer: int, **share: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best tokens of a prefix [B] in every layer, and how many they are, int32 [B].

        By `scores` [layers, B, N] positions [layers, B, K + newer], as `followed` has them; of KV
        heads [layers, B, Hk, ..] and [B, Hk]. `share` are options of `specattn.select_topk`.
        """
        layers, batch = scores.shape[:2]
        indices, lengths = select_topk(scores.flatten(0, 1), prefix.repeat(layers), **share)
        indices, lengths = indices.unflatten(0, (layers, batch)), lengths[:batch]
        return followed(indices, lengths, prefix, newer), lengths

    def children(
        self, logits: torch.Tensor, scores: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return every node's best children and their paths' log-probabilities: [B, n, width].

        `logits` are [B, n, V], `scores` the nodes' own, float32 [B, n]; `width` is at most V.
        """
        steps, tokens = top_tokens(logits.log_softmax(-1, torch.float32), width)
        return tokens, scores[..., None] + steps

    def draw(self, logits: torch.Tensor, ahead: int, how: Drawing) -> torch.Tensor:
        """Return the tokens behind the last nodes of chains, int64 [B, 1], by logits [B, 1, V].

        A node is `ahead` tokens behind its text. Where no token can follow it is 0. Nothing waits
        for the host: for drafts in graphs.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        for processor in how.processors:
            scores = processor(None, scores[:, 0])[:, None]
        if how.temperatures is not None:
            scores = scores / how.temperatures[:, None, None]
        if how.seed is not None:
            rows, lengths = how.places
            scores = add_gumbel_noise(scores[:, 0], how.seed, rows, lengths + ahead)[:, None]
        best, drawn = scores.max(-1)
        return drawn.masked_fill(best.isnan() | (best == -torch.inf), 0)

    def best_children(
        self,
        logits: torch.Tensor,
        scores: torch.Tensor,
        masks: torch.Tensor,
        first: int,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the `width` most probable paths that continue those of a level of a tree.

        Given are logits [B, n, V], scores [B, n], packed masks [B, n, words] of what each node
        sees, and the number in the tree of the level's `first` node, which the next level follows.
        Returned are tokens, scores (descending) and parents by number, [B, width], and masks [B,
        width, words].
        """
        best, tokens = logits.topk(min(width, logits.shape[-1]))
        # No node has more than `width` children among the best: each node's own are found first.
        paths = best.float() + (scores - logits.float().logsumexp(-1))[..., None]
        scores, chosen = paths.flatten(1).topk(width)
        parents = chosen // best.shape[-1]
        masks = _below(masks, parents, first + logits.shape[1])
        return tokens.flatten(1).gather(1, chosen), scores, parents + first, masks

    def expand_best(
        self,
        tokens: torch.Tensor,
        scores: torch.Tensor,
        masks: torch.Tensor,
        first: int,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose which of a level's candidates are expanded next.

        They are tokens and scores [B, n, children]; `masks` [B, n, words] say what their parents
        see; `first` is the number of the first chosen node. Returned are of [B, width] which
        candidates were chosen, their tokens and scores, the rows of their parents among those of
        all requests, and masks [B, width, words].
        """
        batch, nodes, children = tokens.shape
        best, chosen = scores.flatten(1).topk(width)
        parents = chosen // children
        offsets = torch.arange(0, batch * nodes, nodes, device=tokens.device)[:, None]
        drafted = tokens.flatten(1).gather(1, chosen)
        return chosen, drafted, best, parents + offsets, _below(masks, parents, first)


TORCH = Ops()

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}


def followed(
    indices: torch.Tensor, lengths: torch.Tensor, prefix: torch.Tensor, newer: int
) -> torch.Tensor:
    """Return positions with those behind the prefix following: int32 [..., K] to [..., K + newer].

    Of `indices` [layers, B, ..., K] the first `lengths`, int32 [B, ...], count; they lie among the
    first `prefix`, int32 [B], tokens.
    """
    column = torch.arange(indices.shape[-1] + newer, dtype=torch.int32, device=indices.device)
    behind = (prefix.view(-1, *[1] * (lengths.dim() - 1)) - lengths)[..., None] + column
    return torch.where(column < lengths[..., None], pad(indices, (0, newer)), behind)


def swiglu(ops: Ops, x: torch.Tensor, norm: Norm, gate_up: nn.Linear, down: nn.Linear) -> Any:
    """Return ``x + down(silu(gate(norm(x))) * up(norm(x)))``."""
    inner = ops.linear(ops.norm(x, norm), *halves(gate_up), gate="silu")
    return ops.linear(inner, projection(down), residual=x)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first `half` channels of heads against the next ones; others stay."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def top_tokens(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest entries of x [B, n, V] in descending order, and their places: [B, n, k].

    They lie in the `count` groups of tokens with the largest entries, so after one pass for the
    groups' maxima the rest is small. On a CPU that takes a third of the time of ``topk`` over a
    vocabulary of 128k; over a small one it is slower.
    """
    size = x.shape[-1]
    count, group = min(count, size), math.gcd(size, _GROUP)
    if size < _LARGE or size // group < count:
        return torch.topk(x, count)
    groups = x.unflatten(-1, (-1, group))
    best = groups.amax(-1).topk(count, sorted=False).indices
    among = groups.gather(2, best[..., None].expand(*best.shape, group)).flatten(2)
    found, at = among.topk(count)
    return found, best.gather(2, at // group) * group + at % group


def _below(masks: torch.Tensor, parents: torch.Tensor, first: int) -> torch.Tensor:
    """Return what new nodes see, numbered from `first` on: as their parents, and themselves."""
    found = masks.gather(1, parents[..., None].expand(-1, -1, masks.shape[-1]))
    return found | _own_bits(first, parents.shape[1], masks.shape[-1], masks.device)


@cache  # kept for good: captured graphs read them
def _own_bits(first: int, count: int, words: int, device: torch.device) -> torch.Tensor:
    """Return masks of nodes of which each sees itself alone, packed int64 [count, words]."""
    itself = torch.zeros(count, WORD_BITS * words, dtype=torch.bool, device="cpu")
    row = torch.arange(count, device="cpu")
    itself[row, first + row] = True
    return pack_tree_mask(itself).to(device)


def _put(store: Store, place: Any, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write keys and values [B, T, Hk, D] where they belong."""
    first = place.prefix[:, None] if store.slot is None else store.slot
    requests = torch.arange(len(k), device=k.device)[:, None]
    slots = first + torch.arange(k.shape[1], device=k.device)
    k_scale, v_scale = store.scales
    if k_scale is not None:
        to = (requests * store.memory[0].shape[1] + slots).long()
        how: Any = {"k_scale": k_scale, "v_scale": v_scale, "scale": "dynamic"}
        write_kv(k, v, store.memory[0], store.memory[1], to, **how)
        return
    for half, x in zip(store.memory, (k, v), strict=True):
        half[requests, slots] = x


def _public(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out what the primitives find by themselves."""
    return {name: value for name, value in options.items() if name != "depths"}
