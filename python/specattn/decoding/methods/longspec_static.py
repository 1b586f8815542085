"""LongSpec drafted by kernel calls alone: all levels of a beam search or chain in one recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import specattn._cpu as _cpu
from specattn.decoding.drafting.static_drafting import Place, Storage, add_mlp, projection, rotate
from specattn.decoding.engine.contract import Draft
from specattn.decoding.methods.longspec_block import DraftBlock
from specattn.decoding.passes.recording import UNIFORM, Recording
from specattn.decoding.passes.static_pass import StaticPass
from specattn.reference.tree_mask import WORD_BITS, pack_tree_mask
from specattn.tree import Tree

Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``draw(logits, tokens)``: tokens [B, 1] after a chain [B, n], by the logits [B, 1, V] there."""


class StaticTree:
    """Grows trees of fixed widths in the memory of a `DraftBlock`, by the same equations.

    Parameters
    ----------
    block : DraftBlock
    static : StaticPass
        Of the block's target.
    """

    def __init__(self, block: DraftBlock, static: StaticPass):
        self.block = block
        self._angles = static.angles[""]  # a drafter's rope is its target's
        self._trees: dict[tuple, tuple[_Memory, Recording]] = {}

    def grow(
        self, root: torch.Tensor, levels: tuple[int, ...], draw: Draw | None = None
    ) -> tuple[Draft, torch.Tensor]:
        """Return a tree behind `root`, int64 [B], and its nodes' scores [B, nodes].

        `levels` are the nodes of each, the root's 1 first. With `draw`, the same in every round,
        they are all 1, and it draws the tokens, which then have no scores.
        """
        batch, block = len(root), self.block
        memory, recording = self._trees.get((batch, levels), (None, None))
        memory = memory or _Memory(block, levels, batch)
        memory.tokens[:, 0] = root
        memory.seqlens.copy_(block.target.cache.seqlens)
        memory.rows.copy_(block.rows)
        memory.row_counts.copy_(block.row_counts[: len(levels) - 1])
        if recording is None:
            recording = Recording()
            self._record(recording, memory, levels, draw)
            self._trees[batch, levels] = memory, recording
        else:
            recording.replay()
        tree = Tree.grown(
            memory.parents,
            depths=memory.depths.expand(batch, -1),
            packed_mask=memory.masks.clone(),
            max_depth=len(levels) - 1,
            max_width=max(levels[1:], default=0),
        )
        return Draft(tree, memory.tokens.clone()), memory.scores

    def _record(
        self,
        recording: Recording,
        memory: _Memory,
        levels: tuple[int, ...],
        draw: Draw | None,
    ) -> None:
        last = len(levels) - 1
        if draw is not None:  # its masks are the same in every round
            memory.masks[:] = pack_tree_mask(
                torch.ones(last + 1, last + 1, dtype=torch.bool).tril()
            )
        for depth, width in enumerate(levels):
            first = sum(levels[:depth])
            level = slice(first, first + width)
            rows = _Rows(memory, level)
            self._store(recording, memory, rows, level)
            if depth == last:
                return  # nothing is below: its keys and values are all that is needed
            self._read(recording, memory, rows, level, depth)
            below = slice(level.stop, level.stop + levels[depth + 1])
            if draw is not None:
                _record_draw(recording, memory, rows.logits, below, draw)
                continue
            best = (x[:, below] for x in (memory.tokens, memory.scores, memory.parents))
            above = (rows.logits, memory.scores[:, level], memory.masks[:, level])
            recording.kernel(_cpu.best_children, *above, first, *best, memory.masks[:, below])

    def _store(self, recording: Recording, memory: _Memory, rows: _Rows, level: slice) -> None:
        """Record the heads of self attention of a level; its keys and values are stored."""
        block, drafter, kernel = self.block, self.block.drafter, recording.kernel
        attention, eps = drafter.self_attention, drafter.config.rms_norm_eps
        kernel(_cpu.embed, memory.tokens[:, level], block.embed.weight, rows.x)
        kernel(_cpu.rms_norm, rows.x, drafter.self_norm.weight, eps, rows.normed)
        recording.product(rows.normed, [projection(attention.qkv_proj)], rows.qkv)
        self._rotate(recording, memory, rows.qkv, level, attention, block.ring + level.start)

    def _read(
        self, recording: Recording, memory: _Memory, rows: _Rows, level: slice, depth: int
    ) -> None:
        """Record the rest of the block, from self attention to logits."""
        block, drafter, kernel = self.block, self.block.drafter, recording.kernel
        eps, state = drafter.config.rms_norm_eps, (rows.attended, rows.lse)
        scale = (drafter.config.head_dim**-0.5, 0.0, None)
        storage = block.storage[:, : len(memory.tokens)]
        ring = (*storage[:, :, : block.ring], memory.rows, memory.row_counts[depth])
        tree = (*storage[:, :, block.ring : block.ring + level.stop],)
        seen = memory.masks[:, level, : -(-level.stop // WORD_BITS)]
        heads = (rows.q, *ring, *tree, seen, None, *scale, None, *UNIFORM, *state)
        kernel(_cpu.sparse_gather_attention, *heads)
        attention: Any = drafter.self_attention
        recording.product(rows.out, [projection(attention.o_proj)], rows.x, residual=rows.x)

        attention = drafter.cross_attention
        kernel(_cpu.rms_norm, rows.x, drafter.cross_norm.weight, eps, rows.normed)
        recording.product(rows.normed, [projection(attention.qkv_proj)], rows.queries)
        self._rotate(recording, memory, rows.queries, level, attention, None)
        width = level.stop - level.start
        unseen = block.unseen[None, :width, : -(-width // WORD_BITS)]
        cache = block.target.cache
        if cache.in_kernels:
            read = (*cache.layer(-1), memory.seqlens, None, None, unseen, None, None)
            kernel(_cpu.hybrid_tree_attention, rows.cross_q, *read, None, *scale, *UNIFORM, *state)
        else:

            def attend() -> None:
                found = cache.attend_committed(-1, rows.cross_q, memory.seqlens, unseen[0])
                rows.attended.copy_(found[0])

            recording.python(attend)
        recording.product(rows.out, [projection(attention.o_proj)], rows.x, residual=rows.x)

        add_mlp(recording, drafter, drafter.mlp_norm, eps, rows.x, rows)
        kernel(_cpu.rms_norm, rows.x, drafter.norm.weight, eps, rows.normed)
        recording.product(rows.normed, [projection(block.head)], rows.flat_logits)

    def _rotate(
        self,
        recording: Recording,
        memory: _Memory,
        heads: torch.Tensor,
        level: slice,
        attention: Any,
        slot: int | None,
    ) -> None:
        """Record norm and rotation of heads, and where to store keys and values, if anywhere."""
        config = self.block.drafter.config
        shape = (len(memory.tokens), level.stop - level.start, -1, config.head_dim)
        storage = Storage()
        if slot is not None:
            storage = Storage(self.block.storage[:, : len(memory.tokens)], slot)
        norms = attention.q_norm, attention.k_norm
        place = Place(self._angles, memory.seqlens, memory.depths[:, level])
        q_heads, eps = config.num_attention_heads, config.rms_norm_eps
        rotate(recording, heads.view(shape), q_heads, norms, eps, place, storage)


def _record_draw(
    recording: Recording, memory: _Memory, logits: torch.Tensor, below: slice, draw: Draw
) -> None:
    """Record that the next token of a chain is drawn."""
    chain = memory.tokens[:, : below.start]

    def step() -> None:
        memory.tokens[:, below] = draw(logits, chain)

    recording.python(step)


class _Memory:
    """A growing tree of every request, and what a level of it computes.

    Attributes
    ----------
    tokens, parents : Tensor, int64 [B, nodes]
    scores : Tensor, float32 [B, nodes]
        Log-probabilities of the nodes' paths.
    masks : Tensor, int64 [B, nodes, words]
        Which nodes each sees.
    depths : Tensor, int32 [1, nodes]
    seqlens : Tensor, int32 [B]
    rows : Tensor, int32 [B, window]
        Rows of the ring, the newest first.
    row_counts : Tensor, int32 [depth, B]
        How many of them are seen at each depth.
    flat : list of Tensor
        Of one level: residual stream, normed, queries keys and values, attended, inner of the MLP,
        logits, queries of cross attention; and log-sum-exps.
    """

    def __init__(self, block: DraftBlock, levels: tuple[int, ...], batch: int):
        config, nodes = block.drafter.config, sum(levels)
        self.tokens = torch.zeros(batch, nodes, dtype=torch.int64)
        self.parents = torch.full((batch, nodes), -1)
        self.scores = torch.zeros(batch, nodes)
        self.masks = torch.zeros(batch, nodes, -(-nodes // WORD_BITS), dtype=torch.int64)
        self.masks[:, 0, 0] = 1
        at = torch.arange(len(levels), dtype=torch.int32)
        self.depths = at.repeat_interleave(torch.tensor(levels))[None]
        self.seqlens = torch.empty(batch, dtype=torch.int32)
        self.rows = torch.empty(batch, block.window, dtype=torch.int32)
        self.row_counts = torch.empty(len(levels) - 1, batch, dtype=torch.int32)
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        width, attended = config.hidden_size, self.heads * self.head_dim
        qkv = attended + 2 * config.num_key_value_heads * self.head_dim
        widths = (
            width,
            width,
            qkv,
            attended,
            config.intermediate_size,
            config.vocab_size,
            attended,
        )
        self.flat = [block.storage.new_empty(batch * max(levels), n) for n in widths]
        self.flat.append(torch.empty(batch * max(levels), self.heads))


class _Rows:
    """The memory of one level, in the shapes that its kernels take."""

    def __init__(self, memory: _Memory, level: slice):
        batch, width = len(memory.tokens), level.stop - level.start
        self.x, self.normed, self.qkv, self.out, self.inner, self.flat_logits, self.queries, lse = (
            x[: batch * width] for x in memory.flat
        )
        by_head = (batch, width, -1, memory.head_dim)
        self.q = self.qkv.view(by_head)[:, :, : memory.heads]
        self.cross_q, self.attended = self.queries.view(by_head), self.out.view(by_head)
        self.lse, self.logits = lse.view(batch, width, -1), self.flat_logits.view(batch, width, -1)
