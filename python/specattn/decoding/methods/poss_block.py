"""PosS' drafter at work beside a target: its specialists' caches, and one pass per tree level."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from specattn.decoding.drafting import DraftContext, Verified
from specattn.drafters import PosSDrafter
from specattn.drafters.poss import JointKeysAndValues
from specattn.ops import hybrid_tree_attention
from specattn.reference.tree_mask import WORD_BITS


class SpecialistBlock:
    """A drafter with the keys and values that each of its specialists reads: the text and one tree.

    The pair at position t holds token t + 1 and the feature of token t, so the root's pair is the
    last of the text's and the first of the tree's. The keys and values of pairs follow from what
    ``fc`` makes of them. So the prompt costs ``fc`` and the projections of all specialists, one
    product each; an accepted path costs the same again, since the target's features have taken the
    place of the drafter's; and a level of the tree costs one specialist's pass, with the
    projections of those below it. No feature outlives its round.

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
            for tokens in (cache.capacity, nodes)
        )
        lengths = torch.tensor(self.sequences.lengths, device=target.device)[:, None]
        self.last_pair = lengths - 2
        # A prompt of one token has no pair: its root is drafted from without a feature.
        first = self.embed(self.sequences.tokens_at(torch.zeros_like(lengths)))
        self.root = drafter.fuse(first, torch.zeros_like(first))
        self._remember(self.root, torch.zeros_like(self.last_pair))

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
        self.pairs = (self.target.cache.seqlens - 1).clamp_min(0)  # all but the root's
        requests = torch.arange(len(self.pairs), device=self.pairs.device)
        self.tree[:, :, :, 0] = self.text[:, :, requests, self.pairs.long()]
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
        """Catch all specialists up on an accepted path, its next root included."""
        nodes, counts, next_token = verified.accepted
        path = pad(nodes.clamp_min(0), (1, 0))
        tokens = pad(verified.draft.tokens.gather(1, path[:, 1:]), (0, 1))
        tokens = tokens.scatter(1, counts[:, None], next_token[:, None])
        features = verified.result.features
        x = self.fuse(tokens, features.gather(1, _wide(path, features)))
        steps = torch.arange(path.shape[1], device=path.device)
        self._remember(x, verified.prefix[:, None].long() + steps)
        self.root = _row(x, counts[:, None])

    def compact(self, rows: list[int]) -> None:
        """Drop all requests but these, in this order; what stays in its place is not moved."""
        for row, former in enumerate(rows):
            if row != former:
                self.text[:, :, row] = self.text[:, :, former]
        self.text, self.tree = (x[:, :, : len(rows)] for x in (self.text, self.tree))
        self.root = self.root[rows]

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
