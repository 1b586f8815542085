"""Acceptance rates of drafted tokens by method, as papers print them or users give them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class AcceptanceProfile:
    """Rates at which a drafted token is accepted, given that all before it were.

    Attributes
    ----------
    name : str
    rates : tuple of float
        Entry i is for depth i + 1; the last one holds for all that is deeper.
    source : str
        Where they come from.
    options : mapping of str to object
        The method's options that they were measured with, and that a prediction therefore takes.
    """

    name: str
    rates: tuple[float, ...]
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> AcceptanceProfile:
        """Read the name of a profile, or rates such as ``0.9,0.8,0.75``; else ValueError."""
        if text in PROFILES:
            return PROFILES[text]
        try:
            rates = tuple(map(float, text.split(",")))
        except ValueError:
            rates = (math.nan,)
        if not all(0 <= rate <= 1 for rate in rates):
            raise ValueError(
                f"expected {', '.join(PROFILES)}, or rates from 0 to 1 such as 0.9,0.8; "
                f"got '{text}'"
            )
        return cls(text, rates, "given on the command line")

    def rate(self, depth: int) -> float:
        """Return the rate at a depth, counted from 1."""
        return self.rates[min(depth, len(self.rates)) - 1]

    def tokens_per_round(self, depth: int) -> float:
        """Return the mean number of tokens of a round that drafts `depth` levels, with bonus."""
        return 1 + _mean_accepted([self.rate(level) for level in range(1, depth + 1)])


def constant_rate(accepted: float, depth: int) -> float:
    """Return the rate that, the same at every depth, accepts so many of `depth` drafted tokens."""
    if not 0 < accepted < depth:
        raise ValueError(f"accepted must be between 0 and {depth}, got {accepted}")
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        too_few = _mean_accepted([middle] * depth) < accepted
        low, high = (middle, high) if too_few else (low, middle)
    return high


def method_profile(text: str) -> dict[str, AcceptanceProfile]:
    """Read ``vegas=0.95`` or ``longspec=0.8,0.7,0.65``: a method, and what `parse` reads.

    Parameters
    ----------
    text : str

    Returns
    -------
    dict of str to AcceptanceProfile
        Of the one method.

    Raises
    ------
    ValueError
        It has another form, or names no method with a profile.
    """
    method, _, rates = text.partition("=")
    if method not in METHOD_PROFILES:
        raise ValueError(f"expected one of {', '.join(METHOD_PROFILES)} before '=', got {text!r}")
    given = AcceptanceProfile.parse(rates)
    options = {**METHOD_PROFILES[method].options, **given.options}
    return {method: replace(given, options=options)}


def _mean_accepted(rates: list[float]) -> float:
    reached, total = 1.0, 0.0
    for rate in rates:
        reached *= rate
        total += reached
    return total


def _published(
    name: str, accepted: float, depth: int, source: str, options: dict[str, Any]
) -> AcceptanceProfile:
    """Return the constant rate that gives a printed mean: no paper prints rates by position."""
    rate = round(constant_rate(accepted, depth), 3)
    return AcceptanceProfile(name, (rate,), f"the constant rate of {source}", options)


_VEGAS = {"ratio": 0.07, "min_tokens": 256}
_LONGSPEC = {"widths": (4, 16, 16, 16, 16), "window": 512}
_TOKENSWIFT = {"widths": (1, 3, 3, 3), "k": 20, "n": 4, "budget": 4096}
_POSS = {"total_tokens": 60, "width": 10, "window": None}
_PRINTED: tuple[tuple[str, float, int, str, dict[str, Any]], ...] = (
    # Without the bonus token: with it, gamma 7 and 11 would need rates that rise with depth.
    ("vegas-qwen3-8b", 6.11, 7,
     "Vegas table 1: 6.11 of 7 drafted tokens, Qwen3-8B, 7% of the cache, LongBench-v2", _VEGAS),
    ("vegas-gpt-oss-20b", 6.24, 7,
     "Vegas table 1: 6.24 of 7 drafted tokens, gpt-oss-20b, 7% of the cache, LongBench-v2", _VEGAS),
    ("longspec-llama-3.1-8b", 3.28 - 1, 5,
     "LongSpec table 1: a tau of 3.28 at five levels, L-8B on LCC, 69 nodes", _LONGSPEC),
    ("longspec-vicuna-7b", 3.73 - 1, 5,
     "LongSpec table 1: a tau of 3.73 at five levels, V-7B on LCC, 69 nodes", _LONGSPEC),
    ("tokenswift-llama-3.1-8b", 4 * 0.68, 4,
     "TokenSwift table 3: alpha 0.68 of 4 levels, the first 20K tokens generated after 4096, "
     "LLaMA3.1-8b", _TOKENSWIFT),
    ("poss-llama-3-8b", 4.55 - 1, 6,
     "PosS table 1: a tau of 4.55 at depth 6, 60 tokens, Llama-3-8B, PosS-2, mean of six data sets "
     "of short prompts", _POSS),
)  # fmt: skip
PROFILES = {row[0]: _published(*row) for row in _PRINTED}
"""By name."""
METHOD_PROFILES = {
    "vegas": PROFILES["vegas-qwen3-8b"],
    "longspec": PROFILES["longspec-llama-3.1-8b"],
    "tokenswift": PROFILES["tokenswift-llama-3.1-8b"],
    "poss": PROFILES["poss-llama-3-8b"],
}
"""By method, the profile that a prediction takes where none is given."""
