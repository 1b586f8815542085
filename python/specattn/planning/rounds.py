"""The rounds of each method: what is drafted, verified and accepted, in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specattn.ops.hybrid_tree_attention import cost as hybrid_cost

from .acceptance import Profile
from .passes import PassTime, Setting, attention_sizes, pass_time, select_time

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24)
RATIO = 0.07  # the share of the cache that the profile of Vegas was measured with
MIN_TOKENS = 256
TREE = (4, 16, 16, 16, 16)  # LongSpec's beam widths, for which its profile was measured
WINDOW = 512
HEADS, NGRAMS, BUDGET = (1, 3, 3, 3), 20, 4096  # TokenSwift's tree, n-grams and partial cache
DEPTHS, TOTAL_TOKENS = range(2, 9), 60  # of PosS' trees


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


def plain_round(setting: Setting) -> Round:
    """Predict one step of plain decoding."""
    return Round(0.0, pass_time(setting, 1), _accept(setting))


def vegas_round(
    setting: Setting, gamma: int = 6, ratio: float = RATIO, min_tokens: int = MIN_TOKENS
) -> Round:
    """Predict a round in which the target drafts `gamma` tokens on what it selected before."""
    selected = max(min_tokens, round(ratio * setting.context))
    draft = gamma * pass_time(setting, 1, selected=selected).total
    verify = pass_time(setting, gamma + 1, collect=True)
    return Round(draft + select_time(setting, selected), verify, _accept(setting))


def longspec_round(setting: Setting, widths: Sequence[int] = TREE) -> Round:
    """Predict a round in which one block drafts a beam of tokens, level by level."""
    model, levels = setting.model, [1, *widths]
    cross = 2 * model.hidden * model.head_dim * model.q_heads  # its attention to the last layer
    keys = [min(WINDOW, setting.context), setting.context]
    draft = sum(_drafter_step(setting, rows, cross, keys) for rows in levels[:-1])
    return Round(draft, pass_time(setting, sum(levels)), _accept(setting))


def tokenswift_round(
    setting: Setting,
    widths: Sequence[int] = HEADS,
    k: int = NGRAMS,
    n: int = 4,
    budget: int = BUDGET,
) -> Round:
    """Predict a round of one pass over a partial cache, its heads, and a tree of n-grams too.

    The tree has its most nodes: no n-gram begins like another one, or like the heads' guesses.
    """
    model, heads = setting.model, len(widths) - 1
    tokens, square = setting.batch * heads, model.hidden**2
    elements = heads * square + model.head_weights
    operations = 2 * tokens * (square + model.head_weights)
    guesses = setting.machine.seconds("linear", tokens, setting.size * elements, operations)
    draft = pass_time(setting, 1, selected=budget).total + (guesses if heads else 0.0)
    nodes = sum(math.prod(widths[:depth]) for depth in range(len(widths) + 1)) + k * (n - 1)
    return Round(draft, pass_time(setting, nodes), _accept(setting))


def poss_round(
    setting: Setting,
    depth: int = 6,
    total_tokens: int = TOTAL_TOKENS,
    width: int = 10,
    window: int | None = None,
) -> Round:
    """Predict a round of a dynamic tree, root included: one layer on features, level by level."""
    fused = 2 * setting.model.hidden**2  # makes one of a token's embedding and a feature
    keys = [min(window or setting.context, setting.context)]
    rows = [1] + [width] * (depth - 1)
    draft = sum(_drafter_step(setting, count, fused, keys) for count in rows)
    return Round(draft, pass_time(setting, total_tokens), _accept(setting))


def _vegas(setting: Setting, profile: Profile) -> Iterator[tuple[str, Round, float]]:
    for gamma in GAMMAS:
        settings = f"gamma {gamma}, {RATIO:.0%} of the cache"
        yield settings, vegas_round(setting, gamma), profile.tokens_per_round(gamma)


def _longspec(setting: Setting, profile: Profile) -> Iterator[tuple[str, Round, float]]:
    for depth in range(1, len(TREE) + 1):
        widths = TREE[:depth]
        settings = f"tree of widths {', '.join(map(str, widths))}"
        yield settings, longspec_round(setting, widths), profile.tokens_per_round(depth)


def _tokenswift(setting: Setting, profile: Profile) -> Iterator[tuple[str, Round, float]]:
    settings = f"ranks {', '.join(map(str, HEADS))} and n-grams, {BUDGET} cached"
    yield settings, tokenswift_round(setting), profile.tokens_per_round(len(HEADS))


def _poss(setting: Setting, profile: Profile) -> Iterator[tuple[str, Round, float]]:
    for depth in DEPTHS:
        settings = f"tree of {TOTAL_TOKENS} tokens, depth {depth}"
        yield settings, poss_round(setting, depth), profile.tokens_per_round(depth)


CANDIDATES = {"vegas": _vegas, "longspec": _longspec, "tokenswift": _tokenswift, "poss": _poss}
"""By method, what yields the settings that are searched, their rounds and tokens per round."""


def _accept(setting: Setting) -> float:
    """Return the time of acceptance and commit: about as many operators as a layer has."""
    return setting.machine.layer_seconds if setting.eager else 0.0


def _drafter_step(setting: Setting, rows: int, elements: int, keys: Sequence[int]) -> float:
    """Predict a step of a one-layer drafter: `elements` beside a layer's, attention to `keys`."""
    model, machine, tokens = setting.model, setting.machine, setting.batch * rows
    elements += model.attention_weights + model.mlp_weights + model.head_weights
    weights = machine.seconds("linear", tokens, setting.size * elements, 2 * tokens * elements)
    attention = 0.0
    for count in keys:
        cost = hybrid_cost(attention_sizes(setting, rows, count))
        packed = rows * model.q_heads // model.kv_heads
        attention += machine.seconds("hybrid_tree_attention", packed, cost.bytes, cost.operations)
    # Its children are chosen on the host's command: about as many operators as a layer has.
    host = 2 * machine.layer_seconds if setting.eager else 0.0
    return PassTime(weights, attention, host, machine.overlaps).total
