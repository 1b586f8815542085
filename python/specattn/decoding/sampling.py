"""The target's distribution: transformers' logits processors, for every node in its own context."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from specattn.acceptance import sample
from specattn.decoding.noise import PositionNoise
from specattn.decoding.sequences import Sequences
from specattn.tree import Tree

CONTEXT_FREE = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
"""Processors that look at the logits alone. All others are given each node's own context; one with
an attribute ``context_window`` is given no more than so many last tokens of it."""

LENGTH_ONLY = (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)
"""Processors that look at no more of a context than its length: they are shown one of that length,
so that a long text is not copied for every node."""

STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
"""Processors that remember earlier calls, and so cannot judge tokens that are not accepted yet."""

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Query(NamedTuple):
    """One call of a processor: which nodes [n] it is about, their rows [n], all rows' texts [R, L].

    Everything is int64.
    """

    request: torch.Tensor
    node: torch.Tensor
    row: torch.Tensor
    context: torch.Tensor


class Sampler:
    """The target's distribution of the next token, after temperature, filters and penalties.

    Plain decoding calls the processors once per token, with the text so far. Here they judge many
    nodes of a tree at once, each in the context of its own path, as if that
    path were already part of the text.

    Parameters
    ----------
    processors : LogitsProcessorList
        Functions of their arguments alone.
    do_sample : bool
        False: greedy, all probability is on the largest processed logit.
    sequences : Sequences
        The committed texts.
    seed : int
        Of the noise with which tokens are drawn.

    Raises
    ------
    ValueError
        A processor remembers earlier calls.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        do_sample: bool,
        sequences: Sequences,
        seed: int = 0,
    ):
        for processor in processors:
            if isinstance(processor, STATEFUL):
                raise ValueError(
                    f"{type(processor).__name__} remembers earlier calls: it cannot be used where "
                    "tokens are judged before they are accepted"
                )
        self.processors = processors
        self.greedy = not do_sample
        self.sequences = sequences
        self.noise = PositionNoise(seed)

    def scores(
        self,
        logits: torch.Tensor,
        tree: Tree,
        tokens: torch.Tensor,
        first: int | torch.Tensor = 0,
    ) -> torch.Tensor:
        """Return the processed logits of nodes ``first, first + 1, ...`` of a tree.

        Parameters
        ----------
        logits : Tensor [B, n, V]
            Of the target after each of these nodes.
        tree : Tree
            With ``first + n`` nodes or more. The root is the last committed token.
        tokens : Tensor, int64 [B, nodes]
            Only those on the paths to the n nodes are read.
        first : int, or Tensor, integer [B]

        Returns
        -------
        Tensor, float32 [B, n, V]
        """
        scores, contexts = logits.float(), dict[tuple[int | None, bool], list[_Query]]()
        if isinstance(first, int):
            first = torch.full((len(logits),), first, device=logits.device)
        for processor in self.processors:
            if type(processor) in CONTEXT_FREE:
                scores = processor(None, scores.flatten(0, 1)).unflatten(0, scores.shape[:2])
                continue
            needs = getattr(processor, "context_window", None), type(processor) in LENGTH_ONLY
            if needs not in contexts:  # the same texts for every processor
                span = (first.tolist(), logits.shape[1])
                contexts[needs] = list(self._in_context(tree, tokens, span, *needs))
            before, scores = scores, torch.empty_like(scores)
            for request, node, row, context in contexts[needs]:
                queries = scores.new_zeros(len(context), scores.shape[-1])
                queries[row] = before[request, node - first[request]]
                scores[request, node - first[request]] = processor(context, queries)[row]
        return scores

    def draw(
        self, logits: torch.Tensor, tree: Tree, tokens: torch.Tensor, first: int | torch.Tensor
    ) -> torch.Tensor:
        """Draw the token after each of the last nodes of a chain; arguments as for `scores`.

        With the noise of its position: what `next_token` draws there, where the logits are the
        same.

        Returns
        -------
        Tensor, int64 [B, n]
            -1 where nothing can follow: all logits are -inf, or one is NaN.
        """
        scores = self.scores(logits, tree, tokens, first)
        if not self.greedy:
            firsts = [first] * len(scores) if isinstance(first, int) else first.tolist()
            noise = self._noise_behind(firsts, scores.shape[1], scores)
            scores = scores.softmax(-1).double() / noise
        best, drawn = scores.max(-1)
        return drawn.masked_fill(best.isnan() | (best == -torch.inf), -1)

    def sample(
        self,
        logits: torch.Tensor,
        tree: Tree,
        tokens: torch.Tensor,
        first: int | torch.Tensor,
        generator: torch.Generator | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample a draft by itself, for the rejection rule; arguments as for `scores`.

        Returns
        -------
        tokens : Tensor, int64 [B, n]
        probs : Tensor, float32 [B, n, V], or None if greedy
            The distribution that was sampled.
        """
        scores = self.scores(logits, tree, tokens, first)
        if self.greedy:
            return scores.argmax(-1), None
        probs = scores.softmax(-1)
        return sample(probs, generator=generator), probs

    def next_token(self, logits: torch.Tensor, emitted: torch.Tensor) -> torch.Tensor:
        """Draw the token that follows the committed texts and `emitted` tokens behind them.

        Parameters
        ----------
        logits : Tensor [B, V]
        emitted : Tensor, int64 [B, n]

        Returns
        -------
        Tensor, int64 [B]
            As `draw` returns it.
        """
        chain = _chain(emitted.shape[1], logits.device)
        tokens = pad(emitted, (1, 0))  # the root is committed and not looked at
        return self.draw(logits[:, None], chain, tokens, emitted.shape[1])[:, 0]

    def _noise_behind(self, firsts: Sequence[int], count: int, like: torch.Tensor) -> torch.Tensor:
        """Return the noise of the tokens after `count` nodes of each chain: float64 [B, n, V]."""
        sequences = self.sequences
        lengths = sequences.active_lengths
        rows = [row for row in sequences.active for _ in range(count)]
        positions = [
            length + first + step
            for length, first in zip(lengths, firsts, strict=True)
            for step in range(count)
        ]
        noise = self.noise.at(rows, positions, like.shape[-1], like.device)
        return noise.unflatten(0, (len(lengths), count))

    def _in_context(
        self,
        tree: Tree,
        tokens: torch.Tensor,
        span: tuple[list[int], int],
        window: int | None,
        length_only: bool,
    ) -> Iterator[_Query]:
        """Yield the contexts that a processor is called with, nodes of equally long ones together.

        A processor may hold data per row of the original batch, so each call shows it that whole
        batch, every row in its place; the other rows show their beginning, and their results are
        dropped.

        Without a window a text is all of its row, padding included, as transformers shows it. A
        window shows the last tokens and no padding, and costs the same however long the text is.
        With `length_only` the tokens are any.
        """
        sequences, active, device = self.sequences, self.sequences.active, tokens.device
        committed = [sequences.ends[row] for row in active]
        shown = [
            committed[request] - (0 if window is None else sequences.padding[row])
            for request, row in enumerate(active)
        ]
        paths = tree.paths.expand(len(active), -1, -1)
        levels = _depths(tree, len(active))
        for width, pairs in _calls(levels, shown, span, window):
            request, node = torch.tensor(pairs, device=device).unbind(1)
            row = torch.tensor([active[r] for r, _ in pairs], device=device)
            if length_only:
                yield _Query(request, node, row, sequences.padded_rows[:, :width])
                continue
            end = torch.tensor([committed[r] + levels[r][n] for r, n in pairs], device=device)
            column = end[:, None] - width + torch.arange(width, device=device)
            level = (
                column - torch.tensor([committed[r] - 1 for r, _ in pairs], device=device)[:, None]
            )
            drafted = paths[request, node].gather(1, level.clamp_min(0))
            context = sequences.padded_rows[:, :width].clone()
            context[row] = torch.where(
                level > 0,
                tokens[request[:, None], drafted],
                sequences.padded_rows[row[:, None], column],
            )
            yield _Query(request, node, row, context)


@lru_cache(maxsize=64)
def _chain(n: int, device: torch.device) -> Tree:
    return Tree.chain(n, device=device)


@lru_cache(maxsize=64)
def _depths(tree: Tree, batch: int) -> list[list[int]]:
    """Return the depth of every request's nodes; methods use few trees, and use them again."""
    return tree.depths.expand(batch, -1).tolist()


def _calls(
    depths: Sequence[Sequence[int]],
    lengths: Sequence[int],
    span: tuple[Sequence[int], int],
    window: int | None,
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Gather nodes whose contexts are equally long, at most one of each request to a call.

    `span` gives each request's first node and how many nodes follow. Yields
    the contexts' length, at most `window`, and the (request, node) pairs of each call.
    """
    firsts, count = span
    calls = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for request, (first, levels, length) in enumerate(zip(firsts, depths, lengths, strict=True)):
        siblings = Counter[int]()
        for node, level in enumerate(levels[first : first + count], start=first):
            width = length + level if window is None else min(length + level, window)
            calls[width, siblings[width]].append((request, node))
            siblings[width] += 1
    for (length, _), nodes in calls.items():
        yield length, nodes
