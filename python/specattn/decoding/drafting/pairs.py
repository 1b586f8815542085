"""Runs a drafter on a target's features: what it remembers, and trees grown level by level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from specattn.blocks import TORCH, Direct, Ops, Place, Programs, Store, angle_tables
from specattn.decoding.drafting.pruning import Candidates, places
from specattn.decoding.engine.contract import DraftContext, Verified
from specattn.decoding.engine.target import Target
from specattn.decoding.model.families import CacheShape
from specattn.decoding.passes.runner import MOST_ROWS
from specattn.decoding.text.draws import uploaded
from specattn.decoding.text.sampling import kernels
from specattn.drafters.layer import LayerDrafter
from specattn.reference.tree_mask import WORD_BITS

_AT_ONCE = 128  # tokens of a request that programs read
_FEWEST = 8  # of them that a program on a GPU reads: as fast as one, and captures are dear
_PENDING = 4  # times as many are kept until they are needed: of one request, of more fewer

Angles = Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor]]
"""``angles(like, positions, longest)``: cosines and sines by position, as of `angle_tables`."""


def caches_of(drafter: LayerDrafter, layers: int) -> tuple[CacheShape, Angles]:
    """Return what so many of a drafter's layers cache, and the angles of its rope."""
    config = drafter.config
    shape = CacheShape(layers, config.num_key_value_heads, config.head_dim)
    return shape, lambda like, positions, longest: angle_tables(
        drafter.rotary_emb, like, positions, longest=longest
    )


def narrower(*windows: int | None) -> int | None:
    """Return the least of these windows, of which None has no end."""
    return min((window for window in windows if window is not None), default=None)


class Level(NamedTuple):
    """A level of a tree that is drafted.

    Attributes
    ----------
    depth : int
        0 is the root's.
    deepest : int
        Of the whole tree.
    place : Place
        Where its pairs stand.
    stores : sequence of Store
        Of every layer: where it stores keys and values of pairs that later levels see.
    read : callable
        ``read(layer)``: what a layer's queries attend to, the arguments of
        `Ops.hybrid_tree_attention` by position. Keys and values must be stored.
    visible : dict
        Further options of it.
    """

    depth: int
    deepest: int
    place: Place
    stores: Sequence[Store]
    read: Callable[[int], tuple[torch.Tensor, ...]]
    visible: dict[str, Any]


class PairMemory(NamedTuple):
    """What a drafter computes in, for all requests: it outlives the run, and holds no target.

    `text` and `tree` are those of `PairBlock`, `angles` its rope's by position; `programs` are
    recorded over these.
    """

    text: torch.Tensor
    tree: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]
    programs: Programs

    @property
    def nbytes(self) -> int:
        """Bytes of the text's and the tree's keys and values."""
        return self.text.nbytes + self.tree.nbytes


