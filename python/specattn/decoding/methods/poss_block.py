"""PosS' drafter at work beside a target: its specialists' caches, and one pass per tree level."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from specattn.decoding.engine.contract import DraftContext, Verified
from specattn.decoding.passes.compiling import MOST_ROWS
from specattn.drafters import PosSDrafter
from specattn.drafters.poss import JointKeysAndValues
from specattn.ops import hybrid_tree_attention
from specattn.reference.tree_mask import WORD_BITS

if TYPE_CHECKING:
    from specattn.decoding.methods.poss_static import StaticSpecialists

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
    it together: until then its features are kept, of at most `MOST_PENDING` tokens.

    Parameters
    ----------
    drafter : PosSDrafter
        On the target's device and in its dtype.
    context : DraftContext
        Its sequences hold the prompts.
    nodes : int
        Nodes of the largest tree that the specialists work on, root included.
    window : int, optional
        Positions that every specialist reaches back, the pair's own included; by default all.

    Attributes
    ----------
    text : Tensor [layers, 2, B, N, Hk, D]
        Keys and values of the text's pairs.
    pending : Tensor [B, MOST_PENDING, H]
        Features of the last tokens, those whose pairs the text does not have yet.
    tree : Tensor [layers, 2, B, nodes, Hk, D]
        Of the tree's nodes, in the order of their levels.
    """

    def __init__(
        self,
        drafter: PosSDrafter,
        context: DraftContext,
        nodes: int,
        window: int | None = None,
    ):
        target, config, cache = context.target, drafter.config, context.target.cache
        self.drafter, self.target, self.sequences = drafter, target, context.sequences
        self.embed, self.head = target.embed, target.head
        self.window = window
        self.keys_and_values = JointKeysAndValues(drafter)
        heads = (config.num_key_value_heads, config.head_dim)
        self.text, self.tree = (
            cache.storage.new_empty(config.layers, 2, cache.batch_size, tokens, *heads)
            # Requests catch up by as many rows as the one that has most to: some lie behind texts.
            for tokens in (cache.capacity + MOST_PENDING, nodes)
        )
        lengths = torch.tensor(self.sequences.lengths, device=target.device)[:, None]
        self.last_pair = lengths - 2
        # A prompt of one token has no pair: its root is drafted from without a feature.
        first = self.embed(self.sequences.tokens_at(torch.zeros_like(lengths)))
        self.root = drafter.fuse(first, torch.zeros_like(first))
        self.pending = first.new_zeros(len(first), MOST_PENDING, config.hidden_size)
        self.steps = torch.arange(MOST_PENDING, device=target.device)
        # Of the pending pairs: the first one's position and their number, and the greatest number.
        self.start, self.counts = lengths[:, 0] - 1, torch.zeros_like(lengths[:, 0])
        self.most = 0
        self.static: StaticSpecialists | None = None

    def on_prefill(self, start: int, features: torch.Tensor) -> None:
        """Add the pairs of a chunk of the prompts, as `Drafter.on_prefill` is given it."""
        at = torch.arange(start, start + features.shape[1], device=features.device)[None]
        tokens = self.sequences.tokens_at(at.expand(len(features), -1) + 1)
        x = self.drafter.fuse(self.embed(tokens), features)
        self._remember(x, at.expand_as(tokens))
        here = (self.last_pair >= start) & (self.last_pair < start + features.shape[1])
        self.root = torch.where(here[..., None], _row(x, self.last_pair - start), self.root)

    def begin(self) -> torch.Tensor:
        """Prepare a round; return what ``fc`` made of the root's pair, [B, 1, H]."""
        self.catch_up()
        self.pairs = (self.target.cache.seqlens - 1).clamp_min(0)  # all but the root's
        rotation = self.drafter.rotation(self.root, self.pairs[:, None].long())
        self.tree[:, :, :, :1] = self.keys_and_values(self.root, rotation)
        self.nodes = 1
        return self.root

    def features(self, x: torch.Tensor, depth: int, mask: torch.Tensor) -> torch.Tensor:
        """Run one level of the tree behind the levels above it.

        Parameters
        ----------
        x : Tensor [B, w, H]
            The level's pairs, fused; at depth 0 what `begin` returned.
        depth : int
            Of all these nodes: it chooses the specialist.
        mask : Tensor, packed int64 [B, w, words]
            Which nodes each of these sees, itself included.

        Returns
        -------
        Tensor [B, w, H]
            Drafted features.
        """
        rotation = self.drafter.rotation(x, self.pairs[:, None].long() + depth)
        layer = self.drafter.config.specialist_at(depth)
        if depth:
            end = self.nodes + x.shape[1]
            self.tree[layer:, :, :, self.nodes : end] = self.keys_and_values(x, rotation, layer)
            self.nodes = end

        def attend(q: torch.Tensor) -> torch.Tensor:
            k_text, v_text = self.text[layer]
            k_tree, v_tree = self.tree[layer, :, :, : self.nodes]
            seen = mask[..., : -(-self.nodes // WORD_BITS)]
            out, _ = hybrid_tree_attention(
                q, k_text, v_text, self.pairs, k_tree, v_tree, seen, window=self.window
            )
            return out

        features: torch.Tensor = self.drafter.specialist_at(depth)(x, rotation, attend)
        return features

    def fuse(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return the pairs [B, w, H] of drafted tokens [B, w] and the features before them."""
        return self.drafter.fuse(self.embed(tokens), features)

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
        positions = self.start[:, None] + steps
        tokens = self.sequences.tokens_at(positions + 1)
        if self.static is not None and tokens.numel() <= MOST_ROWS and self.most <= MOST_PENDING:
            x = self.static.remember(tokens, features, self.start, steps)
        else:
            x = self.fuse(tokens, features)
            self._remember(x, positions)
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

    def _remember(self, x: torch.Tensor, positions: torch.Tensor) -> None:
        """Store the keys and values of pairs [B, T, H] of the text at positions [B, T]."""
        requests = torch.arange(len(x), device=x.device)[:, None]
        found = self.keys_and_values(x, self.drafter.rotation(x, positions))
        self.text[:, :, requests, positions] = found


def _row(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return one row [B, 1, H] of each request's [B, T, H]: the nearest to its index [B, 1]."""
    return x.gather(1, _wide(index.clamp(0, x.shape[1] - 1), x))


def _wide(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return index[..., None].expand(-1, -1, like.shape[-1])
