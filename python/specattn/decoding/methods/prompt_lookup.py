"""Prompt lookup: draft what followed the last tokens at their latest earlier occurrence.

It needs nothing but the text. (Saxena, *Prompt lookup decoding*, 2023; transformers has it as
``prompt_lookup_num_tokens``.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from specattn.decoding.drafting import Draft, DraftContext, Drafter, Verified
from specattn.decoding.method import Method
from specattn.decoding.methods.trie import draft_of_paths
from specattn.decoding.sequences import RequestIndexes


@dataclass(frozen=True)
class PromptLookup(Method, name="prompt_lookup"):
    """Drafting by copying from prompt and text so far.

    The longest suffix of the text that occurred before decides, at its latest occurrence. A lookup
    costs the same however long the text is; the index takes memory in proportion to it.

    Parameters
    ----------
    gamma : int
        Drafted tokens per round, at most.
    longest : int
        Tokens of the longest suffix that is looked up, down to a single one.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    gamma: int = 10
    longest: int = 3

    def __post_init__(self) -> None:
        for name in ("gamma", "longest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def max_nodes(self) -> int:
        """The root and `gamma` drafted tokens."""
        return self.gamma + 1

    def clipped(self, depth: int) -> PromptLookup:
        """Return this method with no larger `gamma` than `depth`, and 1 at least."""
        return replace(self, gamma=max(1, min(self.gamma, depth)))

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter that has indexed the prompts."""
        return _CopyingDrafter(self, context)


class _CopyingDrafter(Drafter):
    def __init__(self, method: PromptLookup, context: DraftContext):
        self.method, self.sequences = method, context.sequences
        self.indexes = RequestIndexes(
            context.sequences, lambda: SuffixIndex(method.longest), prompts=True
        )

    def propose(self, root: torch.Tensor) -> Draft:
        lengths = [
            min(self.method.gamma, self.sequences.drafts(row)) for row in self.sequences.active
        ]
        copied = [
            index.continuation(length)
            for index, length in zip(self.indexes.active, lengths, strict=True)
        ]
        return draft_of_paths(root, [[path] for path in copied])

    def observe(self, verified: Verified) -> None:
        self.indexes.catch_up()


class SuffixIndex:
    """The latest occurrence of every run of up to `longest` tokens of a growing text.

    Parameters
    ----------
    longest : int
    """

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
        for run in self._last_runs():
            begin = self._behind.get(run)
            if begin is not None:
                return self.text[begin : begin + length]
        return []

    def _last_runs(self) -> list[tuple[int, ...]]:
        end = self.text[-self.longest :]
        return [tuple(end[start:]) for start in range(len(end))]
