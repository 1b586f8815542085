"""TokenSwift: draft very long texts with the target on a partial cache, and with their own n-grams.

One pass of the target over few cached tokens gives the distribution of the next token, and three
small heads predict the three behind it. The first ranks of these four make a tree; the most
frequent n-grams that begin with the best next token are merged into it, and the target verifies
the whole.
(*From Hours to Minutes: Lossless Acceleration of Ultra Long Sequence Generation up to 100K Tokens*,
arXiv 2502.18890.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from specattn.blocks import Ops
from specattn.decoding.drafting.calibrating import pass_sizes
from specattn.decoding.drafting.gains import SIZES, Effort, Nodes, TreeGains
from specattn.decoding.drafting.ngrams import NGramTable
from specattn.decoding.drafting.pace import FixedSize, PacedDrafter, Share
from specattn.decoding.drafting.partial_cache import PartialCache
from specattn.decoding.drafting.trained import Headed
from specattn.decoding.drafting.trie import (
    Trie,
    best_of_trie,
    common,
    draft_of_paths,
    draft_of_tries,
    trie,
)
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter, Verified
from specattn.decoding.passes.attention import NO_CAPTURE, CaptureSpec
from specattn.decoding.text.sequences import RequestIndexes
from specattn.drafters import TokenSwiftHeads
from specattn.tree import Tree


@dataclass(frozen=True)
class TokenSwift(Headed[TokenSwiftHeads], name="tokenswift"):
    """Self-drafting with heads, n-grams of the generated text and a partial cache.

    Drafts are chosen by rank and frequency and tested by the target's own sample at every node,
    which preserves the target's distribution.

    Parameters
    ----------
    drafter : TokenSwiftHeads or path, optional
        Heads, or the folder that holds them. By default the folder ``tokenswift`` within the
        target's. A path is loaded once; heads are used as they are.
    widths : sequence of int or None
        Entry 0: how many of the target's best next tokens begin the tree; entry i: how many of head
        i's first ranks follow every node of the level above. None: `most_widths`, as deep as there
        are heads, of which, n-grams included, the most probable nodes are verified: as many as gain
        the most tokens per second by the times of the run's own rounds, or none.
    k : int
        N-grams per round, at most; 0 turns token reutilization off.
    n : int
        Tokens of an n-gram, the next token included.
    remembered : int
        Tokens whose n-grams are counted, the last ones.
    budget, sinks : int
        Cached tokens that a draft attends to in each full-attention layer, and how many of the
        first are always among them.
    dynamic : bool
        Keep the partial cache up; otherwise it stays as it is once the budget is full, which is the
        "partial cache" of the paper's table 5.

    Raises
    ------
    ValueError
        A parameter is out of range. From `prepared`, and so when a run starts: there are no heads,
        or they do not fit the target, or there are fewer than `widths` needs.
    """

    kind = TokenSwiftHeads
    most_widths = (1, 3, 3, 3)
    headless = 1  # the target's own next token

    k: int = 20
    n: int = 4
    remembered: int = 2**17
    budget: int = 4096
    sinks: int = 16
    dynamic: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0, "k")
        if self.remembered < self.n:
            raise ValueError(f"remembered must be at least n = {self.n}, got {self.remembered}")
        NGramTable(self.n, self.remembered)  # checks n
        if not 0 <= self.sinks < self.budget:
            raise ValueError(
                f"sinks must be from 0 to less than the budget of {self.budget}, got {self.sinks}"
            )

    @property
    def max_nodes(self) -> int:
        """The root, the heads' tree, and n-grams that share with it the next token alone."""
        return Tree.full(self.widths or self.most_widths).size + self.k * (self.n - 1)

    @property
    def depth(self) -> int:
        """Tokens of the longest path, so of one round at most; gamma + 1 in the paper."""
        return max(len(self.widths or self.most_widths), self.n if self.k else 0)

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter; the first round behind a prompt beyond the budget drafts nothing."""
        return _TokenSwiftDrafter(self, self.loaded(context.target.model), context)


class _TokenSwiftDrafter(PacedDrafter):
    def __init__(self, method: TokenSwift, heads: TokenSwiftHeads, context: DraftContext):
        self.method, self.heads, self.target = method, heads, context.target
        self.sampler, self.sequences = context.sampler, context.sequences
        self.programs = self.target.recall("tokenswift", heads, self.target.programs)
        self.widths = method.widths_of(heads)
        # A pass of the target on the partial cache, and all heads.
        effort = Effort(max(self.widths), max(len(self.widths), method.depth))
        self.arm, self.most_rows = FixedSize(effort), method.max_nodes
        if method.widths is None:
            sizes = pass_sizes(context, min(method.max_nodes, SIZES[-1]))
            name = f"tokenswift, {method.budget}"
            self.arm = Share(context, name, [effort], sizes, TreeGains, self.attempt)
        levels = range(len(self.widths))
        self.chains = [Tree.chain(depth, device=self.target.device) for depth in levels]
        self.tables = RequestIndexes(
            self.sequences, lambda: NGramTable(method.n, method.remembered), prompts=False
        )
        self.cache = PartialCache(self.target, method.budget, method.sinks, self._cached())
        self.offered: list[list[tuple[int, ...]]] = []
        self.counted = self.sequences.lengths
        self.rounds = self.accepted = self.reused = 0
        self._plan_round()

    def draft(self, root: torch.Tensor, effort: Effort) -> Draft:
        """Return the draft of heads and n-grams, or what pays of it."""
        self.prepares, self.offered = not self.cache.ranked, [[]] * len(root)
        if self.prepares or not effort.depth:
            return draft_of_paths(root, self.offered)
        depth = self.sequences.draft_depth
        levels, scores = self._ranked(root, self.widths[:depth])
        k = self.method.k
        self.offered = [
            [
                (best, *rest)[:depth]
                for best in ranks[0][:1]
                for rest in table.continuations(best, k)
            ]
            for ranks, table in zip(levels, self.tables.active, strict=True)
        ]
        candidates = [
            itertools.chain(itertools.product(*ranks), ngrams)
            for ranks, ngrams in zip(levels, self.offered, strict=True)
        ]
        tries = [trie(paths) for paths in candidates]
        most = max(len(parents) for parents, _ in tries)
        chances = cache(lambda: probabilities_of(tries, scores))
        rows = self.arm.rows(effort, most, lambda: nodes_of(tries, chances()))
        if rows == most:
            return draft_of_tries(root, tries)
        pairs = zip(tries, chances(), strict=True)
        return draft_of_tries(root, [best_of_trie(one, own, rows - 1) for one, own in pairs])

    def attempt(self, root: torch.Tensor, effort: Effort) -> None:
        self._ranked(root, self.widths[: effort.depth])

    def observe(self, verified: Verified) -> None:
        super().observe(verified)
        self._count()
        self.tables.catch_up()
        if self.capture.queries:
            assert verified.result.queries is not None
            last = verified.accepted.last
            requests = torch.arange(len(last), device=last.device)
            self.cache.select(verified.result.queries[:, requests, last], self._cached())
        elif self.method.dynamic:
            self.cache.add(self._cached())
        self._plan_round()

    def compact(self, rows: list[int]) -> None:
        self.cache.compact(rows)
        self._plan_round()

    def details(self) -> dict[str, Any]:
        drafted = self.method.depth * self.rounds or 1
        return {
            **super().details(),
            "alpha": self.accepted / drafted,
            "n-gram acceptance, beta": self.reused / drafted,
            "selections of the partial cache": self.cache.selections,
        }

    def _ranked(
        self, root: torch.Tensor, widths: tuple[int, ...]
    ) -> tuple[list[list[list[int]]], torch.Tensor]:
        """Return the first ranks, `widths` of them, of every request's levels, and their scores.

        Waits for the ranks.
        """
        drafted = self.target.draft(root[:, None], 0, self.cache.selection())
        later = self._later(drafted.features[:, 0], len(widths) - 1)
        logits = torch.cat([drafted.logits, later], 1)
        # Processors see a head's logits as if the best of the levels before were in the text.
        path = torch.cat([root[:, None], logits[:, :-1].argmax(-1)], 1)
        scores = self.sampler.scores(logits, self.chains[len(widths) - 1], path)
        best = [row.topk(width) for row, width in zip(scores.unbind(1), widths, strict=True)]
        possible = torch.cat([scores > -torch.inf for scores, _ in best], 1)
        ranked = torch.cat([tokens for _, tokens in best], 1).masked_fill(~possible, -1).tolist()
        ends = [0, *itertools.accumulate(widths)]
        levels = [
            [[token for token in row[a:b] if token >= 0] for a, b in itertools.pairwise(ends)]
            for row in ranked
        ]
        return levels, scores

    def _later(self, features: torch.Tensor, count: int) -> torch.Tensor:
        """Return the logits [B, count, V] of the first heads for features [B, H]."""
        if not count:
            return features.new_empty(len(features), 0, self.heads.config.vocab_size)
        heads = self.programs.depth_for("heads", count, range(len(self.widths)), len(features))
        program, inputs = partial(self._logits, heads), {"features": features}
        logits: torch.Tensor = self.programs.run(("heads", heads), program, inputs, len(features))
        return logits[:, :count]

    def _logits(self, count: int, ops: Ops, features: torch.Tensor) -> torch.Tensor:
        return ops.head(ops.stack(self.heads.hidden(ops, features, count)), self.target.head)

    def _cached(self) -> list[int]:
        """Return how many tokens the cache holds of each request: all but the root."""
        return [length - 1 for length in self.sequences.active_lengths]

    def _plan_round(self) -> None:
        good = self.cache.ranked
        if self.method.dynamic:
            good = self.cache.has_room(self.method.depth + 1)
        self.capture = NO_CAPTURE if good else CaptureSpec(queries=True)

    def _count(self) -> None:
        """Count what was accepted, and how much of it some n-gram had offered."""
        for row, ngrams in zip(self.sequences.active, self.offered, strict=True):
            text = self.sequences.text(row)
            begin, self.counted[row] = self.counted[row], len(text)
            path = text[begin:-1].tolist()
            self.rounds += 1
            self.accepted += len(path)
            self.reused += max((common(path, ngram) for ngram in ngrams), default=0)


def nodes_of(tries: Sequence[Trie], chances: Any) -> Nodes:
    """Return the drafted nodes of tries, with the probabilities [B, n] of their paths."""
    batch, n = chances.shape
    tokens, parents = torch.zeros(2, batch, n, dtype=torch.int64, device="cpu")
    levels = np.ones((batch, n), int)
    for request, (above, own) in enumerate(tries):
        count = len(own) - 1
        tokens[request, :count] = torch.tensor(own[1:])
        parents[request, :count] = torch.tensor(above[1:]) - 1
        for node, parent in enumerate(above[1:]):
            levels[request, node] = 1 if parent == 0 else levels[request, parent - 1] + 1
    scores = torch.from_numpy(chances).log()
    return Nodes(tokens, scores, parents, levels, np.zeros_like(levels))


def probabilities_of(tries: Sequence[Trie], scores: torch.Tensor) -> Any:
    """Return the probabilities [B, n] of the drafted nodes of each trie, 0 behind its last one.

    `scores` [B, levels, V] are the depths' logits; deeper nodes are taken to be as likely as not.
    """
    norms = scores.float().logsumexp(-1)
    found = np.zeros((len(tries), max(len(parents) for parents, _ in tries) - 1))
    for request, (parents, tokens) in enumerate(tries):
        depths = [0] * len(parents)
        for node, parent in enumerate(parents[1:], start=1):
            depths[node] = depths[parent] + 1
        level = [min(depth, scores.shape[1]) - 1 for depth in depths[1:]]
        levels, drafted = (torch.as_tensor(x, device=scores.device) for x in (level, tokens[1:]))
        each = (scores[request, levels, drafted].float() - norms[request, levels]).exp().tolist()
        chances = [1.0]
        for node, parent in enumerate(parents[1:], start=1):
            own = each[node - 1] if depths[node] <= scores.shape[1] else 0.5
            chances.append(chances[parent] * own)
        found[request, : len(chances) - 1] = chances[1:]
    return found
