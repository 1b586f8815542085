"""How often drafts survive: the one thing that no arithmetic tells."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """Rates at which a drafted token is accepted, given that all before it were.

    Attributes
    ----------
    rates : tuple of float
        Entry i is for depth i + 1; the last one holds for all that is deeper.
    source : str
        Where they come from.
    """

    rates: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise ValueError(f"rates must lie between 0 and 1, got {self.rates}")

    @classmethod
    def from_mean(cls, accepted: float, depth: int, source: str) -> Profile:
        """Return the constant rate that accepts so many of `depth` drafted tokens on average.

        Raises
        ------
        ValueError
            No rate does.
        """
        if not 0 < accepted < depth:
            raise ValueError(f"accepted must be between 0 and {depth}, got {accepted}")
        low, high = 0.0, 1.0
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (middle, high) if _accepted((middle,), depth) < accepted else (low, middle)
        return cls((high,), source)

    def tokens_per_round(self, depth: int) -> float:
        """Return the mean number of tokens that a round yields, bonus token included."""
        return 1 + _accepted(self.rates, depth)


def _accepted(rates: tuple[float, ...], depth: int) -> float:
    steps = (rates[min(i, len(rates) - 1)] for i in range(depth))
    reached, total = 1.0, 0.0
    for rate in steps:
        reached *= rate
        total += reached
    return total


def parse(text: str) -> dict[str, Profile]:
    """Read ``vegas=0.95`` or ``longspec=0.8,0.7,0.65``.

    Raises
    ------
    ValueError
        It has another form, or names no method with a profile.
    """
    method, _, rates = text.partition("=")
    if method not in PROFILES:
        raise ValueError(f"expected one of {', '.join(PROFILES)} before '=', got {text!r}")
    try:
        values = tuple(map(float, rates.split(",")))
    except ValueError:
        values = (math.nan,)
    return {method: Profile(values, "given on the command line")}


PROFILES = {
    "vegas": Profile.from_mean(
        6.13, 7, "Vegas Table 1: 6.13 of 7 drafted tokens, Qwen3-8B, 7% of the cache, LongBench-v2"
    ),
    "longspec": Profile.from_mean(
        2.25,
        5,
        "LongSpec Table 1: 3.25 tokens a round with the bonus token, Llama-3.1-8B, 69 nodes",
    ),
    "tokenswift": Profile.from_mean(
        4 * 0.68,
        4,
        "TokenSwift Table 3: alpha 0.68 of 4 levels, the first 20K tokens generated after 4096, "
        "LLaMA3.1-8b",
    ),
    "poss": Profile.from_mean(
        3.55,
        6,
        "PosS Table 1: 4.55 tokens a round with the bonus token, Llama-3-8B, PosS-2, depth 6, 60 "
        "tokens, prompts of short length",
    ),
}
