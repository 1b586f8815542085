"""PosS drafted by kernel calls alone: all levels of a tree in one recording, catching up in one."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

import specattn._cpu as _cpu
from specattn.decoding.drafting.dynamic_tree import Candidates, places
from specattn.decoding.drafting.static_drafting import Place, Storage, add_mlp, projection, rotate
from specattn.decoding.methods.poss_block import SpecialistBlock
from specattn.decoding.passes.compiling import MOST_ROWS
from specattn.decoding.passes.recording import UNIFORM, Recording
from specattn.decoding.passes.static_pass import StaticPass
from specattn.reference.tree_mask import WORD_BITS

_MOST_PARTS = 3  # weights that one product takes


class StaticSpecialists:
    """Grows trees in the memory of a `SpecialistBlock`, and catches up, by the same equations.

    Parameters
    ----------
    block : SpecialistBlock
    static : StaticPass
        Of the block's target.
    """

    def __init__(self, block: SpecialistBlock, static: StaticPass):
        self.block, self._embedding, self._head = block, static.parts.embedding, static.parts.head
        self._angles = static.angles[""]  # a drafter's rope is its target's
        self._attentions: list[Any] = [own.attention for own in block.drafter.specialists]
        self._trees: dict[tuple[int, int, int], tuple[_Memory, Recording]] = {}
        self._rows = _rows(block, MOST_ROWS)
        self._paths: dict[tuple[int, int], tuple[_Path, Recording]] = {}

    def grow(self, root: torch.Tensor, width: int, depth: int) -> Candidates:
        """Return what EAGLE-2 scores behind `root`, int64 [B], as `DynamicTree` does."""
        block, key = self.block, (len(root), width, depth)
        memory, recording = self._trees.get(key, (None, None))
        memory = memory or _Memory(block, *key)
        torch.sub(block.target.cache.seqlens, 1, out=memory.pairs).clamp_min_(0)
        memory.of(1).x.copy_(block.root[:, 0])
        if recording is None:
            recording = Recording()
            for level in range(depth):
                self._record_level(recording, memory, level)
            self._trees[key] = memory, recording
        else:
            recording.replay()
        above = (memory.chosen + memory.before).index_select(1, memory.parent_of)
        drafted = (memory.candidates.clone(), memory.candidate_scores.clone(), above)
        return Candidates(root, *drafted, memory.places, depth, width)

    def remember(
        self, tokens: torch.Tensor, features: torch.Tensor, start: torch.Tensor, steps: torch.Tensor
    ) -> torch.Tensor:
        """Store keys and values of pairs of the text under all specialists; return them fused.

        Parameters
        ----------
        tokens : Tensor, int64 [B, T]
            At most `MOST_ROWS` in all.
        features : Tensor [B, T, H]
        start : Tensor, int64 [B]
            Position of the first pair; all are stored in one row from there on.
        steps : Tensor, int64 [B, T]
            How far behind that each lies.

        Returns
        -------
        Tensor [B, T, H]
            Until the next call.
        """
        batch, count = tokens.shape
        rows = _Rows(*(x[: tokens.numel()] for x in self._rows))
        path, recording = self._paths.get((batch, count), (None, None))
        path = path or _Path(torch.empty_like(tokens), start.int(), steps.int())
        for own, given in zip(path, (tokens, start, steps), strict=True):
            own.copy_(given)
        embeds, before = rows.pairs.chunk(2, 1)
        before.copy_(features.flatten(0, 1))
        if recording is None:
            recording = Recording()
            recording.kernel(_cpu.embed, path.tokens, self._embedding, embeds)
            self._fuse(recording, rows)
            place = Place(self._angles, path.start, path.steps)
            layers = list(range(len(self._attentions)))
            self._store(recording, rows, layers, place, self.block.text, None)
            self._paths[batch, count] = path, recording
        else:
            recording.replay()
        return rows.x.unflatten(0, (batch, count))

    def _record_level(self, recording: Recording, memory: _Memory, depth: int) -> None:
        """Run one level of a tree, and choose the nodes of the next."""
        kernel, level = recording.kernel, memory.levels[depth]
        nodes = level.stop - level.start
        rows = memory.of(nodes)
        if depth:
            embeds, before = rows.pairs.chunk(2, 1)
            above = memory.levels[depth - 1]
            kernel(_cpu.embed, memory.tokens[:, level], self._embedding, embeds)
            kernel(_cpu.embed, memory.rows[:, level], memory.of(above.stop - above.start).x, before)
            self._fuse(recording, rows)
        self._run_specialist(recording, memory, rows, depth)
        logits = memory.logits[: len(rows.x)]
        recording.product(rows.x, [self._head], logits)

        found = memory.candidate_levels[depth]
        scored = memory.candidates[:, found], memory.candidate_scores[:, found]
        unused = [x[:nodes] for x in memory.unused]
        for b, own in enumerate(logits.view(len(memory.pairs), nodes, 1, -1)):
            tokens, scores = (x[b].view(nodes, -1) for x in scored)
            above_each = (memory.scores[b, level, None], memory.no_masks[:nodes], 0)
            kernel(_cpu.best_children, own, *above_each, tokens, scores, *unused)
        if depth + 1 < len(memory.levels):
            below = memory.levels[depth + 1]
            next_level = (memory.chosen, memory.tokens, memory.scores, memory.rows, memory.masks)
            best = [x[:, below] for x in next_level]
            kernel(_cpu.expand_best, *scored, memory.masks[:, level], below.start, *best)

    def _run_specialist(
        self, recording: Recording, memory: _Memory, rows: _Rows, depth: int
    ) -> None:
        """Record a level's specialist on ``rows.x``, which becomes the drafted features."""
        block, drafter, level = self.block, self.block.drafter, memory.levels[depth]
        config, batch = drafter.config, len(memory.pairs)
        layer, q_heads = config.specialist_at(depth), config.num_attention_heads
        eps = config.rms_norm_eps
        deepest = config.specialist_at(len(memory.levels) - 1)
        place = Place(self._angles, memory.pairs, memory.depths[:, level])
        deeper = list(range(layer + 1, deepest + 1))
        self._store(recording, rows, deeper, place, block.tree, level.start)
        attention, specialist = self._attentions[layer], drafter.specialist_at(depth)
        projections = [projection(attention.q_proj), projection(attention.kv_proj)]
        recording.product(rows.x, projections, rows.heads)
        shape = (batch, level.stop - level.start, -1, config.head_dim)
        heads, out = rows.heads.view(shape), rows.out.view(shape)
        text, tree = (x[layer, :, :batch] for x in (block.text, block.tree))
        norms = (attention.q_norm, attention.k_norm)
        rotate(recording, heads, q_heads, norms, eps, place, Storage(tree, level.start))
        seen = memory.masks[:, level, : -(-level.stop // WORD_BITS)]
        read = (*text, memory.pairs, *tree[:, :, : level.stop], seen, place.depths, None)
        scale = (block.window, config.head_dim**-0.5, 0.0, None)
        state = (out, rows.lse.view(shape[:-1]))
        q = heads[:, :, :q_heads]
        recording.kernel(_cpu.hybrid_tree_attention, q, *read, *scale, *UNIFORM, *state)
        recording.product(rows.out, [projection(attention.o_proj)], rows.x, residual=rows.x)
        add_mlp(recording, specialist, specialist.norm, eps, rows.x, rows)
        if (norm := specialist.output_norm) is not None:
            recording.kernel(_cpu.rms_norm, rows.x, norm.weight, eps, rows.x)

    def _fuse(self, recording: Recording, rows: _Rows) -> None:
        """Record that pairs become ``rows.x``."""
        drafter = self.block.drafter
        if (norm := drafter.fc_norm) is not None:
            before = rows.pairs.chunk(2, 1)[1]
            recording.kernel(_cpu.rms_norm, before, norm.weight, norm.eps, before)
        recording.product(rows.pairs, [projection(drafter.fc)], rows.x)

    def _store(
        self,
        recording: Recording,
        rows: _Rows,
        layers: list[int],
        place: Place,
        storage: torch.Tensor,
        slot: int | None,
    ) -> None:
        """Record that keys and values of ``rows.x`` under specialists are stored."""
        config, batch = self.block.drafter.config, len(place.prefix)
        heads = 2 * config.num_key_value_heads
        for first in range(0, len(layers), _MOST_PARTS):
            group = layers[first : first + _MOST_PARTS]
            found = rows.keys_and_values[:, : len(group) * heads * config.head_dim]
            parts = [projection(self._attentions[layer].kv_proj) for layer in group]
            recording.product(rows.x, parts, found)
            each = found.unflatten(1, (len(group), heads, -1)).unflatten(0, (batch, -1)).unbind(2)
            for layer, own in zip(group, each, strict=True):
                norms, to = (None, self._attentions[layer].k_norm), storage[layer, :, :batch]
                rotate(recording, own, 0, norms, config.rms_norm_eps, place, Storage(to, slot))


class _Path(NamedTuple):
    """What changes between paths of one shape: as `StaticSpecialists.remember` takes it, int32."""

    tokens: torch.Tensor
    start: torch.Tensor
    steps: torch.Tensor


class _Rows(NamedTuple):
    """What pairs become, one row each.

    Attributes
    ----------
    pairs : Tensor [n, 2 H]
        Embedding of the token and the feature before it.
    x : Tensor [n, H]
        Pairs fused; then the specialist's residual stream, and at last the drafted features.
    normed, heads, keys_and_values, out, inner, lse : Tensor [n, ...]
        What is between: of the layer's own specialist, and of the others keys and values.
    """

    pairs: torch.Tensor
    x: torch.Tensor
    normed: torch.Tensor
    heads: torch.Tensor
    keys_and_values: torch.Tensor
    out: torch.Tensor
    inner: torch.Tensor
    lse: torch.Tensor


def _rows(block: SpecialistBlock, count: int) -> _Rows:
    """Return room for `count` rows; memory that no level touches is none."""
    config = block.drafter.config
    width, out = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = 2 * config.num_key_value_heads * config.head_dim
    parts = min(_MOST_PARTS, config.layers) * kv
    widths = (2 * width, width, width, out + kv, parts, out, config.intermediate_size)
    found = [block.text.new_empty(count, n) for n in widths]
    return _Rows._make([*found, torch.empty(count, config.num_attention_heads)])


class _Memory:
    """A growing tree of every request, all candidates that were scored for it, and one level.

    Attributes
    ----------
    levels, candidate_levels : list of slice
        Which of the nodes, and of the candidates, each level has.
    tokens, rows, chosen : Tensor, int64 [B, nodes]
        Of the nodes that are expanded, the root first; `rows` is where in the level above each
        one's parent lies, all requests together, and `chosen` which of a level's candidates it was.
    scores : Tensor, float32 [B, nodes]
    masks : Tensor, int64 [B, nodes, words]
    depths : Tensor, int32 [1, nodes]
    pairs : Tensor, int32 [B]
        Pairs of the text before the root's.
    candidates, candidate_scores : Tensor [B, nodes * children]
    before : Tensor, int64 [nodes]
        Candidates of the levels before those that a node was chosen of; so ``chosen + before``
        numbers them all, -1 is the root.
    parent_of : Tensor, int64 [nodes * children]
        Node that each candidate continues.
    """

    def __init__(self, block: SpecialistBlock, batch: int, width: int, depth: int):
        vocabulary = block.drafter.config.vocab_size
        children, sizes = min(width, vocabulary), [1]
        while len(sizes) < depth:
            sizes.append(min(width, sizes[-1] * children))
        ends = [0, *accumulate(sizes)]
        self.levels = [slice(*pair) for pair in pairwise(ends)]
        self.candidate_levels = [slice(a * children, b * children) for a, b in pairwise(ends)]
        nodes, words = ends[-1], -(-ends[-1] // WORD_BITS)
        self.tokens, self.rows, self.chosen = torch.zeros(3, batch, nodes, dtype=torch.int64)
        self.scores = torch.zeros(batch, nodes)
        self.masks = torch.zeros(batch, nodes, words, dtype=torch.int64)
        self.masks[:, 0, 0] = 1
        self.depths = torch.arange(depth).repeat_interleave(torch.tensor(sizes)).int()[None]
        self.pairs = torch.zeros(batch, dtype=torch.int32)
        self.candidates = torch.zeros(batch, nodes * children, dtype=torch.int64)
        self.candidate_scores = torch.zeros(batch, nodes * children)
        offsets = [-1, *(level.start for level in self.candidate_levels)]
        self.before = torch.tensor(offsets[:depth]).repeat_interleave(torch.tensor(sizes))
        self.parent_of = torch.arange(nodes).repeat_interleave(children)
        self.places = places(sizes, children)
        self._flat = _rows(block, batch * max(sizes))
        self.logits = block.text.new_empty(batch * max(sizes), vocabulary)
        # A node's children are found as those of a root: what is said beside them means nothing.
        most, bits = max(sizes), children // WORD_BITS + 1
        self.no_masks = torch.zeros(most, 1, bits, dtype=torch.int64)
        self.unused = (
            torch.zeros(most, children, dtype=torch.int64),
            torch.zeros(most, children, bits, dtype=torch.int64),
        )

    def of(self, nodes: int) -> _Rows:
        """Return the rows of a level of so many nodes."""
        return _Rows(*(x[: nodes * len(self.pairs)] for x in self._flat))
