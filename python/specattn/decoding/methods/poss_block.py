"""Runs PosS' specialists beside a target: their caches, and trees grown level by level."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import pad

from specattn.blocks import TORCH, Direct, Ops, Place, Store, angle_tables
from specattn.decoding.drafting.pruning import Candidates, places
from specattn.decoding.engine.contract import DraftContext, Verified
from specattn.decoding.passes.runner import MOST_ROWS
from specattn.drafters import PosSDrafter
from specattn.drafters.poss import fuse, keys_and_values, specialist
from specattn.reference.tree_mask import WORD_BITS

MOST_PENDING = 64
"""Tokens of a request whose features are kept until they are needed."""


class SpecialistBlock:
    """A drafter with the keys and values that each of its specialists reads: the text and one tree.

    The pair at position t holds token t + 1 and the feature of token t, so the root's pair is the
    last of the text's and the first of the tree's. The keys and values of pairs follow from what
    ``fc`` makes of them. So the prompt costs ``fc`` and the projections of all specialists, one
    product each; an accepted path costs the same again, since the target's features have taken the
    place of the drafter's; and a level of the tree costs one specialist's pass, with the
    projections of those below it. What was accepted costs that only before the next draft, all of
    it together: until then its features are kept, `pending` [B, MOST_PENDING, H].

    The text's pairs lie in `text` [layers, 2, B, N, Hk, D], the nodes', level by level, in `tree`
    [layers, 2, B, nodes, Hk, D]. `window`, by default all, is what every specialist reaches back,
    the pair's own position included.
    """

    def __init__(
        self,
        drafter: PosSDrafter,
        context: DraftContext,
        nodes: int,
        depth: int,
        window: int | None = None,
    ):
        target, config, cache = context.target, drafter.config, context.target.cache
        self.drafter, self.target, self.sequences = drafter, target, context.sequences
        self.window = window
        heads = (config.num_key_value_heads, config.head_dim)
        self.text, self.tree = (
            cache.storage.new_empty(
                config.layers, 2, cache.batch_size, tokens, *heads, dtype=cache.dtype
            )
            # Requests catch up by as many rows as the one that has most to: some lie behind texts.
            for tokens in (cache.capacity + MOST_PENDING, nodes)
        )
        lengths = torch.tensor(self.sequences.lengths, device=target.device)[:, None]
        # A prompt of one token has no pair: its root is drafted from without a feature.
        first = target.embed(self.sequences.tokens_at(torch.zeros_like(lengths)))
        self.root = fuse(TORCH, drafter, first, torch.zeros_like(first))
        self.pending = first.new_zeros(len(first), MOST_PENDING, config.hidden_size)
        self.steps = torch.arange(MOST_PENDING, device=target.device)
        # Of the pending pairs: the first one's position and their number, and the greatest number.
        self.start, self.counts = lengths[:, 0] - 1, torch.zeros_like(lengths[:, 0])
        self.most = 0
        self.angles = angle_tables(drafter.rotary_emb, self.text[:0], self.text.shape[3])
        self.programs = target.programs()
        # Rows of the tree further back than the window are left out by torch's operators alone.
        self.growing = self.programs if window is None or window >= depth else Direct()

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
        children = min(width, self.drafter.config.vocab_size)
        sizes = [1]
        while len(sizes) < depth:
            sizes.append(min(width, sizes[-1] * children))
        pairs = (self.target.cache.seqlens - 1).clamp_min(0)  # all but the root's
        program = partial(self._grow, sizes, children)
        levels = self.growing.run((width, depth), program, {"fused": self.root, "pairs": pairs})
        tokens, scores, chosen = (torch.cat(part, 1) for part in zip(*levels, strict=True))
        above = _numbers_of_parents(tuple(sizes), children, chosen)
        return Candidates(root, tokens, scores, above, places(sizes, children), depth, width)

    def _grow(
        self, sizes: list[int], children: int, ops: Ops, fused: torch.Tensor, pairs: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return the candidates of every level, their scores, and which of them are expanded."""
        batch, words, first = len(fused), -(-sum(sizes) // WORD_BITS), 0
        mask = torch.zeros(batch, 1, words, dtype=torch.int64, device=fused.device)
        mask[:, :, 0] = 1
        x, scores = fused, torch.zeros(batch, 1, device=fused.device)
        levels = []
        for depth, nodes in enumerate(sizes):
            at = torch.full((1, nodes), depth, dtype=torch.int32, device=fused.device)
            place = Place(*self.angles, pairs, at)
            deepest = self.drafter.config.specialist_at(len(sizes) - 1)
            x = self._specialist(ops, depth, deepest, x, place, mask, first)
            first += nodes
            candidates = ops.children(ops.head(x, self.target.head), scores, children)
            chosen = candidates[0][:, :0, 0]
            if depth + 1 < len(sizes):
                best = ops.expand_best(*candidates, mask, first, sizes[depth + 1])
                chosen, tokens, scores, rows, mask = best
            levels.append((candidates[0].flatten(1), candidates[1].flatten(1), chosen))
            if depth + 1 < len(sizes):
                before = ops.rows(x, rows)
                x = fuse(ops, self.drafter, ops.embed(tokens, self.target.embed), before)
        return levels

    def _specialist(
        self,
        ops: Ops,
        depth: int,
        deepest: int,
        x: torch.Tensor,
        place: Place,
        mask: torch.Tensor,
        first: int,
    ) -> torch.Tensor:
        """Return the features that a level's specialist drafts of pairs [B, n, H].

        Keys and values are stored for it and for the specialists of deeper levels.
        """
        layer, end, batch = self.drafter.config.specialist_at(depth), first + x.shape[1], len(x)
        for own in range(layer, deepest + 1):
            store = Store(self.tree[own, :, :batch], first)
            keys_and_values(ops, self.drafter, own, x, place, store)
        k_text, v_text = self.text[layer, :, :batch]
        k_tree, v_tree = self.tree[layer, :, :batch, :end]
        seen = mask[..., : -(-end // WORD_BITS)]
        read = (k_text, v_text, place.prefix, k_tree, v_tree, seen)
        visible = {"window": self.window, "depths": place.depths}

        def attend(q: torch.Tensor) -> torch.Tensor:
            return ops.hybrid_tree_attention(q, *read, **visible)

        return specialist(ops, self.drafter, layer, x, place, attend)

    def _remember(
        self,
        ops: Ops,
        tokens: torch.Tensor,
        features: torch.Tensor,
        start: torch.Tensor,
        steps: torch.Tensor,
        text: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store keys and values of pairs of the text under all specialists; return them fused.

        Tokens are [B, T], features [B, T, H]. The first pair lies at `start`, int32 [B], the others
        `steps`, int32 [B, T], behind it; all are stored in one row from there on, by default in the
        text of the first B requests.
        """
        memory = self.text[:, :, : len(tokens)] if text is None else text
        x = fuse(ops, self.drafter, ops.embed(tokens, self.target.embed), features)
        place = Place(*self.angles, start, steps)
        for layer in range(self.drafter.config.layers):
            store = Store(memory[layer])
            keys_and_values(ops, self.drafter, layer, x, place, store)
        return x

    def accept(self, verified: Verified) -> None:
        """Keep what the specialists need of an accepted path, its root included."""
        nodes, counts, _ = verified.accepted
        path, features = pad(nodes.clamp_min(0), (1, 0)), verified.result.features
        width = path.shape[1]
        if self.most + width > self.pending.shape[1]:
            self.catch_up()
        if width > self.pending.shape[1]:
            self.pending = self.pending.new_zeros(len(path), width, features.shape[2])
            self.steps = torch.arange(width, device=path.device)
        at = self.counts[:, None] + self.steps[:width]
        self.pending.scatter_(1, _wide(at, features), features.gather(1, _wide(path, features)))
        self.counts, self.most = self.counts + counts + 1, self.most + width

    def catch_up(self) -> None:
        """Catch all specialists up on what was accepted: on the host nothing waits for it."""
        if self.most == 0:
            return
        # Requests that accepted less repeat their last pair.
        steps = torch.minimum(self.steps[: self.most], self.counts[:, None] - 1)
        features = self.pending.gather(1, _wide(steps, self.pending))
        tokens = self.sequences.tokens_at(self.start[:, None] + steps + 1)
        few = tokens.numel() <= MOST_ROWS and self.most <= MOST_PENDING
        inputs = {"tokens": tokens, "features": features}
        inputs |= {"start": self.start.int(), "steps": steps.int()}
        x = (self.programs if few else Direct()).run("text", self._remember, inputs)
        self.root = _row(x, self.counts[:, None] - 1)
        self.start, self.most = self.start + self.counts, 0
        self.counts = torch.zeros_like(self.counts)

    def compact(self, rows: list[int]) -> None:
        """Drop all requests but these, in this order; what stays in its place is not moved."""
        for row, former in enumerate(rows):
            if row != former:
                self.text[:, :, row] = self.text[:, :, former]
        self.text, self.tree = (x[:, :, : len(rows)] for x in (self.text, self.tree))
        self.root, self.pending = self.root[rows], self.pending[rows]
        self.start, self.counts = self.start[rows], self.counts[rows]


def _row(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return one row [B, 1, H] of each request's [B, T, H]: the nearest to its index [B, 1]."""
    return x.gather(1, _wide(index.clamp(0, x.shape[1] - 1), x))


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
    return torch.tensor(of_node, device=device), parents


def _numbers_of_parents(
    sizes: tuple[int, ...], children: int, chosen: torch.Tensor
) -> torch.Tensor:
    """Return the number of each candidate's parent among all candidates, -1 the root."""
    before, parents = _before(sizes, children, chosen.device)
    return (torch.nn.functional.pad(chosen, (1, 0)) + before).index_select(1, parents)
