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
from transformers import LogitsProcessorList

from specattn.acceptance import Accepted, accepted_of, sample, walk
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
        """Draw the token after each of the last nodes of a chain; arguments as for `scores`.

        With the noise of its position: what `next_token` draws there, where the logits are the
        same.

        Returns
        -------
        Tensor, int64 [B, n]
            -1 where nothing can follow: all logits are -inf, or one is NaN.
        """
        if self.by_node and logits.shape[1] == 1:
            begins = [first] * len(logits) if isinstance(first, int) else first.tolist()
            paths = zip(tokens.tolist(), begins, strict=True)
            found = [
                self.token_after(request, logits[request], 0, path[1 : begin + 1])
                for request, (path, begin) in enumerate(paths)
            ]
            return torch.tensor(found)[:, None]
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

    @property
    def by_node(self) -> bool:
        """Whether `token_after` serves this run: on the CPU, unless a processor knows rows."""
        return self.scores.by_node is not None

    @property
    def takes_largest(self) -> bool:
        """Whether the token that is drawn is always that of the largest logit."""
        rows = self.scores.by_node
        return self.greedy and rows is not None and all(row.temperature is not None for row in rows)

    def follow(
        self, tree: Tree, tokens: torch.Tensor, logits: torch.Tensor
    ) -> tuple[Accepted, list[list[int]]]:
        """Walk down trees along the target's own draws, on the host: where `by_node` holds.

        Parameters
        ----------
        tree : Tree
        tokens : Tensor, int64 [B, T]
        logits : Tensor [B, T, V]

        Returns
        -------
        accepted : Accepted
        emitted : list of list of int
            Per request the accepted tokens, then the next one: -1 if none can follow.
        """
        assert self.scores.by_node is not None
        active, native = self.sequences.active, kernels()
        parents = tree.parent_lists
        temperatures = [self.scores.by_node[row].temperature for row in active]
        if native is not None and None not in temperatures and logits.dtype != torch.float64:
            report, accepted = self._report_for(len(active), tree.max_depth).take()
            seed = None if self.greedy else self.seed % 2**64
            lengths, threads = self.sequences.active_lengths, torch.get_num_threads()
            emitted: list[list[int]] = native.walk_trees(
                logits, parents, tokens, temperatures, seed, active, lengths, report, threads
            )
            return accepted, emitted
        if tree.batch_size is None:
            parents = parents * len(active)
        walks = [
            walk(parents[request], own, partial(self.token_after, request, logits[request]))
            for request, own in enumerate(tokens.tolist())
        ]
        return accepted_of(walks, tree.max_depth), [found.tokens for found in walks]

    def token_after(self, request: int, logits: torch.Tensor, node: int, path: list[int]) -> int:
        """Draw the token that follows a running request's text and a path behind it: on the host.

        Parameters
        ----------
        request : int
        logits : Tensor [T, V]
            Of the nodes of the request's tree.
        node : int
        path : list of int
            The tokens of the node's path, the root's apart.

        Returns
        -------
        int
            As `draw` returns it.
        """
        assert self.scores.by_node is not None
        row = self.sequences.active[request]
        scores = self.scores.by_node[row](path, logits[node])
        if not self.greedy:
            position = self.sequences.length(row) + len(path)
            place = torch.tensor([[row], [position]])
            scores = add_gumbel_noise(scores.float()[None], self.seed, *place)[0]
        values = scores.numpy()  # its argmax is quicker, and as torch's the first of equal ones
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
        places = torch.tensor([rows, positions], device=scores.device)
        noisy = add_gumbel_noise(scores.float().flatten(0, 1), self.seed, *places)
        return noisy.unflatten(0, scores.shape[:2])


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
        room = torch.empty(count, requests, 2 + depth, dtype=torch.int64)
        parts = (room[..., 2:], room[..., 0], room[..., 1])
        accepted = map(Accepted, *(part.unbind() for part in parts))
        return list(zip(room.unbind(), accepted, strict=True))

    return Stock(make, 64)


@lru_cache(maxsize=64)
def _chain(n: int, device: torch.device) -> Tree:
    return Tree.chain(n, device=device)
