"""Runs LongSpec's drafter beside a target: its ring buffer, and trees grown level by level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from specattn.blocks import TORCH, Direct, Drawing, Ops, Place, Programs, Store, angle_tables
from specattn.decoding.engine.contract import Draft, DraftContext
from specattn.decoding.engine.target import Target
from specattn.drafters import LongSpecDrafter
from specattn.drafters.longspec import block, self_heads
from specattn.reference.tree_mask import WORD_BITS, pack_tree_mask
from specattn.tree import Tree

Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``draw(logits, tokens)``: tokens [B, 1] after a chain [B, n], by the logits [B, 1, V] there."""


@dataclass
class BlockMemory:
    """What a drafter computes in, for all requests: it outlives the run, and holds no target.

    `storage` is that of `DraftBlock`, `angles` its rope's by position, `unseen` a mask of nothing;
    `programs` are recorded over these. Steps in Python of them ask for `draw`, the run's own.
    """

    storage: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]
    unseen: torch.Tensor
    programs: Programs
    draw: Draw | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.storage.nbytes

    def drawn(self, logits: torch.Tensor, chain: list[torch.Tensor]) -> torch.Tensor:
        """Return the token that a run draws behind a chain."""
        assert self.draw is not None
        return self.draw(logits, torch.cat(chain, 1))


