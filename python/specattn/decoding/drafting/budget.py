"""Options of all self-drafting methods: the length of a draft, and its budget of cached tokens."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from specattn.decoding.drafting.gains import NONE, ChainGains, Effort, chains
from specattn.decoding.drafting.pace import Arm, FixedSize
from specattn.decoding.drafting.timings import Memory
from specattn.decoding.engine.contract import DraftContext
from specattn.decoding.engine.method import Method


@dataclass(frozen=True)
class Budgeted(Method):
    """Self-drafting on a share of the cached tokens.

    Parameters
    ----------
    gamma : int or None
        Drafted tokens per round. None: as many as gain the most tokens per second by the times of
        the run's own passes, up to `most_gamma`, or none.
    ratio : float
        Share of the cached tokens that a draft attends to, in (0, 1].
    budget : int, optional
        That many tokens instead, however long the text is.
    min_tokens : int
        Lower bound of the share; shorter texts are attended to whole.
    rejection : bool
        Sample drafts by themselves and test them by the rejection rule. By default they are drawn
        with the target's own noise: then a seed decides the text, whatever is drafted when.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    most_gamma: ClassVar[int] = 4

    gamma: int | None = None
    ratio: float = 0.07
    budget: int | None = None
    min_tokens: int = 256
    rejection: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], got {self.ratio}")
        self._require(1, "gamma", "budget")
        self._require(0, "min_tokens")

    @property
    def max_gamma(self) -> int:
        """The longest draft."""
        return self.most_gamma if self.gamma is None else self.gamma

    @property
    def max_nodes(self) -> int:
        """The root and the longest draft."""
        return self.max_gamma + 1

    def clipped(self, depth: int) -> Budgeted:
        """Return this method with no larger `gamma` than `depth`, and 1 at least."""
        if self.gamma is None:
            return self
        return replace(self, gamma=max(1, min(self.gamma, depth)))

    @property
    def efforts(self) -> list[Effort]:
        """The drafts that are chosen from by their times; a single one is not timed."""
        return chains(self.max_gamma) if self.gamma is None else [Effort(1, self.gamma)]

    def arm(self, context: DraftContext, passes: Hashable = "passes") -> FixedSize:
        """Return what chooses the length of each draft; arguments as for `Arm`."""
        efforts = self.efforts if context.target.full_layers else [NONE]
        if len(efforts) == 1:
            return FixedSize(efforts[0])
        kind = f"{self.name}, {self.share()}"
        sizes = [effort.depth + 1 for effort in efforts]
        return Arm(Memory.of(context), kind, efforts, sizes, ChainGains, passes)

    def share(self, unit: int = 1) -> dict[str, Any]:
        """Return the budget as `select_topk` takes it, counted in pieces of `unit` tokens."""
        if self.budget is not None:
            return {"budget": -(-self.budget // unit)}
        return {"ratio": self.ratio, "min_tokens": -(-self.min_tokens // unit)}
