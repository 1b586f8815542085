"""Suffix arrays in Python (Manber and Myers, 1990): where a text's end occurs in others.

What csrc/cpu/corpus.h has, for where it is not built; the numbers are explained there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

LONGEST = 63
"""Tokens of the longest match; the order knows one more."""
_END, _WALKED, _PROBES = -1, 256, 32


class Match(NamedTuple):
    """The suffixes that begin with `length` tokens: a range of a corpus' order."""

    begin: int = 0
    end: int = 0
    length: int = 0


NO_MATCH = Match()


def sort_suffixes(tokens: torch.Tensor, order: torch.Tensor) -> None:
    """Fill `order` with the places of all suffixes, by their first 64 tokens."""
    size = 4 * (LONGEST + 1)
    spelled = (tokens.numpy().astype(np.int64) + 1).astype(">u4").tobytes()
    places = sorted(range(len(tokens)), key=lambda at: spelled[4 * at : 4 * at + size])
    order.copy_(torch.tensor(places, dtype=torch.int32, device="cpu"))


class Corpus:
    """Texts that do not grow."""

    def __init__(self, tokens: torch.Tensor, order: torch.Tensor, vocabulary: int):
        self._tokens, self._order, self._size = tokens.numpy(), order.numpy(), len(tokens)
        for name, given, most in (
            ("tokens", self._tokens, vocabulary - 1),
            ("order", self._order, self._size - 1),
        ):
            least = _END if name == "tokens" else 0
            wrong = np.flatnonzero((given < least) | (given > most))
            if len(wrong):
                at = int(wrong[0])
                raise ValueError(f"{name}: expected {least} to {most}, got {given[at]} at {at}")

    def __len__(self) -> int:
        return self._size

    def behind(self, place: int, length: int) -> int:
        """Return the token behind so many ones of the suffix at a place of the order."""
        at = int(self._order[place]) + length
        return int(self._tokens[at]) if at < self._size else _END

    def _first(self, match: Match, token: int) -> int:
        """Return the first place of a match where no lesser token follows it."""
        places = range(match.begin, match.end)
        found = bisect_left(places, token, key=lambda place: self.behind(place, match.length))
        return match.begin + found

    def narrowed(self, match: Match, token: int) -> Match:
        """Return a match with one more token behind it; empty where that never came."""
        if token < 0 or match.length > LONGEST:
            return NO_MATCH
        begin = self._first(match, token)
        end = self._first(match._replace(begin=begin), token + 1)
        return Match(begin, end, match.length + 1) if begin < end else NO_MATCH

    def longest(self, context: Sequence[int], most: int) -> Match:
        """Return the longest end of a context that occurs, of at most `most` tokens."""
        low, high = 0, min(len(context), most, LONGEST)
        best, middle = self._matching(()), high  # the longest first
        while low < high:  # an end that occurs has ends that occur
            match = self._matching(context[len(context) - middle :])
            if match.length == middle:
                best, low = match, middle
            else:
                high = middle - 1
            middle = low + (high - low + 1) // 2
        return best

    def _matching(self, tokens: Sequence[int]) -> Match:
        """Return where tokens occur; an empty match where they do not."""
        match = Match(0, self._size, 0)
        for token in tokens:
            match = self.narrowed(match, token)
            if match.begin == match.end:
                break
        return match

    def single(self, match: Match) -> bool:
        """Return whether the same always followed a match."""
        first, last = match.begin, match.end - 1
        return self.behind(first, match.length) == self.behind(last, match.length)

    def following(self, match: Match, most: int) -> list[tuple[int, int]]:
        """Return what follows a match, and how often, the most frequent first."""
        width, seen, found = match.end - match.begin, match.begin, []
        stops = width if width <= _WALKED else _PROBES
        for stop in range(stops):
            place = match.begin + width * stop // stops
            if place < seen:
                continue
            token = self.behind(place, match.length)
            begin = self._first(match, token)
            seen = self._first(match._replace(begin=begin), token + 1)
            if token >= 0:
                found.append((token, seen - begin))
        return sorted(found, key=lambda one: (-one[1], one[0]))[:most]

    def followers(
        self, context: Sequence[int], most: int = 16
    ) -> tuple[int, list[tuple[int, int]]]:
        """Return the tokens of a context's longest end that occurs, and what follows it."""
        match = self.longest(context, LONGEST)
        return match.length, self.following(match, most)