class DraftBlock:
    """A drafter with the keys and values of what it reads: the last tokens, and one tree.

    A request's *ring* holds the last tokens of the committed text, that at position p in row ``p %
    ring``; behind it lie the nodes of the tree by number. Attention reads the ring where it lies,
    through a list of rows that begins with the newest token: at depth d the list ends d rows
    earlier, so the window counts depth in the tree and not the order of the nodes. The target's
    last layer is read in its own cache, of which only committed tokens are visible, at any depth.

    Keys and values of a token follow from the token and its position alone. So the prompt costs the
    projections of its last tokens, those of an accepted path are moved into the ring, and nothing
    is computed twice. They lie in `storage` [2, B, window + depth + nodes, Hk, D], as many whatever
    the length of the text: the largest tree has `nodes`, root included, and `depth` levels below
    it.
    """

    def __init__(self, drafter: LongSpecDrafter, context: DraftContext, nodes: int, depth: int):
        config, target = drafter.config, context.target
        self.drafter, self.target, self.sequences = drafter, target, context.sequences
        self.window = config.window
        # Behind an accepted path its move writes up to `depth` rows that mean nothing.
        self.ring = config.window + depth
        device = target.device
        kind = "longspec", nodes, depth
        self.memory = target.recall(kind, drafter, lambda: _memory(drafter, target, nodes, depth))
        self.storage, self.programs = self.memory.storage, self.memory.programs
        self.angles, self.unseen = self.memory.angles, self.memory.unseen
        self.back = torch.arange(1, self.window + 1, dtype=torch.int32, device=device)
        self.reach = self.window - 1 - torch.arange(depth, dtype=torch.int32, device=device)
        self.steps = torch.arange(depth + 1, dtype=torch.int32, device=device)
        self.behind = max(self.sequences.lengths) - 1  # tokens that the ring does not have yet
        self.given: tuple[int, ...] = ()  # widths of all drafts but a text's last, if given

    def grow(
        self,
        root: torch.Tensor,
        widths: tuple[int, ...],
        draw: Draw | None = None,
        drawing: Drawing | None = None,
    ) -> tuple[Draft, torch.Tensor]:
        """Return a tree behind `root`, int64 [B], and its nodes' scores [B, nodes].

        `widths` are the nodes of each level below the root: the most probable paths, or, given
        `draw`, a chain whose tokens it draws, the same way in every round, without scores; given
        `drawing`, too, they are drawn so, in programs without steps in Python.
        """
        seqlens, programs = self.target.cache.seqlens, self.programs
        self._catch_up(seqlens)
        if drawing is not None:
            draw = None
        elif draw is not None and not programs.in_python:
            programs = Direct()
        whole = widths + self.given[len(widths) :]
        key = whole, draw is not None, None if drawing is None else drawing.key
        rows = [*accumulate((1, *whole))]
        deep = programs.depth_for(key, len(widths), rows, len(root))
        levels = (1, *whole[:deep])
        inputs = {
            "root": root[:, None],
            "seqlens": seqlens,
            "rows": torch.remainder(seqlens[:, None] - self.back, self.ring),
            "row_counts": torch.minimum(seqlens, self.reach[:deep, None]),
        }
        if drawing is not None:
            inputs |= drawing.inputs
        self.memory.draw = draw
        program = partial(self._grow, levels, drawing)
        tree = programs.run((key, deep), program, inputs, len(root))[: len(widths) + 1]
        self.memory.draw = None  # it holds the target
        levels = levels[: len(tree)]
        none, words = torch.full_like(root[:, None], -1), -(-sum(levels) // WORD_BITS)
        shape = Tree.grown(
            torch.cat([none, *(level.parents for level in tree[1:])], 1),
            depths=_depths(levels, root.device).expand(len(root), -1),
            packed_mask=torch.cat([level.masks[..., :words] for level in tree], 1),
            max_depth=len(widths),
            max_width=max(widths),
        )
        scores = torch.cat([level.scores for level in tree], 1)
        return Draft(shape, torch.cat([level.tokens for level in tree], 1)), scores

    def _grow(
        self,
        levels: tuple[int, ...],
        drawing: Drawing | None,
        ops: Ops,
        root: torch.Tensor,
        seqlens: torch.Tensor,
        rows: torch.Tensor,
        row_counts: torch.Tensor,
        **drawn_by: torch.Tensor,
    ) -> list[_Level]:
        """Grow a tree level by level; the last one's keys and values are stored."""
        batch, first, words = len(root), 0, -(-sum(levels) // WORD_BITS)
        mask = torch.zeros(batch, 1, words, dtype=torch.int64, device=root.device)
        mask[:, :, 0] = 1
        scores = torch.zeros(batch, 1, device=root.device, dtype=torch.float32)
        grown = [_Level(root, scores, torch.full_like(root, -1), mask)]
        for depth, width in enumerate(levels):
            level = grown[-1]
            at = torch.full((1, width), depth, dtype=torch.int32, device=root.device)
            place = Place(*self.angles, seqlens, at)
            store = Store(self.storage[:, :batch], self.ring + first)
            x = ops.embed(level.tokens, self.target.embed)
            if depth + 1 == len(levels):
                self_heads(ops, self.drafter, x, place, store)  # all that the next round needs
                return grown
            seen = level.masks[..., : -(-(first + width) // WORD_BITS)]
            k_ring, v_ring = self.storage[:, :batch, : self.ring]
            k_tree, v_tree = self.storage[:, :batch, self.ring : self.ring + first + width]
            ring = (k_ring, v_ring, rows, row_counts[depth], k_tree, v_tree, seen)

            def attend(q: torch.Tensor, *_: Any, ring: Any = ring) -> torch.Tensor:
                return ops.sparse_gather_attention(q, *ring)

            to_target = partial(self._attend_to_target, ops, seqlens)
            x = block(ops, self.drafter, x, place, attend, to_target, store)
            logits = ops.head(x, self.target.head)
            if self.memory.draw is None and drawing is None:
                above = (logits, level.scores, level.masks, first)
                grown.append(_Level(*ops.best_children(*above, levels[depth + 1])))
            else:
                chain = [one.tokens for one in grown]
                if drawing is None:
                    drawn = ops.step(partial(self.memory.drawn, logits, chain))
                else:
                    drawn = ops.draw(logits, depth, drawing.of(drawn_by))
                grown.append(level._replace(tokens=drawn, masks=_chain_mask(level.masks, depth)))
            first += width
        raise AssertionError("levels are never none")

    def _attend_to_target(self, ops: Ops, seqlens: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Attend to what the target's last layer has committed, in its own cache."""
        target, rows = self.target, q.shape[1]
        unseen = self.unseen[:rows, : -(-rows // WORD_BITS)]
        if target.cache.in_kernels and target.tensor_parallel is None:
            k_cache, v_cache = target.cache.layer(-1)
            read = (q, k_cache, v_cache, seqlens, None, None, unseen)
            return ops.hybrid_tree_attention(*read, **target.cache.scales(-1))
        return ops.step(lambda: target.attend_committed(-1, q, seqlens, unseen)[0])

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
        known = positions.clamp_min(0)
        tokens = self.sequences.tokens_at(known)
        place = Place(*self.angles, torch.zeros_like(seqlens), known)
        x = TORCH.embed(tokens, self.target.embed)
        _, k, v = self_heads(TORCH, self.drafter, x, place)
        slots = self._requests(), positions % self.ring
        self.storage[0][slots], self.storage[1][slots] = k, v

    def _requests(self) -> torch.Tensor:
        return torch.arange(self.storage.shape[1], device=self.storage.device)[:, None]


class _Level(NamedTuple):
    """Nodes of one depth, as `Ops.best_children` returns them."""

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor
    masks: torch.Tensor


def _memory(drafter: LongSpecDrafter, target: Target, nodes: int, depth: int) -> BlockMemory:
    config, device = drafter.config, target.device
    shape = (2, target.cache.batch_size, config.window + depth + nodes)
    heads = config.num_key_value_heads, config.head_dim
    storage = torch.empty((*shape, *heads), dtype=target.model.dtype, device=device)
    size = {"positions": target.cache.capacity, "longest": target.longest}
    angles = angle_tables(drafter.rotary_emb, storage[:0], **size)
    words = -(-nodes // WORD_BITS)
    unseen = torch.zeros(nodes, words, dtype=torch.int64, device=device)
    return BlockMemory(storage, angles, unseen, target.programs())


def _chain_mask(above: torch.Tensor, depth: int) -> torch.Tensor:
    """Return what the node below the one at `depth` of a chain sees, like the masks `above`."""
    return _first_nodes(depth + 2, above.shape[-1], above.device).expand_as(above).contiguous()


@cache  # kept for good: captured graphs read them
def _first_nodes(count: int, words: int, device: torch.device) -> torch.Tensor:
    """Return what a node sees that sees the first nodes, packed int64 [1, words]."""
    nodes = torch.zeros(1, words * WORD_BITS, dtype=torch.bool, device="cpu")
    nodes[:, :count] = True
    return pack_tree_mask(nodes).to(device)


@lru_cache(maxsize=256)
def _depths(levels: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the depth of every node, int32 [1, nodes]."""
    depths = [depth for depth, width in enumerate(levels) for _ in range(width)]
    return torch.tensor([depths], dtype=torch.int32, device=device)
