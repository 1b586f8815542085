"""The target's distribution of the next token, and how tokens are drawn from it.

A token is the argmax of its scores plus Gumbel noise, which follows from (seed, request, position)
alone. So a text does not depend on what was drafted, on a clock or on how often randomness was used
before; and a draft that is drawn with the same noise is the target's own token where their
distributions are close (`specattn.add_gumbel_noise`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specattn.acceptance import Accepted, accept, sample, walk
from specattn.blocks import Drawing
from specattn.decoding.text.draws import (
    CopiedReport,
    Draws,
    Outcome,
    Report,
    draw_and_walk,
    report_of,
    signed,
    uploaded,
)
from specattn.decoding.text.processors import ContextualProcessors
from specattn.decoding.text.sequences import Sequences
from specattn.ops import add_gumbel_noise
from specattn.stock import Stock
from specattn.tree import Tree


class Sampler:
    """The target's distribution of the next token, after temperature, filters and penalties.

    Parameters
    ----------
    processors, sequences
        As for `ContextualProcessors`.
    do_sample : bool
        False: greedy, all probability is on the largest processed logit.
    seed : int
        Of the noise with which tokens are drawn.

    Attributes
    ----------
    scores : ContextualProcessors
        ``scores(logits, tree, tokens, first)``: the processed logits of nodes of a tree.

    Raises
    ------
    ValueError
        A processor remembers earlier calls.
    """

    def __init__(
        self,
        processors: LogitsProcessorList | Sequence[LogitsProcessorList],
        do_sample: bool,
        sequences: Sequences,
        seed: int = 0,
    ):
        self.scores = ContextualProcessors(processors, sequences)
        self.sequences, self.greedy = sequences, not do_sample
        self.seed = seed
        self._report_for = cache(_reports)

    def draw(
        self, logits: torch.Tensor, tree: Tree, tokens: torch.Tensor, first: int | torch.Tensor
    ) -> torch.Tensor:
        """Draw the tokens after the last nodes of a chain, [B, n]; arguments as for `scores`.

        Each with the noise of its position: -1 where all logits are -inf, or one is NaN.
        """
        if self.by_node and logits.shape[1] == 1:
            begins = [first] * len(logits) if isinstance(first, int) else first.tolist()
            paths = zip(tokens.tolist(), begins, strict=True)
            found = [
                self.token_after(logits, request, 0, path[1 : begin + 1])
                for request, (path, begin) in enumerate(paths)
            ]
            return torch.tensor(found, device="cpu")[:, None]
        scores = self.scores(logits, tree, tokens, first)
        if not self.greedy:
            firsts = [first] * len(scores) if isinstance(first, int) else first.tolist()
            scores = self._with_noise(scores, firsts)
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
        """Sample tokens [B, n] for the rejection rule; arguments as for `scores`.

        Returns them with the distribution that was sampled, [B, n, V], or None if greedy.
        """
        scores = self.scores(logits, tree, tokens, first)
        if self.greedy:
            return scores.argmax(-1), None
        probs = scores.float().softmax(-1)
        return sample(probs, generator=generator), probs

    @property
    def by_node(self) -> bool:
        """Whether `token_after` serves this run: on the CPU, unless a processor knows rows."""
        return self.scores.by_node is not None

    @property
    def takes_largest(self) -> bool:
        """Whether the token that is drawn is always that of the largest logit."""
        return self.greedy and None not in self.scores.temperatures

    def drawing(self, device: torch.device) -> Drawing | None:
        """Return how tokens are drawn, on a device, or None where a graph cannot draw them.

        It can behind temperatures, and behind filters that are the same for all requests.
        """
        active, key = self.sequences.active, ()
        own: list[Any] = [self.scores.temperatures[row] for row in active]
        shared: tuple[Any, ...] = ()
        if None in own:
            keys = {_filters(self.scores.processors[row]) for row in active}
            if len(keys) > 1 or None in keys:
                return None
            own, shared, key = [], tuple(self.scores.processors[active[0]]), keys.pop()
        places, temperatures = self._uploaded(own, device)
        seed = None if self.greedy else uploaded([signed(self.seed)], device)
        return Drawing(places, seed, temperatures, shared, key)

    def accept(
        self,
        tree: Tree,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        draft_probs: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Accepted, Report]:
        """Decide which drafted tokens survive, and draw the one after them: -1 if none can follow.

        `tokens` are int64 [B, T], `logits` [B, T, V] of the target; `draft_probs` and `generator`
        as for `specattn.acceptance.accept`. On a GPU the host waits where it reads the report, and
        before only if a processor looks at texts.
        """
        if draft_probs is not None:
            options: Any = {"draft_probs": draft_probs, "generator": generator}
            accepted = _accept_sampled(tree, tokens, self.scores(logits, tree, tokens), **options)
        elif (found := self._walk_on_host(tree, tokens, logits)) is not None:
            accepted, emitted = found
            shapes = tree.drafted_and_depth * (1 if tree.batch_size else len(emitted))
            own = zip(shapes, emitted, strict=True)
            return accepted, Report([Outcome(*shape, path) for shape, path in own])
        elif self.scores.by_node is None and not self.scores.sees_texts:
            accepted, rows = self._walk_at_once(tree, tokens, logits)
            return accepted, CopiedReport(rows)
        else:
            accepted = walk(tree, tokens, partial(self._token_at, logits))
        return accepted, CopiedReport(report_of(tree, tokens, accepted))

    def _walk_at_once(
        self, tree: Tree, tokens: torch.Tensor, logits: torch.Tensor
    ) -> tuple[Accepted, torch.Tensor]:
        """Walk along draws behind all nodes, which no processor judges by their texts."""
        own = [self.scores.temperatures[row] for row in self.sequences.active]
        if None in own:
            logits, own = self.scores(logits, tree, tokens), []
        places, temperatures = self._uploaded(own, logits.device)
        seed = None if self.greedy else self.seed
        return draw_and_walk(tree, tokens, logits, Draws(places, seed, temperatures))

    def _uploaded(self, own: Sequence[Any], device: torch.device) -> Any:
        """Return on a device rows and lengths, and temperatures, None where they change nothing."""
        active, temperatures = self.sequences.active, None
        if any(temperature != 1 for temperature in own):
            temperatures = uploaded(own, device, dtype=torch.float32)
        return uploaded([active, self.sequences.active_lengths], device), temperatures

    def _token_at(
        self, logits: torch.Tensor, node: torch.Tensor, emitted: torch.Tensor
    ) -> torch.Tensor:
        """Draw the tokens after one node of each request, [B], whose path is `emitted`."""
        at_node = logits.gather(1, node[:, None, None].expand(-1, 1, logits.shape[-1]))
        steps = emitted.shape[1]
        # The root is committed and not looked at.
        return self.draw(at_node, _chain(steps, logits.device), pad(emitted, (1, 0)), steps)[:, 0]

    def _walk_on_host(
        self, tree: Tree, tokens: torch.Tensor, logits: torch.Tensor
    ) -> tuple[Accepted, list[list[int]]] | None:
        """Walk in one call, and draw there too behind a temperature and `top_k` alone."""
        native, rows, active = kernels(), self.scores.by_node, self.sequences.active
        if native is None or rows is None:
            return None
        report, accepted = self._report_for(len(active), tree.max_depth).take()
        parents, drawn_by = tree.parent_lists, [rows[row].drawn_by for row in active]
        if None in drawn_by or logits.dtype == torch.float64:
            after = partial(self.token_after, logits)
            return accepted, native.walk_trees_drawing(parents, tokens, report, after)
        seed = None if self.greedy else self.seed % 2**64
        lengths, threads = self.sequences.active_lengths, torch.get_num_threads()
        temperatures, top_k = map(list, zip(*drawn_by, strict=True))
        given = logits, parents, tokens, temperatures, top_k, seed, active, lengths
        return accepted, native.walk_trees(*given, report, threads)

    def token_after(self, logits: torch.Tensor, request: int, node: int, path: list[int]) -> int:
        """Draw the token after a node and its path, of logits [B, T, V] of all: on the host."""
        assert self.scores.by_node is not None
        row = self.sequences.active[request]
        scores = self.scores.by_node[row](path, logits[request, node])
        if not self.greedy:
            position = self.sequences.length(row) + len(path)
            place = torch.tensor([[row], [position]], device="cpu")
            scores = add_gumbel_noise(scores.float()[None], self.seed, *place)[0]
        values = (scores if scores.dtype == torch.float64 else scores.float()).numpy()
        # its argmax is quicker, and as torch's the first of equal ones
        drawn = int(values.argmax())
        return drawn if values[drawn] > -math.inf else -1  # NaN is not greater either

    def _with_noise(self, scores: torch.Tensor, firsts: Sequence[int]) -> torch.Tensor:
        """Add the noise of the tokens after the last nodes of each chain to `scores` [B, n, V]."""
        count = scores.shape[1]
        rows = [row for row in self.sequences.active for _ in range(count)]
        positions = [
            length + first + step
            for length, first in zip(self.sequences.active_lengths, firsts, strict=True)
            for step in range(count)
        ]
        places = uploaded([rows, positions], scores.device)
        noisy = add_gumbel_noise(scores.float().flatten(0, 1), self.seed, *places)
        return noisy.unflatten(0, scores.shape[:2])


_FILTERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""Processors that are torch's operators on logits, and of numbers that do not change."""


