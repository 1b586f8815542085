"""transformers' logits processors, called for every node of a tree in its own context."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from specattn.decoding.text.node_processors import LENGTH_ONLY, NodeProcessors, knows_rows
from specattn.decoding.text.sequences import Sequences
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

STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
"""Processors that remember earlier calls, and so cannot judge tokens that are not accepted yet."""

Processor = Callable[..., torch.Tensor]


Pair = tuple[int, int]
"""A request of the running batch, and a node of its tree."""


class _Query(NamedTuple):
    """One call of a processor.

    `place` [n] says which nodes it is about, by their places in the list of all that are asked
    about, `row` [n] of which rows they are, and `context` [R, L] shows a text for every row.
    Everything is int64.
    """

    place: torch.Tensor
    row: torch.Tensor
    context: torch.Tensor


class ContextualProcessors:
    """The processors of a run, for nodes of drafted trees.

    Plain decoding calls the processors once per token, with the text so far. Here they judge many
    nodes of a tree at once, each in the context of its own path, as if that path were already part
    of the text.

    Parameters
    ----------
    processors : LogitsProcessorList, or one for each row
        Functions of their arguments alone: of a text, of its row's number, and of scores.
    sequences : Sequences
        The committed texts.

    Attributes
    ----------
    by_node : list of NodeProcessors, or None
        Each row's processors for one node at a time: on the CPU, unless one knows rows.

    Raises
    ------
    ValueError
        A processor remembers earlier calls.
    """

    def __init__(
        self,
        processors: LogitsProcessorList | Sequence[LogitsProcessorList],
        sequences: Sequences,
    ):
        per_row = bool(processors) and all(isinstance(one, list) for one in processors)
        self.processors: list[Any] = (
            list(processors) if per_row else [processors] * len(sequences.padded_rows)
        )
        for processor in itertools.chain.from_iterable(self.processors):
            if isinstance(processor, STATEFUL):
                raise ValueError(
                    f"{type(processor).__name__} remembers earlier calls: it cannot be used where "
                    "tokens are judged before they are accepted"
                )
        self.sequences = sequences
        self.by_node: list[NodeProcessors] | None = None
        texts_alone = len(self.processors) == 1 or not any(
            knows_rows(processor)
            for processor in itertools.chain.from_iterable(self.processors)
            if type(processor) not in CONTEXT_FREE
        )
        if sequences.padded_rows.device.type == "cpu" and texts_alone:
            self.by_node = [
                NodeProcessors(own, CONTEXT_FREE, sequences, row)
                for row, own in enumerate(self.processors)
            ]

    def __call__(
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
            Unprocessed for nodes that cannot occur, where a processor looks at texts: see `_Walk`.
        """
        scores = logits.float()
        count = logits.shape[1]
        for processors, requests in self._groups():
            own = scores if len(requests) == len(scores) else scores[requests]
            if all(type(processor) in CONTEXT_FREE for processor in processors):
                flat = own.flatten(0, 1)
                for processor in processors:
                    flat = processor(None, flat)
                own = flat.unflatten(0, own.shape[:2])
                if len(requests) == len(scores):
                    return own
                scores = scores.index_copy(0, torch.tensor(requests, device=scores.device), own)
                continue
            begins = first.tolist() if isinstance(first, torch.Tensor) else [first] * len(scores)
            path = _Walk(self.sequences, tree, tokens, begins, count)
            if scores.data_ptr() == logits.data_ptr():
                scores = scores.clone()
            for pairs in path.levels(requests, scores):
                place = torch.tensor(pairs, device=scores.device)
                request, node = place.unbind(1)
                column = node - torch.tensor([begins[r] for r, _ in pairs], device=scores.device)
                asked = self._processed(processors, scores[request, column], tree, tokens, pairs)
                scores[request, column] = asked
        return scores

    def _groups(self) -> list[tuple[Sequence[Processor], list[int]]]:
        """Return the running requests that share processors, together."""
        groups = dict[int, tuple[Sequence[Processor], list[int]]]()
        for request, row in enumerate(self.sequences.active):
            own = self.processors[row]
            groups.setdefault(id(own), (own, []))[1].append(request)
        return list(groups.values())

    def _processed(
        self,
        processors: Sequence[Processor],
        scores: torch.Tensor,
        tree: Tree,
        tokens: torch.Tensor,
        pairs: list[Pair],
    ) -> torch.Tensor:
        """Return the processed `scores` [n, V] of the n nodes `pairs`."""
        contexts = dict[tuple[int | None, bool], list[_Query]]()
        for processor in processors:
            if type(processor) in CONTEXT_FREE:
                scores = processor(None, scores)
                continue
            needs = getattr(processor, "context_window", None), type(processor) in LENGTH_ONLY
            if needs not in contexts:  # the same texts for every processor
                contexts[needs] = list(self._in_context(tree, tokens, pairs, *needs))
            before, scores = scores, torch.empty_like(scores)
            for place, row, context in contexts[needs]:
                if isinstance(processor, PrefixConstrainedLogitsProcessor):
                    scores[place] = _constrained(processor, row)(context[row], before[place])
                    continue
                queries = scores.new_zeros(len(context), scores.shape[-1])
                queries[row] = before[place]
                scores[place] = processor(context, queries)[row]
        return scores

    def _in_context(
        self,
        tree: Tree,
        tokens: torch.Tensor,
        pairs: list[Pair],
        window: int | None,
        length_only: bool,
    ) -> Iterator[_Query]:
        """Yield the contexts that a processor is called with, nodes of equally long ones together.

        A processor may hold data per row of the original batch, so each call shows it as many rows,
        each in its place. Rows that nobody asks about show the text of one that somebody does, and
        their results are dropped.

        Without a window a text is all of its row, with the padding that transformers has been given
        before it. A window shows the last tokens and no padding, and costs the same however long
        the text is. With `length_only` the tokens are any.
        """
        sequences, active, device = self.sequences, self.sequences.active, tokens.device
        levels, paths = _depths(tree, len(active)), tree.paths.expand(len(active), -1, -1)
        for width, places in _calls(sequences, levels, pairs, window):
            asked = [pairs[place] for place in places]
            place = torch.tensor(places, device=device)
            request, node = torch.tensor(asked, device=device).unbind(1)
            row = torch.tensor([active[r] for r, _ in asked], device=device)
            if length_only:
                yield _Query(place, row, sequences.padded_rows[:, :width])
                continue
            committed = torch.tensor([sequences.ends[active[r]] for r, _ in asked], device=device)
            depth = torch.tensor([levels[r][n] for r, n in asked], device=device)
            column = (committed + depth - width)[:, None] + torch.arange(width, device=device)
            level = column - committed[:, None] + 1
            drafted = paths[request, node].gather(1, level.clamp_min(0))
            texts = torch.where(
                level > 0,
                tokens[request[:, None], drafted],
                sequences.padded_rows[row[:, None], column],
            )
            context = texts[:1].repeat(len(sequences.padded_rows), 1)
            context[row] = texts
            yield _Query(place, row, context)


