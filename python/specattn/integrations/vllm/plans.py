"""What the requests of a step may draft, and what that is expected to bring and to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specattn.decoding.drafting.pacer import AGAIN

from .steps import Steps

NOTHING, TEXTS, OWN = "nothing", "texts", "own"
"""Sources of drafts: none, what texts offer, and the target itself."""


class Plan(NamedTuple):
    """What a step drafts: `tokens` are what each request gets in the mean, in `seconds`.

    `taken` are the tokens that each request drafts of what its text offers. Those that are `own`
    draft chains of `depth` tokens by the target instead.
    """

    source: str
    taken: list[int]
    tokens: float
    seconds: float
    depth: int = 0
    own: Sequence[bool] = ()

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def from_texts(steps: Steps, chances: Sequence[Sequence[float]]) -> list[Plan]:
    """Return plans: to draft nothing, what pays of the texts' likeliest tokens, the best of more.

    `chances` are those of each request that the tokens which its text offers are accepted.
    """
    count = len(chances)
    plans = [Plan(NOTHING, [0] * count, 1.0, steps.plain)]
    offered = [(-one, depth, n) for n, path in enumerate(chances) for depth, one in enumerate(path)]
    if not offered:
        return plans
    offered.sort()
    rooms = steps.rooms(len(offered))
    gains = np.cumsum([count, *(-chance for chance, *_ in offered)]) / count
    tokens, seconds = gains[np.minimum(rooms, len(offered))], steps.seconds(count + rooms)
    for at in _best_and_beyond(tokens[1:] / seconds[1:]):
        requests = [request for *_, request in offered[: rooms[at + 1]]]
        taken = np.bincount(requests, minlength=count).tolist()
        plans.append(Plan(TEXTS, taken, float(tokens[at + 1]), float(seconds[at + 1])))
    return plans


def from_target(
    steps: Steps, taken: list[int], promised: Any, gains: Any, depths: Any, share: float
) -> list[Plan]:
    """Return plans in which the target drafts for itself: as deep as pays, and the best of deeper.

    Chains of `depths`, ascending, bring requests `gains` [B, depths]. They are drafted where that
    is more than what is `taken` of texts, `promised` [B], brings; everywhere if it is nowhere.
    `share`: see `Steps.drafts`.
    """
    own = gains >= promised[:, None]
    own |= ~own.any(0)
    tokens = 1 + np.where(own, gains, promised[:, None]).mean(0)
    drafted = np.where(own, depths, np.array(taken)[:, None]).sum(0)
    seconds = steps.drafts(depths, share) + steps.seconds(steps.rows(drafted))
    given = zip(tokens.tolist(), seconds.tolist(), depths.tolist(), own.T.tolist(), strict=True)
    found = [Plan(OWN, taken, *one) for one in given]
    return [found[at] for at in _best_and_beyond(tokens / seconds)]


def _best_and_beyond(rates: Any) -> list[int]:
    """Return where rates are highest, and where they are of those behind, if there are any."""
    best = int(rates.argmax())
    beyond = rates[best + 1 :]
    return [best, best + 1 + int(beyond.argmax())] if len(beyond) else [best]


def choose(plans: Sequence[Plan], last: dict[str, float], elapsed: float) -> tuple[Plan, Plan]:
    """Return what is done now, and the fastest: mostly the same.

    What seems to lose is done again when that costs little of the time since the `last` time.
    """
    best = max(plans, key=lambda one: one.rate)
    for one in plans if best.rate else ():
        due = AGAIN * (elapsed - last.get(one.source, 0.0))
        if one is not best and one.seconds - one.tokens / best.rate < due:
            return one, best
    return best, best
