"""What may be drafted from one request's text, and how likely each token of it is accepted."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specattn.decoding.drafting.corpus import Corpora, suffix_index
from specattn.decoding.drafting.gains import ChainGains, Effort, Lookups
from specattn.decoding.drafting.trie import common

LONGEST = 3
"""Tokens of the longest suffix that prompt lookup looks up."""
LEAST = 0.05
"""A chain ends where it is less probable: hardly any row of verification is as cheap."""
_RECENT = 1024  # tokens in which a match is looked up first
_TRUSTED = 0.3, 0.45, 0.55  # what matches of 1, 2, 3 tokens are worth before any came true
_BELIEVED, _JUDGED = 0.9, 32.0  # what a chance is worth before any did; expected tokens that count


class Chain(NamedTuple):
    """Drafted tokens, and how likely each is accepted with all before it."""

    tokens: list[int]
    chances: list[float]


class Copies:
    """How often what followed the latest occurrence came again, by the tokens that matched.

    `chances` tell how far to believe the chance of a token, copied or not, behind a true one.
    """

    def __init__(self, most: int):
        self.chances = Lookups(_BELIEVED, most=_JUDGED)
        self.by_matched = [ChainGains([Effort(1, most)], [most + 1]) for _ in _TRUSTED]
        for gains, trust in zip(self.by_matched, _TRUSTED, strict=True):
            gains.accepted[:1] = trust * gains.offered[:1]

    def of(self, matched: int) -> ChainGains:
        """Return how true copies behind `matched` tokens came."""
        return self.by_matched[matched - 1]


class Text:
    """One request's text as it grows.

    Parameters
    ----------
    index : SuffixDrafter
        Of an empty text, by what `suffix_index` chose.
    copies : Copies
        Of this request alone, or shared where that is wanted.
    """

    def __init__(self, index: Any, copies: Copies):
        self.index, self.copies = index, copies
        self.generated: list[int] = []
        self._copied: tuple[int, list[int]] = 0, []
        self._offered = Chain([], [])  # with the chance of each token behind the one before

    def extend(self, new: Sequence[int], wrote: int) -> None:
        """Append tokens, all by the target; at first a prompt before the last `wrote` of them."""
        written = len(new) if self.generated else wrote
        read, came = list(new[: len(new) - written]), list(new[len(new) - written :])
        matched, copied = self._copied
        if copied and not read:
            offered = min(len(copied), len(came))
            self.copies.of(matched).learn(offered, [common(copied[:offered], came)])
        tokens, each = self._offered
        if tokens and not read:  # whoever drafted
            right = common(tokens, came)
            self.copies.chances.learn(sum(each[: min(right + 1, len(came))]), right)
        self._copied, self._offered = (0, []), Chain([], [])
        self.generated += came
        if read:
            self.index.extend(read)
        self.index.extend(came, None, True)

    def chain(self, text: np.ndarray, length: int) -> Chain:
        """Return up to `length` tokens behind `text`, which this is: what is likeliest accepted."""
        if length < 1:
            return Chain([], [])
        # Paths of at least that probability are few: their tree is small.
        path = likeliest_path(*self.index.draft(8 * length, length, LEAST))
        copy = self._copy(text, length)
        tokens, chances = max((copy, path), key=lambda chain: sum(chain.chances))
        each = [one / before for before, one in pairwise((1.0, *chances))]
        self._offered, factor = Chain(tokens, each), self.copies.chances.factor
        believed = (min(1.0, factor * one) for one in each)
        return Chain(tokens, list(accumulate(believed, operator.mul)))

    def _copy(self, text: np.ndarray, length: int) -> Chain:
        matched, begin = latest(text, LONGEST)
        if not matched:
            return Chain([], [])
        tokens = text[begin : begin + length].tolist()
        self._copied = matched, tokens
        chances = self.copies.of(matched).probabilities[: len(tokens)].tolist()
        kept = sum(chance >= LEAST for chance in chances)
        return Chain(tokens[:kept], chances[:kept])


def likeliest_path(parents: list[int], tokens: list[int], chances: list[float]) -> Chain:
    """Return the likeliest path of a tree whose nodes come by descending probability."""
    path, end = Chain([], []), -1
    for node, (parent, token, chance) in enumerate(zip(parents, tokens, chances, strict=True)):
        if parent == end:  # its first child is the most probable one
            path.tokens.append(token)
            path.chances.append(chance)
            end = node
    return path


def latest(text: np.ndarray, longest: int) -> tuple[int, int]:
    """Return how many of the last tokens occurred before, and where the next one stands there.

    The longest match of at most `longest` tokens decides, at its latest occurrence; 0 and 0 where
    the last token never occurred.
    """
    recent, size = text[-_RECENT:].tobytes(), text.itemsize  # of few tokens bytes are found sooner
    wanted, at = recent[-longest * size :], len(recent) - 1
    while at >= 0 and len(text) > longest:
        at = recent.rfind(wanted, 0, min(len(recent) - size, at + len(wanted) - 1))
        if at >= 0 and at % size == 0:
            return longest, len(text) - (len(recent) - at) // size + longest
    ends, matched, behind = np.flatnonzero(text[:-1] == text[-1]), 0, 0
    while len(ends):
        matched, behind = matched + 1, int(ends[-1]) + 1
        if matched == longest or matched == len(text):
            break
        ends = ends[ends >= matched]
        ends = ends[text[ends - matched] == text[-1 - matched]]
    return matched, behind


class Texts:
    """Makes requests' texts, and knows what else they are looked up in.

    `vocabulary` and `folder` are those of the model and its tokenizer; `most` tokens are drafted;
    `corpus`, `cache` and `remember` as for `Auto`.
    """

    def __init__(
        self,
        vocabulary: int,
        folder: str,
        most: int,
        *,
        corpus: Sequence[Path | str] = (),
        cache: Path | str | None = None,
        remember: bool = False,
    ):
        self.most, self.remember = most, remember
        self.corpora = Corpora(vocabulary, folder)
        self.files = self.corpora.files(corpus, cache) if corpus else []
        self.shared = Copies(most) if remember else None

    def new(self) -> Text:
        """Return an empty text."""
        others = self.files + ([self.corpora.remembered(None)] if self.remember else [])
        return Text(suffix_index().SuffixDrafter(others), self.shared or Copies(self.most))

    def ended(self, text: Text) -> None:
        """Remember what a request was given, if that is wanted."""
        if self.remember:
            self.corpora.outputs.add(text.generated)
