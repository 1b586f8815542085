"""transformers' logits processors, asked about drafted tokens in the context of their own path."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers import generation as hf

from specattn.decoding.text.draws import uploaded
from specattn.decoding.text.node_processors import (
    CONTEXT_FREE,
    LENGTH_ONLY,
    NodeProcessors,
    knows_rows,
    temperature_of,
)
from specattn.decoding.text.sequences import Sequences
from specattn.tree import Tree

STATEFUL = (
    hf.SynthIDTextWatermarkLogitsProcessor,
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
"""Processors that remember earlier calls, and so cannot judge tokens that are not accepted yet."""


_Query = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""One call of a processor: nodes [n] by their places in a list, their rows [n], texts [R, L]."""


class ContextualProcessors:
    """The processors of a run, for tokens behind drafted paths.

    Plain decoding calls the processors once per token, with the text so far. Here they judge each
    node of a draft as if its path were part of the text, and no node that cannot occur: what
    follows a token that they forbid, an end token, or more tokens than may come. Processors may
    refuse such texts, and plain decoding never shows any. What other criteria end is not known
    here: they are asked once about each text, when it is emitted.

    They are functions of their arguments alone, of a text, its row's number and scores: one that
    remembers earlier calls raises ValueError. On the CPU, unless one knows rows, `by_node` has each
    row's processors for one node at a time. `temperatures` has what logits of a row are divided by
    where nothing else is done to them, else None; `sees_texts` says whether any looks at more than
    logits.
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
        every = list(itertools.chain.from_iterable(self.processors))
        for one in every:
            if isinstance(one, STATEFUL):
                raise ValueError(
                    f"{type(one).__name__} remembers earlier calls: it cannot be used where tokens "
                    "are judged before they are accepted"
                )
        self.sequences = sequences
        self.by_node: list[NodeProcessors] | None = None
        self.sees_texts = not all(type(one) in CONTEXT_FREE for one in every)
        self.temperatures = [temperature_of(own) for own in self.processors]
        texts_alone = len(self.processors) == 1 or not any(map(knows_rows, every))
        if sequences.padded_rows.device.type == "cpu" and texts_alone:
            self.by_node = [
                NodeProcessors(own, sequences, row) for row, own in enumerate(self.processors)
            ]

    def __call__(
        self,
        logits: torch.Tensor,
        tree: Tree,
        tokens: torch.Tensor,
        first: int | torch.Tensor = 0,
    ) -> torch.Tensor:
        """Return the processed logits [B, n, V] of nodes ``first, first + 1, ...``.

        In float32, or in float64 where a processor returns that.

        Of a chain `tokens`, int64 [B, nodes], are the first ``first + n`` or more, the root being
        the last committed token; a tree that branches, or one of each request, is judged whole and
        node by node. Where a processor looks at texts, nodes that cannot occur stay unprocessed.
        """
        if self.sees_texts and not tree.is_chain:
            return self._of_tree(logits, tree, tokens)
        firsts = first.tolist() if isinstance(first, torch.Tensor) else [first] * len(logits)
        return self._of_chain(logits.float(), tokens, firsts)

    def _of_tree(self, logits: torch.Tensor, tree: Tree, tokens: torch.Tensor) -> torch.Tensor:
        """Judge every node of a tree as the end of the chain that its path is."""
        scores, tokens = logits.float().clone(), tokens.clone()
        every = torch.arange(len(tokens), device=tokens.device)
        paths = tree.paths.expand(len(tokens), -1, -1).clamp_min(0)
        parents, valid, depths = (
            x.expand(len(tokens), -1) for x in (tree.parents.clamp_min(0), tree.valid, tree.depths)
        )
        for node in range(tree.size):
            if node:  # what its parent forbids cannot occur, nor anything behind it
                allowed = scores[every, parents[:, node], tokens[:, node]] > -torch.inf
                tokens[:, node].masked_fill_(~allowed, -1)
            chains, own = tokens.gather(1, paths[:, node]), logits[:, [node]].float()
            judged = self._of_chain(own, chains, depths[:, node].tolist())[:, 0]
            scores = _as_fine_as(scores, judged)
            scores[:, node] = torch.where(valid[:, node, None], judged, scores[:, node])
        return scores

    def _of_chain(
        self, scores: torch.Tensor, tokens: torch.Tensor, firsts: list[int]
    ) -> torch.Tensor:
        """Judge the last nodes of each request's chain, all requests at a time, step by step."""
        given, drafted = scores, None
        for processors, requests in self._groups():
            if all(type(processor) in CONTEXT_FREE for processor in processors):
                own = (scores if len(requests) == len(scores) else scores[requests]).flatten(0, 1)
                for processor in processors:
                    own = processor(None, own)
                own = own.unflatten(0, (len(requests), -1))
                if len(requests) == len(scores):
                    return own
                scores = scores.index_copy(0, uploaded(requests, scores.device), own)
                continue
            scores = scores.clone() if scores is given else scores
            drafted = self._write_behind(tokens) if drafted is None else drafted
            for step in range(scores.shape[1]):
                paths = {r: drafted[r][: firsts[r] + step] for r in requests}
                requests = self._that_occur(paths, scores[:, step - 1] if step else None)
                if not requests:
                    break
                active, ends = self.sequences.active, self.sequences.ends
                nodes = [(active[r], ends[active[r]] + len(paths[r])) for r in requests]
                judged = self._processed(processors, given[requests, step], nodes)
                scores = _as_fine_as(scores, judged)
                scores[requests, step] = judged.to(scores.dtype)
        return scores

    def _write_behind(self, tokens: torch.Tensor) -> list[list[int]]:
        """Write drafted chains behind the texts, where they mean nothing; return them."""
        sequences, room = self.sequences, self.sequences.padded_rows
        ends = [sequences.ends[row] for row in sequences.active]
        columns = torch.arange(min(tokens.shape[1] - 1, room.shape[1] - max(ends)), device="cpu")
        rows = (
            torch.tensor(sequences.active, device="cpu")[:, None],
            torch.tensor(ends, device="cpu")[:, None] + columns,
        )
        room[rows] = tokens[:, 1 : 1 + len(columns)]
        return tokens[:, 1:].tolist()

    def _that_occur(self, paths: dict[int, list[int]], before: torch.Tensor | None) -> list[int]:
        """Return the requests whose text goes on behind a path; `before` [B, V] judged its end."""
        rows = self.sequences.active
        going = [r for r, path in paths.items() if self.sequences.goes_on(rows[r], path)]
        if before is None or not going:
            return going
        allowed = before[going, [paths[r][-1] for r in going]] > -torch.inf
        return [r for r, kept in zip(going, allowed.tolist(), strict=True) if kept]

    def _groups(self) -> list[tuple[Sequence[Any], list[int]]]:
        """Return the running requests that share processors, together."""
        groups = dict[int, tuple[Sequence[Any], list[int]]]()
        for request, row in enumerate(self.sequences.active):
            own = self.processors[row]
            groups.setdefault(id(own), (own, []))[1].append(request)
        return list(groups.values())

    def _processed(
        self, processors: Sequence[Any], scores: torch.Tensor, nodes: list[tuple[int, int]]
    ) -> torch.Tensor:
        """Return the processed `scores` [n, V] of n nodes: of these rows, cut off at these ends."""
        contexts = dict[tuple[int | None, bool], list[_Query]]()
        for processor in processors:
            if type(processor) in CONTEXT_FREE:
                scores = processor(None, scores)
                continue
            needs = getattr(processor, "context_window", None), type(processor) in LENGTH_ONLY
            if needs not in contexts:  # the same texts for every processor
                contexts[needs] = list(self._in_context(nodes, *needs))
            found, order = [], []
            for place, row, context in contexts[needs]:
                order.append(place)
                if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
                    found.append(_constrained(processor, row)(context[row], scores[place]))
                    continue
                queries = scores.new_zeros(len(context), scores.shape[-1])
                queries[row] = scores[place]
                found.append(processor(context, queries)[row])
            # What a processor returns is what the next one gets, be it of another type.
            scores = torch.cat(found)[torch.cat(order).argsort()]
        return scores

    def _in_context(
        self, nodes: list[tuple[int, int]], window: int | None, length_only: bool
    ) -> Iterator[_Query]:
        """Yield the contexts that a processor is called with, nodes of equally long ones together.

        A processor may hold data per row of the original batch, so each call shows it as many rows,
        each in its place; rows that nobody asks about show another's text. Without a window a text
        is all of its row, padding included; with `length_only` the tokens are any.
        """
        room, widths = self.sequences.padded_rows, defaultdict[int, list[int]](list)
        for place, (row, end) in enumerate(nodes):
            length = end if window is None else min(end - self.sequences.padding[row], window)
            widths[length].append(place)
        for width, places in widths.items():
            asked = [(place, *nodes[place]) for place in places]
            which, rows, ends = torch.tensor(asked, device=room.device).unbind(1)
            context = room[:, :width]
            if not length_only:
                columns = ends[:, None] - width + torch.arange(width, device=room.device)
                texts = room[rows[:, None], columns]
                context = texts[:1].repeat(len(room), 1)
                context[rows] = texts
            yield which, rows, context


def _as_fine_as(scores: torch.Tensor, judged: torch.Tensor) -> torch.Tensor:
    """Return scores in a type that holds what processors have made of some."""
    return scores.to(torch.promote_types(scores.dtype, judged.dtype))


def _constrained(
    processor: hf.PrefixConstrainedLogitsProcessor, row: torch.Tensor
) -> hf.PrefixConstrainedLogitsProcessor:
    """Return the processor for a batch of these rows alone: its function knows rows by number."""
    allowed, rows = processor._prefix_allowed_tokens_fn, row.tolist()
    return hf.PrefixConstrainedLogitsProcessor(lambda n, text: allowed(rows[n], text), num_beams=1)
