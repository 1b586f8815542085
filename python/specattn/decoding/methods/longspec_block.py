"""LongSpec's drafter at work beside a target: its ring buffer, and one pass per tree level."""

from __future__ import annotations

import torch

from specattn.decoding.engine.contract import DraftContext
from specattn.drafters import LongSpecDrafter
from specattn.drafters.layer import Rotation
from specattn.ops import sparse_gather_attention
from specattn.reference.tree_mask import WORD_BITS


class DraftBlock:
    """A drafter with the keys and values of what it reads: the last tokens, and one tree.

    A request's *ring* holds the last tokens of the committed text, that at position p in row
    ``p % ring``; behind it lie the nodes of the tree by number. Attention reads the ring where it
    lies, through a list of rows that begins with the newest token: at depth d the list ends d rows
    earlier, so the window counts depth in the tree and not the order of the nodes. The target's
    last layer is read in its own cache, of which only committed tokens are visible, at any depth.

    Keys and values of a token follow from the token and its position alone. So the prompt costs
    the projections of its last tokens, those of an accepted path are moved into the ring, and
    nothing is computed twice.

    Parameters
    ----------
    drafter : LongSpecDrafter
        On the target's device and in its dtype.
    context : DraftContext
        Its sequences hold the prompts.
    nodes, depth : int
        Of the largest tree, root included, and the levels below its root.

    Attributes
    ----------
    storage : Tensor [2, B, window + depth + nodes, Hk, D]
        Keys and values: all the memory that a drafter needs, whatever the length of the text.
    """

    def __init__(self, drafter: LongSpecDrafter, context: DraftContext, nodes: int, depth: int):
        config, target = drafter.config, context.target
        self.drafter, self.target, self.sequences = drafter, target, context.sequences
        self.embed, self.head = target.embed, target.head
        self.window = config.window
        # Behind an accepted path its move writes up to `depth` rows that mean nothing.
        self.ring = config.window + depth
        shape = (2, target.cache.batch_size, self.ring + nodes)
        self.storage = torch.empty(
            (*shape, config.num_key_value_heads, config.head_dim),
            dtype=target.model.dtype,
            device=target.device,
        )
        device = target.device
        self.back = torch.arange(1, self.window + 1, dtype=torch.int32, device=device)
        self.reach = self.window - 1 - torch.arange(depth, dtype=torch.int32, device=device)
        self.steps = torch.arange(depth + 1, device=device)
        words = -(-nodes // WORD_BITS)
        self.unseen = torch.zeros(nodes, words, dtype=torch.int64, device=device)
        self.behind = max(self.sequences.lengths) - 1  # tokens that the ring does not have yet

    def begin(self) -> None:
        """Prepare a round: what every level of the next tree reads."""
        seqlens = self.target.cache.seqlens
        self._catch_up(seqlens)
        self.rows = torch.remainder(seqlens[:, None] - self.back, self.ring)
        self.row_counts = torch.minimum(seqlens, self.reach[:, None])
        self.rotation: Rotation | None = None
        self.nodes = 0

    def logits(self, tokens: torch.Tensor, depth: int, mask: torch.Tensor | None) -> torch.Tensor:
        """Run one level of the tree behind the levels above it.

        Parameters
        ----------
        tokens : Tensor, int64 [B, w]
        depth : int
            Of all these nodes.
        mask : Tensor, packed int64 [B, w, words], or None for the next node of a chain
            Which nodes each of these sees, itself included.

        Returns
        -------
        Tensor [B, w, V]
            Of the drafter after each node.
        """
        unseen = self.unseen[: tokens.shape[1], : -(-tokens.shape[1] // WORD_BITS)]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_tree, v_tree = self._store(k, v)
            seen = None if mask is None else mask[..., : -(-self.nodes // WORD_BITS)]
            k_ring, v_ring = self.storage[:, :, : self.ring]
            out, _ = sparse_gather_attention(
                q, k_ring, v_ring, self.rows, self.row_counts[depth], k_tree, v_tree, seen
            )
            return out

        def attend_to_target(q: torch.Tensor) -> torch.Tensor:
            target = self.target
            return target.attend_committed(-1, q, target.cache.seqlens, unseen)[0]

        hidden = self.drafter.block(self.embed(tokens), self._at(depth), attend, attend_to_target)
        return self.head(hidden)

    def keep_leaves(self, tokens: torch.Tensor, depth: int) -> None:
        """Store the keys and values of the last level [B, w], which has no level below it."""
        self._store(*self.drafter.keys_and_values(self.embed(tokens), self._at(depth)))

    def accept(
        self, prefix: torch.Tensor, nodes: torch.Tensor, kept: torch.Tensor | None = None
    ) -> None:
        """Move the root and an accepted path into the ring.

        Parameters
        ----------
        prefix : Tensor, int32 [B]
            Position of the root.
        nodes : Tensor, int64 [B, depth]
            Nodes of the path, padded with -1: what lies where they would be is never read.
        kept : Tensor, int64 [B, n], optional
            Which of the stored nodes were verified, if not all: `nodes` number these.
        """
        nodes = nodes.clamp_min(0)
        if kept is not None:
            nodes = kept.gather(1, nodes)
        requests = self._requests()
        slots = (prefix[:, None] + self.steps[: nodes.shape[1] + 1]) % self.ring
        path = torch.nn.functional.pad(nodes, (1, 0)) + self.ring
        self.storage[:, requests, slots] = self.storage[:, requests, path]

    def compact(self, rows: list[int]) -> None:
        """Drop all requests but these, in this order; what stays in its place is not moved."""
        for row, former in enumerate(rows):
            if row != former:
                self.storage[:, row] = self.storage[:, former]
        self.storage = self.storage[:, : len(rows)]

    def follow(self, most: int) -> None:
        """Note that up to `most` nodes of a tree were accepted of which nothing lies here."""
        self.behind += most + 1

    def _catch_up(self, seqlens: torch.Tensor) -> None:
        """Fill the ring with the last tokens that it lacks, all but the texts' very last."""
        count = min(self.window, self.behind)
        self.behind = 0
        if count == 0:
            return
        # A shorter text repeats its first token, in rows that are never read.
        back = torch.arange(-count, 0, device=seqlens.device)
        positions = (seqlens[:, None] + back).long()
        tokens = self.sequences.tokens_at(positions.clamp_min(0))
        k, v = self.drafter.keys_and_values(self.embed(tokens), self._rotation(positions))
        slots = self._requests(), positions % self.ring
        self.storage[0][slots], self.storage[1][slots] = k, v

    def _store(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the next nodes behind those of the tree; return keys and values of all of them."""
        first = self.ring + self.nodes
        self.nodes += k.shape[1]
        self.storage[0, :, first : first + k.shape[1]] = k
        self.storage[1, :, first : first + k.shape[1]] = v
        tree = self.storage[:, :, self.ring : self.ring + self.nodes]
        return tree[0], tree[1]

    def _rotation(self, positions: torch.Tensor) -> Rotation:
        return self.drafter.rotation(self.storage, positions)

    def _at(self, depth: int) -> Rotation:
        """Return the rotation of nodes at one depth, which share their position."""
        if self.rotation is None:
            self.rotation = self._rotation(self.target.cache.seqlens[:, None] + self.steps)
        cos, sin = self.rotation
        return cos[:, depth : depth + 1], sin[:, depth : depth + 1]

    def _requests(self) -> torch.Tensor:
        return torch.arange(self.storage.shape[1], device=self.storage.device)[:, None]
