"""Prompt lookup: draft what followed the last tokens at their latest earlier occurrence.

It needs nothing but the text. (Saxena, *Prompt lookup decoding*, 2023; transformers has it as
``prompt_lookup_num_tokens``.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from specattn.decoding.drafting.gains import ChainGains, Effort
from specattn.decoding.drafting.pacer import Pacer
from specattn.decoding.drafting.trie import common, draft_of_paths
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter, Verified
from specattn.decoding.engine.method import Method
from specattn.decoding.text.sequences import RequestIndexes

MOST_GAMMA = 10
"""Tokens of the longest draft unless a length is given."""


@dataclass(frozen=True)
class PromptLookup(Method, name="prompt_lookup"):
    """Drafting by copying from prompt and text so far.

    The longest suffix of the text that occurred before decides, at its latest occurrence. A lookup
    costs the same however long the text is; the index takes memory in proportion to it.

    Parameters
    ----------
    gamma : int or None
        Drafted tokens per round, at most. None: up to `MOST_GAMMA`, as many as gain the most tokens
        per second by the times of the run's own passes, or none.
    longest : int
        Tokens of the longest suffix that is looked up, down to a single one.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    gamma: int | None = None
    longest: int = 3

    def __post_init__(self) -> None:
        self._require(1, "gamma", "longest")

    @property
    def max_nodes(self) -> int:
        """The root and the longest draft."""
        return (self.gamma or MOST_GAMMA) + 1

    def clipped(self, depth: int) -> PromptLookup:
        """Return this method with no larger `gamma` than `depth`, and 1 at least."""
        if self.gamma is None:
            return self
        return replace(self, gamma=max(1, min(self.gamma, depth)))

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter that has indexed the prompts."""
        return _CopyingDrafter(self, context)


class _CopyingDrafter(Drafter):
    def __init__(self, method: PromptLookup, context: DraftContext):
        self.most, self.sequences = method.max_nodes - 1, context.sequences
        self.pacer, self.chances = None, list[ChainGains]()
        if method.gamma is None:
            self.pacer = Pacer(context, most_looked_up=method.max_nodes)
            # How often copies come true, by how many tokens matched.
            whole = Effort(1, self.most)
            self.chances = [ChainGains([whole], [self.most]) for _ in range(method.longest + 1)]
        self.copied: list[tuple[int, list[int]]] = []
        self.lengths = context.sequences.lengths
        self.indexes = RequestIndexes(
            context.sequences, lambda: SuffixIndex(method.longest), prompts=True
        )

    def propose(self, root: torch.Tensor) -> Draft:
        lengths = [min(self.most, self.sequences.drafts(row)) for row in self.sequences.active]
        self.copied = [
            index.match(length) for index, length in zip(self.indexes.active, lengths, strict=True)
        ]
        self.lengths = self.sequences.lengths
        rows = self.most + 1
        if self.pacer is not None:
            self.pacer.prepare(root)
            rows = self.pacer.best_rows(self._chances())
        draft = draft_of_paths(root, [[path[: rows - 1]] for _, path in self.copied])
        if self.pacer is not None:
            self.pacer.begin(draft.tree.size)
        return draft

    def observe(self, verified: Verified) -> None:
        if self.pacer is not None:
            self.pacer.end(verified)
            self._learn()
        self.indexes.catch_up()

    def details(self) -> dict[str, Any]:
        """Return what passes were found to cost."""
        return {} if self.pacer is None else self.pacer.details()

    def _chances(self) -> list[list[float]]:
        """Return how likely each request's copied tokens are accepted."""
        return [
            list(self.chances[matched].probabilities[: len(path)]) for matched, path in self.copied
        ]

    def _learn(self) -> None:
        """Compare what was found with what came, whether it was drafted or not."""
        for row, (matched, path) in zip(self.sequences.active, self.copied, strict=True):
            came = self.sequences.text(row)[self.lengths[row] :].tolist()
            offered = min(len(path), len(came))
            self.chances[matched].learn(offered, [common(path[:offered], came)])


class SuffixIndex:
    """The latest occurrence of every run of up to `longest` tokens of a growing text."""

    def __init__(self, longest: int):
        self.longest = longest
        self.text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # where the token after a run stands

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            for run in self._last_runs():
                self._behind[run] = len(self.text)
            self.text.append(token)

    def continuation(self, length: int) -> list[int]:
        """Return up to `length` tokens that followed the text's last ones before."""
        return self.match(length)[1]

    def match(self, length: int) -> tuple[int, list[int]]:
        """Return how many of the text's last tokens occurred before, and what followed them."""
        for run in self._last_runs():
            begin = self._behind.get(run)
            if begin is not None:
                return len(run), self.text[begin : begin + length]
        return 0, []

    def _last_runs(self) -> list[tuple[int, ...]]:
        end = self.text[-self.longest :]
        return [tuple(end[start:]) for start in range(len(end))]