class _Walk:
    """Goes down the trees of a batch, level by level, and leaves out what cannot occur.

    That is what follows a token that the processors forbid, a token that ends the text, or more
    tokens than may come. Processors may refuse such texts, and plain decoding never shows any.

    Parameters
    ----------
    sequences : Sequences
    tree, tokens
        As for `ContextualProcessors.__call__`.
    begins : list of int
        Each request's first node that is scored.
    count : int
        Nodes of each request that are scored.
    """

    def __init__(
        self, sequences: Sequences, tree: Tree, tokens: torch.Tensor, begins: list[int], count: int
    ):
        batch, self.begins, self.count = len(tokens), begins, count
        self.tokens, self.depths = tokens.tolist(), _depths(tree, batch)
        self.parents = _parents(tree, batch)
        self.drafts = [sequences.drafts(row) for row in sequences.active]
        self.ends = [sequences.end_tokens(row) for row in sequences.active]

    def levels(self, requests: list[int], scores: torch.Tensor) -> Iterator[list[Pair]]:
        """Yield the nodes of each level that can occur, by the processed `scores` of those above.

        Parameters
        ----------
        requests : list of int
        scores : Tensor [B, count, V]
            Those of a level are there when the next one is asked for.
        """
        possible = {(request, 0) for request in requests}
        deepest = max(max(self.depths[request]) for request in requests)
        for level in range(deepest + 1):
            if level:
                possible |= self._children(requests, level, possible, scores)
            pairs = [
                (request, node)
                for request, node in sorted(possible)
                if self.depths[request][node] == level and self._is_scored(request, node)
            ]
            if pairs:
                yield pairs

    def _children(
        self, requests: list[int], level: int, possible: set[Pair], scores: torch.Tensor
    ) -> set[Pair]:
        """Return the nodes at `level` that can occur."""
        children = {
            (request, node)
            for request in requests
            if level <= self.drafts[request]
            for node in range(1, self.begins[request] + self.count)
            if self.depths[request][node] == level
            and (request, self.parents[request][node]) in possible
            and self.tokens[request][node] >= 0
            and self.tokens[request][node] not in self.ends[request]
        }
        judged = [pair for pair in children if self._is_scored(pair[0], self._parent(pair))]
        if not judged:
            return children
        at = [(r, self._parent((r, n)) - self.begins[r], self.tokens[r][n]) for r, n in judged]
        allowed = scores[torch.tensor(at, device=scores.device).unbind(1)] > -torch.inf
        forbidden = (pair for pair, kept in zip(judged, allowed.tolist(), strict=True) if not kept)
        return children.difference(forbidden)

    def _parent(self, pair: Pair) -> int:
        return self.parents[pair[0]][pair[1]]

    def _is_scored(self, request: int, node: int) -> bool:
        return 0 <= node - self.begins[request] < self.count


def _constrained(
    processor: PrefixConstrainedLogitsProcessor, row: torch.Tensor
) -> PrefixConstrainedLogitsProcessor:
    """Return the processor for a batch of these rows alone: its function knows rows by number."""
    allowed, rows = processor._prefix_allowed_tokens_fn, row.tolist()
    return PrefixConstrainedLogitsProcessor(lambda n, text: allowed(rows[n], text), num_beams=1)


@lru_cache(maxsize=64)
def _depths(tree: Tree, batch: int) -> list[list[int]]:
    """Return the depth of every request's nodes; methods use few trees, and use them again."""
    return tree.depths.expand(batch, -1).tolist()


@lru_cache(maxsize=64)
def _parents(tree: Tree, batch: int) -> list[list[int]]:
    """Return the parent of every request's nodes."""
    return tree.parents.expand(batch, -1).tolist()


def _calls(
    sequences: Sequences, depths: list[list[int]], pairs: list[Pair], window: int | None
) -> Iterator[tuple[int, list[int]]]:
    """Gather nodes whose contexts are equally long, at most one of each request to a call.

    Yields the contexts' length, at most `window`, and the places in `pairs` of each call's nodes.
    """
    calls, siblings = defaultdict[Pair, list[int]](list), Counter[Pair]()
    for place, (request, node) in enumerate(pairs):
        row = sequences.active[request]
        width = sequences.ends[row] + depths[request][node]
        if window is not None:
            width = min(width - sequences.padding[row], window)
        calls[width, siblings[request, width]].append(place)
        siblings[request, width] += 1
    for (width, _), places in calls.items():
        yield width, places
