"""Predicts the time of a round of each method: drafting, verification and acceptance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .acceptance import AcceptanceProfile
from .passes import PassTime, Workload, pass_time, select_time

# What is searched beside the options that a profile was measured with.
GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24)
DEPTHS = range(2, 9)  # of PosS' trees


@dataclass(frozen=True)
class Round:
    """Seconds of one round: everything before verification, that pass, and acceptance."""

    draft: float
    verify: PassTime
    accept: float

    @property
    def total(self) -> float:
        """Seconds from one committed token to the next ones."""
        return self.draft + self.verify.total + self.accept


def plain_round(workload: Workload) -> Round:
    """Predict one step of plain decoding."""
    return Round(0.0, pass_time(workload, 1), _accept(workload))


def vegas_round(workload: Workload, gamma: int, ratio: float, min_tokens: int) -> Round:
    """Predict a round in which the target drafts `gamma` tokens on what it selected before."""
    selected = max(min_tokens, round(ratio * workload.context))
    draft = gamma * pass_time(workload, 1, selected=selected).total
    verify = pass_time(workload, gamma + 1, collect=True)
    return Round(draft + select_time(workload, selected), verify, _accept(workload))


def longspec_round(workload: Workload, widths: Sequence[int], window: int) -> Round:
    """Predict a round in which one block drafts a beam of tokens, level by level."""
    model, levels = workload.model, [1, *widths]
    cross = 2 * model.hidden * model.head_dim * model.q_heads  # its attention to the last layer
    keys = [min(window, workload.context), workload.share(workload.context)]
    draft = sum(_drafter_step(workload, rows, cross, keys) for rows in levels[:-1])
    draft += sum(workload.exchange(rows) for rows in levels[:-1])  # of the target's last layer
    return Round(draft, pass_time(workload, sum(levels)), _accept(workload))


def tokenswift_round(
    workload: Workload, widths: Sequence[int], k: int, n: int, budget: int
) -> Round:
    """Predict a round of one pass over a partial cache, its heads, and a tree of n-grams too.

    The tree is the largest possible: no n-gram begins like another one, or like the heads' guesses.
    """
    model, heads = workload.model, len(widths) - 1
    each, head = model.hidden**2, model.head_weights
    guesses = workload.products(heads, heads * each + head, each + head)
    draft = pass_time(workload, 1, selected=budget).total + (guesses if heads else 0.0)
    nodes = sum(math.prod(widths[:depth]) for depth in range(len(widths) + 1)) + k * (n - 1)
    return Round(draft, pass_time(workload, nodes), _accept(workload))


def poss_round(
    workload: Workload, depth: int, total_tokens: int, width: int, window: int | None
) -> Round:
    """Predict a round of a dynamic tree, root included: one layer on features, level by level."""
    fused = 2 * workload.model.hidden**2  # makes one of a token's embedding and a feature
    keys = [min(window or workload.context, workload.context)]
    rows = [1] + [width] * (depth - 1)
    draft = sum(_drafter_step(workload, count, fused, keys) for count in rows)
    return Round(draft, pass_time(workload, total_tokens), _accept(workload))


ROUNDS: dict[str, Callable[..., Round]] = {
    "plain": plain_round,
    "vegas": vegas_round,
    "longspec": longspec_round,
    "tokenswift": tokenswift_round,
    "poss": poss_round,
}

Candidates = Iterator[tuple[str, Round, float]]
"""Settings in words, their round, and the mean number of tokens that it yields."""


def _vegas(workload: Workload, profile: AcceptanceProfile) -> Candidates:
    for gamma in GAMMAS:
        one = vegas_round(workload, gamma, **profile.options)
        settings = f"gamma {gamma}, {profile.options['ratio']:.0%} of the cache"
        yield settings, one, profile.tokens_per_round(gamma)


def _longspec(workload: Workload, profile: AcceptanceProfile) -> Candidates:
    whole, window = profile.options["widths"], profile.options["window"]
    for depth in range(1, len(whole) + 1):
        widths = whole[:depth]
        settings = f"tree of widths {', '.join(map(str, widths))}"
        yield settings, longspec_round(workload, widths, window), profile.tokens_per_round(depth)


def _tokenswift(workload: Workload, profile: AcceptanceProfile) -> Candidates:
    widths, budget = profile.options["widths"], profile.options["budget"]
    settings = f"ranks {', '.join(map(str, widths))} and n-grams, {budget} cached"
    one = tokenswift_round(workload, **profile.options)
    yield settings, one, profile.tokens_per_round(len(widths))


def _poss(workload: Workload, profile: AcceptanceProfile) -> Candidates:
    for depth in DEPTHS:
        settings = f"tree of {profile.options['total_tokens']} tokens, depth {depth}"
        one = poss_round(workload, depth, **profile.options)
        yield settings, one, profile.tokens_per_round(depth)


CANDIDATES = {"vegas": _vegas, "longspec": _longspec, "tokenswift": _tokenswift, "poss": _poss}
"""By method, what is searched."""


def _accept(workload: Workload) -> float:
    """Return the time of acceptance and commit: about as many operators as a layer has."""
    return workload.machine.layer_seconds if workload.eager else 0.0


def _drafter_step(workload: Workload, rows: int, elements: int, keys: Sequence[int]) -> float:
    """Predict a step of a one-layer drafter: `elements` beside a layer's, attention to `keys`."""
    model, machine = workload.model, workload.machine
    elements += model.attention_weights + model.mlp_weights + model.head_weights
    weights = workload.products(rows, elements, elements)
    attention = sum(workload.attention(rows, count) for count in keys)
    # Its children are chosen on the host's command: about as many operators as a layer has.
    host = 2 * machine.layer_seconds if workload.eager else 0.0
    return PassTime(weights, attention, host, machine.overlaps).total