class PairBlock(ABC):
    """A drafter with the keys and values that each of its layers reads: the text and one tree.

    The pair at position t holds token t + 1 and the feature of token t, so the root's pair is the
    last of the text's and the first of the tree's. The keys and values of pairs follow from what
    `fuse` makes of them. So the prompt costs that and the projections of all layers, one product
    each; an accepted path costs the same again, since the target's features have taken the place of
    the drafter's; and a level of the tree costs one pass of a layer. What was accepted costs that
    only before the next draft, all of it together: until then its features are kept, `pending`
    [B, n, F], n as `text` has room behind the cache's capacity, F of `CachedModel.feature_layers`.

    The text's pairs lie in `text` [layers, 2, B, N, Hk, D], the nodes', level by level, in `tree`
    [layers, 2, B, nodes, Hk, D]. `window`, by default all, is what every layer reaches back, the
    pair's own position included.

    Parameters
    ----------
    context : DraftContext
    shape : CacheShape
        Layers of the drafter, their KV heads and these heads' width.
    angles : Angles
        Of its rope.
    nodes, depth : int
        Of the largest tree: nodes that are expanded, the root included, and levels below it.
    window : int, optional
    """

    drafter: Any  # set by a subclass before: whose weights it computes with

    def __init__(
        self,
        context: DraftContext,
        shape: CacheShape,
        angles: Angles,
        nodes: int,
        depth: int,
        window: int | None = None,
    ):
        target = context.target
        self.target, self.sequences, self.window = target, context.sequences, window
        self.given = 0  # levels of all drafts that are not near a text's end, where those are given
        self.vocabulary: int = target.model.config.vocab_size  # that logits are of
        kind = type(self).__name__, shape, nodes, depth, window
        memory = target.recall(kind, self.drafter, lambda: _memory(target, shape, angles, nodes))
        self.text, self.tree, self.angles, self.programs = memory
        lengths = torch.tensor(self.sequences.lengths, device=target.device)[:, None]
        # A prompt of one token has no pair: its root is drafted from without a feature.
        first = self.sequences.tokens_at(torch.zeros_like(lengths))
        embeds = target.embed(first)
        nothing = embeds.new_zeros(*first.shape, embeds.shape[-1] * len(target.feature_layers))
        self.root = self.fuse(TORCH, first, self.taken(TORCH, nothing))
        kept = self.text.shape[3] - target.cache.capacity
        self.pending = nothing.new_zeros(len(first), kept, nothing.shape[-1])
        # One call: six operators, none of them warm behind a pass, take 0.2 ms.
        self.native = kernels() if target.device.type == "cpu" else None
        # Of the pending pairs: the first one's position, and how many of each round's came true.
        self.start, self.most = lengths[:, 0] - 1, 0
        self.even = True  # whether all requests have accepted as many in each of them
        self.accepted: list[tuple[int, torch.Tensor]] = []
        # Rows of the tree further back than the window are left out by torch's operators alone.
        self.growing = self.programs if window is None or window >= depth else Direct()

    def taken(self, ops: Ops, features: torch.Tensor) -> torch.Tensor:
        """Return what stands for the target's features [B, T, F] in a pair: themselves."""
        return features

    def logits(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, n, V] of drafted features, by default the target's head's."""
        return ops.head(x, self.target.head)

    def named(self, ops: Ops, tokens: torch.Tensor) -> torch.Tensor:
        """Return the target's tokens of those that logits are of, int64, by default the same."""
        return tokens

    @abstractmethod
    def fuse(self, ops: Ops, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return what the layers read of pairs, [B, T, width] of tokens [B, T] and features."""

    @abstractmethod
    def remember(self, ops: Ops, x: torch.Tensor, place: Place, stores: Sequence[Store]) -> None:
        """Store the keys and values of the text's pairs, from `fuse`, under every layer."""

    @abstractmethod
    def drafted(self, ops: Ops, x: torch.Tensor, level: Level) -> torch.Tensor:
        """Return the features [B, n, H] that are drafted of a level's pairs, from `fuse`."""

    def on_prefill(self, start: int, features: Sequence[torch.Tensor]) -> None:
        """Add the pairs of a chunk of the prompts, as `Drafter.on_prefill` is given it."""
        for request, own in enumerate(features):
            if not len(own):
                continue
            where = slice(request, request + 1)
            text = self.sequences.text(self.sequences.active[request])
            tokens = text[start + 1 :][: len(own)][None].to(own.device)
            first = torch.full_like(self.target.cache.seqlens[where], start)
            steps = torch.arange(len(own), dtype=torch.int32, device=own.device)[None]
            x = self._remember(TORCH, tokens, own[None], first, steps, self.text[:, :, where])
            self.root[where] = x[:, -1:]

    def grow(self, root: torch.Tensor, width: int, depth: int) -> Candidates:
        """Return all that is scored behind `root`, int64 [B], while EAGLE-2's trees grow.

        Every level, the best `width` nodes of the last one are expanded into their `width` best
        tokens each.
        """
        children = min(width, self.vocabulary)
        sizes = level_sizes(width, children, depth)
        pairs = (self.target.cache.seqlens - 1).clamp_min(0)  # all but the root's
        whole = level_sizes(width, children, max(depth, self.given))
        rows = [*accumulate(whole, initial=0)]
        deep = self.growing.depth_for(width, depth, rows, len(root))
        program = partial(self._grow, whole[:deep], children)
        inputs = {"fused": self.root, "pairs": pairs}
        levels = self.growing.run((width, deep), program, inputs, len(root))[:depth]
        *_, (tokens, scores, chosen) = levels  # of the last of them none is expanded
        levels[-1] = tokens, scores, chosen[:, :0]
        return self.candidates(root, levels, sizes, children, width)

    def candidates(
        self,
        root: torch.Tensor,
        levels: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        sizes: Sequence[int],
        children: int,
        width: int,
    ) -> Candidates:
        """Return the candidates of all levels: tokens, scores, and which of them are expanded.

        `sizes` are the nodes of every level that were expanded, each into so many `children`.
        """
        tokens, scores, chosen = (torch.cat(part, 1) for part in zip(*levels, strict=True))
        tokens, among = self.named(TORCH, tokens), places(sizes, children)
        above = _numbers_of_parents(tuple(sizes), children, chosen)
        return Candidates(root, tokens, scores, above, among, len(sizes), width)

    def _grow(
        self, sizes: list[int], children: int, ops: Ops, fused: torch.Tensor, pairs: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return the candidates of every level, their scores, and which of them are expanded."""
        batch, words, first = len(fused), -(-sum(sizes) // WORD_BITS), 0
        mask = torch.zeros(batch, 1, words, dtype=torch.int64, device=fused.device)
        mask[:, :, 0] = 1
        x, scores = fused, torch.zeros(batch, 1, device=fused.device, dtype=torch.float32)
        levels = []
        for depth, nodes in enumerate(sizes):
            at = torch.full((1, nodes), depth, dtype=torch.int32, device=fused.device)
            place = Place(*self.angles, pairs, at)
            level = self._level(depth, len(sizes) - 1, place, mask, first, nodes)
            x, first = self.drafted(ops, x, level), first + nodes
            candidates = ops.children(self.logits(ops, x), scores, children)
            chosen = candidates[0][:, :0, 0]
            if depth + 1 < len(sizes):
                best = ops.expand_best(*candidates, mask, first, sizes[depth + 1])
                chosen, tokens, scores, rows, mask = best
            levels.append((candidates[0].flatten(1), candidates[1].flatten(1), chosen))
            if depth + 1 < len(sizes):
                before = ops.rows(x, rows)
                x = self.fuse(ops, self.named(ops, tokens), before)
        return levels

    def _level(
        self, depth: int, deepest: int, place: Place, mask: torch.Tensor, first: int, nodes: int
    ) -> Level:
        """Return what a level of so many nodes, numbered from `first` on, is drafted with."""
        batch, end = len(mask), first + nodes
        seen = mask[..., : -(-end // WORD_BITS)]

        def read(layer: int) -> tuple[torch.Tensor, ...]:
            k_text, v_text = self.text[layer, :, :batch]
            k_tree, v_tree = self.tree[layer, :, :batch, :end]
            return k_text, v_text, place.prefix, k_tree, v_tree, seen

        stores = [Store(memory, first) for memory in self.tree[:, :, :batch]]
        visible = {"window": self.window, "depths": place.depths}
        return Level(depth, deepest, place, stores, read, visible)

    def _remember(
        self,
        ops: Ops,
        tokens: torch.Tensor,
        features: torch.Tensor,
        start: torch.Tensor,
        steps: torch.Tensor,
        text: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store keys and values of pairs of the text under all layers; return them fused.

        Tokens are [B, T], features [B, T, H]. The first pair lies at `start`, int32 [B], the others
        `steps`, int32 [B, T], behind it; all are stored in one row from there on, by default in the
        text of the first B requests.
        """
        memory = self.text[:, :, : len(tokens)] if text is None else text
        x = self.fuse(ops, tokens, self.taken(ops, features))
        self.remember(ops, x, Place(*self.angles, start, steps), [Store(own) for own in memory])
        return x

    def accept(self, verified: Verified) -> None:
        """Keep what the layers need of an accepted path, its root included."""
        nodes, counts, _ = verified.accepted
        features, width = verified.result.features, 1 + max(verified.counts)
        if self.most + width > (room := self.pending.shape[1]):
            self.catch_up()
        if width > room:
            self.pending = self.pending.new_zeros(len(nodes), width, features.shape[2])
        if self.native is not None:
            self.native.keep_paths(features, nodes, width - 1, self.pending, self.most)
        else:
            if not verified.draft.tree.is_chain:  # whose path lies in its place
                path = pad(nodes[:, : width - 1].clamp_min(0), (1, 0))
                features = features.gather(1, _wide(path, features))
            self.pending[:, self.most : self.most + width] = features[:, :width]
        self.accepted.append((width, counts))
        self.even = self.even and width == 1 + min(verified.counts)
        self.most += width

    def catch_up(self) -> None:
        """Catch all layers up on what was accepted: on the host nothing waits for it."""
        if self.most == 0:
            return
        order, counts = self._accepted()
        for first in range(0, self.most, _AT_ONCE):
            # Few sizes, for each is recorded: requests that accepted less repeat their last pair.
            wanted = max(self.most - first, _FEWEST if self.target.runner.captures else 1)
            size = min(1 << (wanted - 1).bit_length(), _AT_ONCE)
            rows = torch.arange(first, first + size, device=counts.device)
            steps = torch.minimum(rows, counts[:, None] - 1)
            taken = steps if order is None else order.gather(1, steps)
            features = self.pending.gather(1, _wide(taken, self.pending))
            tokens = self.sequences.tokens_at(self.start[:, None] + steps + 1)
            inputs = {"tokens": tokens, "features": features}
            inputs |= {"start": (self.start + first).int(), "steps": (steps - first).int()}
            programs: Programs = self.programs if tokens.numel() <= MOST_ROWS else Direct()
            x = programs.run(("text", size), self._remember, inputs, len(tokens))
        self.root = x[:, -1:].clone()  # the last pair of each request
        self.start, self.most, self.even = self.start + counts, 0, True
        self.accepted.clear()

    def _accepted(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return where each request's accepted pairs are pending, in order, and their number [B].

        The former [B, most] begins with them, or is None where that is where they lie in any case.
        """
        if len(self.accepted) == 1:
            return None, self.accepted[0][1] + 1
        if self.even:
            return None, torch.full_like(self.start, self.most)
        steps = torch.arange(max(width for width, _ in self.accepted), device=self.start.device)
        came = [steps[:width] <= counts[:, None] for width, counts in self.accepted]
        valid = torch.cat(came, 1).int()
        return valid.argsort(stable=True, dim=1, descending=True), valid.sum(1)

    def compact(self, rows: list[int]) -> None:
        """Drop all requests but these, in this order; what stays in its place is not moved."""
        for row, former in enumerate(rows):
            if row != former:
                self.text[:, :, row] = self.text[:, :, former]
        self.text, self.tree = (x[:, :, : len(rows)] for x in (self.text, self.tree))
        self.root, self.pending = self.root[rows], self.pending[rows]
        self.start = self.start[rows]
        self.accepted = [(width, counts[rows]) for width, counts in self.accepted]


def _memory(target: Target, shape: CacheShape, angles: Angles, nodes: int) -> PairMemory:
    cache, heads = target.cache, (shape.kv_heads, shape.head_dim)
    requests = cache.batch_size
    pending = _AT_ONCE * max(1, _PENDING // requests)
    text, tree = (
        cache.storage.new_empty(shape.layers, 2, requests, tokens, *heads, dtype=cache.dtype)
        # Requests catch up by as many rows as the one that has most to: some lie behind texts.
        for tokens in (cache.capacity + pending, nodes)
    )
    turned = angles(text[:0], text.shape[3], target.longest)
    return PairMemory(text, tree, turned, target.programs())


def level_sizes(width: int, children: int, depth: int) -> list[int]:
    """Return how many nodes of each level are expanded, the root's first."""
    sizes = [1]
    while len(sizes) < depth:
        sizes.append(min(width, sizes[-1] * children))
    return sizes


def _wide(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return index[..., None].expand(-1, -1, like.shape[-1])


@lru_cache(maxsize=64)
def _before(sizes: tuple[int, ...], children: int, device: torch.device) -> Any:
    """Return, of every expanded node, how many candidates come before those that it is one of.

    The root is none, -1. And which of these nodes each candidate continues.
    """
    before = [-1, *accumulate((size * children for size in sizes[:-2]), initial=0)]
    of_node = [before[level] for level, size in enumerate(sizes) for _ in range(size)]
    parents = torch.arange(len(of_node), device=device).repeat_interleave(children)
    return uploaded(of_node, device), parents


def _numbers_of_parents(
    sizes: tuple[int, ...], children: int, chosen: torch.Tensor
) -> torch.Tensor:
    """Return the number of each candidate's parent among all candidates, -1 the root."""
    before, parents = _before(sizes, children, chosen.device)
    return (torch.nn.functional.pad(chosen, (1, 0)) + before).index_select(1, parents)