def _filters(processors: Sequence[Any]) -> Any:
    """Return what such processors do, None where there are others."""
    if any(type(one) not in _FILTERS for one in processors):
        return None
    return tuple((type(one), *sorted(vars(one).items())) for one in processors)


def _accept_sampled(
    tree: Tree, tokens: torch.Tensor, scores: torch.Tensor, **options: Any
) -> Accepted:
    """Test a sampled draft by the rejection rule, given the target's processed logits."""
    scores = scores.float()
    best = scores.amax(-1)
    nothing = best.isnan() | (best == -torch.inf)
    probs = scores.masked_fill(nothing[..., None], 0.0).softmax(-1)
    found = accept(tree, tokens, probs, **options)
    visited = pad(found.nodes.clamp_min(0), (1, 0))
    impossible = nothing.gather(1, visited).any(1)
    return found._replace(next_token=found.next_token.masked_fill(impossible, -1))


@cache
def kernels() -> Any:
    """Return `specattn._cpu`, or None if it is not built."""
    try:
        return importlib.import_module("specattn._cpu")
    except ImportError:
        return None


def _reports(requests: int, depth: int) -> Stock[tuple[torch.Tensor, Accepted]]:
    """Return what walks of so many requests down trees of such a depth report in."""

    def make(count: int) -> list[tuple[torch.Tensor, Accepted]]:
        room = torch.empty(count, requests, 2 + depth, dtype=torch.int64, device="cpu")
        parts = (room[..., 2:], room[..., 0], room[..., 1])
        accepted = map(Accepted, *(part.unbind() for part in parts))
        return list(zip(room.unbind(), accepted, strict=True))

    return Stock(make, 64)


@lru_cache(maxsize=64)
def _chain(n: int, device: torch.device) -> Tree:
    return Tree.chain(n, device=device)
