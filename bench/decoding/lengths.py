"""What long generation is judged by: acceptance and speed up to each length, and variety."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .cases import PLAIN

if TYPE_CHECKING:
    from .measure import Row

MOST = 4
"""Distinct-1 to Distinct-4, as in TokenSwift's tables."""


def distinct_n(tokens: Sequence[int]) -> list[float] | None:
    """Return the share of different n-grams among all, n from 1 to `MOST` (Li et al. 2016).

    None where there are fewer tokens than that.
    """
    if len(tokens) < MOST:
        return None
    shares = []
    for n in range(1, MOST + 1):
        ngrams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
        shares.append(len(set(ngrams)) / len(ngrams))
    return shares


def relate_lengths(rows: Sequence[Row]) -> None:
    """Note what every row had done when it reached each length, and how plain decoding compares.

    ``seconds`` per new token are medians over runs; ``tau_without_bonus`` is of all runs together.
    ``speedup`` is plain decoding's seconds per token over the row's own (TokenSwift, equation 5).
    """
    for row in rows:
        reached = [outcome.reached for outcome in row.outcomes if outcome.reached]
        row.lengths = [_pooled(runs) for runs in zip(*reached, strict=True)] if reached else []
    plain = next((row for row in rows if row.entry.name == PLAIN), None)
    for row in rows if plain is not None else []:
        for own, base in zip(row.lengths, plain.lengths, strict=False):
            own["speedup"] = {PLAIN: base["seconds"] / own["seconds"]} if row is not plain else {}


def _pooled(runs: Sequence[Any]) -> dict[str, Any]:
    rounds = sum(one.rounds for one in runs)
    return {
        "new_tokens": runs[0].length,
        "seconds": statistics.median(one.seconds / one.tokens for one in runs),
        "tau_without_bonus": sum(one.tokens - one.rounds for one in runs) / rounds,
        "speedup": {},
    }
