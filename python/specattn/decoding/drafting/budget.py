"""Options of all self-drafting methods: length of a draft, weights, and cached tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from transformers import PreTrainedModel

from specattn.decoding.drafting.gains import Effort, chains
from specattn.decoding.engine.method import Method
from specattn.decoding.model.quantised import QUANTIZE, quantised


@dataclass(frozen=True)
class SelfDrafting(Method):
    """Chains that the target drafts for itself.

    Parameters
    ----------
    gamma : int or None
        Drafted tokens of every round. None: as many as gain the most tokens per second by what
        rounds take, up to `most_gamma`, or none.
    rejection : bool
        Sample drafts by themselves and test them by the rejection rule. By default they are drawn
        with the target's own noise: then a seed decides the text, whatever is drafted when.
    weights : {"int8", "int4", "fp8"}, optional
        Draft with the target's weights rounded to so few bits: they are made once, and
        remembered with the target (`quantised`). By default with its own.

    Raises
    ------
    ValueError
        A parameter is out of range. From `prepared`, and so when a run starts: the target's weights
        cannot be rounded.
    """

    most_gamma: ClassVar[int] = 4

    gamma: int | None = None
    rejection: bool = field(default=False, kw_only=True)
    weights: Literal["int8", "int4", "fp8"] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._require(1, "gamma")
        if self.weights is not None and self.weights not in QUANTIZE:
            known = ", ".join(QUANTIZE)
            raise ValueError(f"weights must be one of {known} or None, got {self.weights!r}")

    @property
    def max_gamma(self) -> int:
        """The longest draft."""
        return self.most_gamma if self.gamma is None else self.gamma

    @property
    def max_nodes(self) -> int:
        """The root and the longest draft."""
        return self.max_gamma + 1

    def prepared(self, model: PreTrainedModel) -> Self:
        """Return this method; the weights that it drafts with are made."""
        if self.weights is not None:
            quantised(model, self.weights, "weights")
        return self

    def clipped(self, depth: int) -> Self:
        """Return this method with no larger `gamma` than `depth`, and 1 at least."""
        if self.gamma is None:
            return self
        return replace(self, gamma=max(1, min(self.gamma, depth)))

    @property
    def efforts(self) -> list[Effort]:
        """The drafts that are chosen from, none apart; with a given `gamma` there is no choice."""
        return chains(self.max_gamma) if self.gamma is None else []

    def share(self, unit: int = 1) -> dict[str, Any]:
        """Return what of the cache a draft reads, as `select_topk` takes it: here, everything."""
        return {}


@dataclass(frozen=True)
class Budgeted(SelfDrafting):
    """Self-drafting on a share of the cached tokens.

    Parameters
    ----------
    gamma, rejection, weights
        As for `SelfDrafting`.
    ratio : float
        Share of the cached tokens that a draft attends to, in (0, 1].
    budget : int, optional
        That many tokens instead, however long the text is.
    min_tokens : int
        Lower bound of the share; shorter texts are attended to whole.

    Raises
    ------
    ValueError
        As for `SelfDrafting`.
    """

    ratio: float = 0.07
    budget: int | None = None
    min_tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], got {self.ratio}")
        self._require(1, "budget")
        self._require(0, "min_tokens")

    def share(self, unit: int = 1) -> dict[str, Any]:
        """Return the budget as `select_topk` takes it, counted in pieces of `unit` tokens."""
        if self.budget is not None:
            return {"budget": -(-self.budget // unit)}
        return {"ratio": self.ratio, "min_tokens": -(-self.min_tokens // unit)}
