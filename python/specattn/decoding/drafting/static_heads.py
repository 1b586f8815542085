"""Decoding heads by kernel calls alone: their matrices, and the target's head for all at once."""

from __future__ import annotations

import torch

import specattn._cpu as _cpu
from specattn.decoding.drafting.static_drafting import projection
from specattn.decoding.passes.recording import Recording
from specattn.decoding.passes.static_pass import StaticPass
from specattn.drafters import MedusaHeads, TokenSwiftHeads
from specattn.reference.tree_mask import WORD_BITS


class StaticHeads:
    """The first heads of a drafter, recorded for every number of requests and of heads.

    Parameters
    ----------
    heads : MedusaHeads or TokenSwiftHeads
    static : StaticPass
        Of the target that they draft for.
    """

    def __init__(self, heads: MedusaHeads | TokenSwiftHeads, static: StaticPass):
        self.heads, self._head = heads, static.parts.head
        self._recordings: dict[tuple[int, int, int], tuple[_Memory, Recording]] = {}

    def logits(self, features: torch.Tensor, count: int) -> torch.Tensor:
        """Return the logits [B, count, V] of heads for features [B, H], until the next call."""
        return self._run(features, count, 0).logits.transpose(0, 1)

    def best(
        self, features: torch.Tensor, count: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first guesses of heads and their log-probabilities, until the next call.

        Parameters
        ----------
        features : Tensor [B, H]
        count, width : int
            Heads, and guesses of each.

        Returns
        -------
        tokens : Tensor, int64 [B, count, width]
        scores : Tensor, float32 [B, count, width]
            Descending.
        """
        memory = self._run(features, count, width)
        return memory.tokens.transpose(0, 1), memory.scores.transpose(0, 1)

    def _run(self, features: torch.Tensor, count: int, width: int) -> _Memory:
        key = (len(features), count, width)
        memory, recording = self._recordings.get(key, (None, None))
        memory = memory or _Memory(features, count, width, len(self._head.weight))
        memory.features.copy_(features)
        if recording is not None:
            recording.replay()
            return memory
        recording = Recording()
        self._record(recording, memory)
        self._recordings[key] = memory, recording
        return memory

    def _record(self, recording: Recording, memory: _Memory) -> None:
        above = memory.features
        for linear, hidden in zip(self.heads.linears, memory.hidden, strict=False):
            if isinstance(self.heads, TokenSwiftHeads):
                recording.product(above, [projection(linear)], hidden, residual=above)
                above = hidden
            else:
                layer = (*projection(linear), None, "silu")
                recording.kernel(_cpu.linear_few_rows, above, *layer, above, hidden)
        rows, logits = memory.hidden.flatten(0, 1), memory.logits.flatten(0, 1)
        recording.product(rows, [self._head], logits)
        if memory.tokens.numel():
            best = [x.flatten(0, 1) for x in (memory.tokens, memory.scores, memory.parents)]
            nodes = (logits[:, None], memory.no_scores, memory.masks, 0)
            recording.kernel(_cpu.best_children, *nodes, *best, memory.best_masks)


class _Memory:
    """What heads compute, the first head of all requests first.

    Attributes
    ----------
    features : Tensor [B, H]
    hidden : Tensor [heads, B, H]
    logits : Tensor [heads, B, V]
    tokens, scores : Tensor [heads, B, width]
        The best of each.
    """

    def __init__(self, features: torch.Tensor, count: int, width: int, vocabulary: int):
        batch = len(features)
        self.features = torch.empty_like(features)
        self.hidden = features.new_empty(count, *features.shape)
        self.logits = features.new_empty(count, batch, vocabulary)
        self.tokens, self.parents = torch.zeros(2, count, batch, width, dtype=torch.int64)
        self.scores = torch.empty(count, batch, width)
        # Every row is the root of a tree of its own, of which nothing but its children matters.
        nodes, words = count * batch, width // WORD_BITS + 1
        self.no_scores = torch.zeros(nodes, 1)
        self.masks = torch.zeros(nodes, 1, words, dtype=torch.int64)
        self.best_masks = torch.zeros(nodes, width, words, dtype=torch.int64)
