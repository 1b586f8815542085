"""Methods that draft trees as EAGLE-2 grows them, by a drafter on the target's features."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from specattn.decoding.drafting.calibrating import pass_sizes
from specattn.decoding.drafting.gains import Effort, TreeGains, beams
from specattn.decoding.drafting.pace import FixedSize, PacedDrafter, Share
from specattn.decoding.drafting.pairs import PairBlock
from specattn.decoding.drafting.trained import D, Trained
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter, Verified
from specattn.decoding.text.statistics import Stopwatch
from specattn.tree import Tree

MOST_TOKENS = 60
"""Nodes of the largest tree that is verified unless a size is given."""


@dataclass(frozen=True)
class Grown(Trained[D]):
    """Drafting by trees that are grown level by level.

    They are chosen by rank, at every temperature, so the target's own sample decides at every node
    and its distribution is preserved, the bonus token's too.

    Parameters
    ----------
    drafter
        As for `Trained`.
    width : int
        Nodes that are expanded per level, and children of each.
    depth : int
        Levels below the root.
    total_tokens : int or None
        Nodes that are verified, the root included, of trees as wide and deep as said. None: trees
        that are up to so wide and deep, and up to `MOST_TOKENS` nodes of them, as gain the most
        tokens per second by the times of the run's own rounds, or none.
    window : int, optional
        Positions that the drafter looks back; by default all. Drafters of short rows may gain by a
        window in long texts.
    """

    reads_features = True

    width: int = 10
    depth: int = 6
    total_tokens: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        self._require(1, "width", "depth", "window")
        self._require(2, "total_tokens")

    @property
    def max_nodes(self) -> int:
        """The largest tree that may be verified."""
        return min(
            self.total_tokens or MOST_TOKENS, 1 + self.width + (self.depth - 1) * self.width**2
        )

    def clipped(self, depth: int) -> Self:
        """Return this method with at most `depth` levels, and 1 at least."""
        return replace(self, depth=max(1, min(self.depth, depth)))

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter for one run."""
        return _GrownDrafter(self.block(context, 1 + self.width * (self.depth - 1)), self, context)

    @abstractmethod
    def block(self, context: DraftContext, nodes: int) -> PairBlock:
        """Return the drafter beside the target of a run, with room for so many expanded nodes."""


class _GrownDrafter(PacedDrafter):
    def __init__(self, block: PairBlock, method: Grown, context: DraftContext):
        self.block, self.sequences, self.most_rows = block, block.sequences, method.max_nodes
        self.arm = FixedSize(Effort(method.width, method.depth), method.total_tokens)
        if method.total_tokens is None:
            efforts, sizes = (
                beams(method.width, method.depth),
                pass_sizes(context, method.max_nodes),
            )
            self.arm = Share(context, method.name, efforts, sizes, TreeGains, self.attempt)
        block.given = self.arm.effort.depth
        device = block.target.device
        self.watch = Stopwatch(device)
        self.root_alone = Tree.chain(0, device=device)

    def on_prefill(self, start: int, features: Sequence[torch.Tensor]) -> None:
        self.block.on_prefill(start, features)

    def draft(self, root: torch.Tensor, effort: Effort) -> Draft:
        """Return the tree that was grown, or what pays of it."""
        if not effort.depth:
            return Draft(self.root_alone, root[:, None])
        self.watch.lap("elsewhere")
        self.block.catch_up()
        self.watch.lap("catch_up_seconds")
        grown = self.block.grow(root, effort.width, effort.depth)
        self.watch.lap("layer_seconds")
        draft = grown.best(self.arm.rows(effort, 1 + grown.scores.shape[1], grown.nodes))
        self.watch.lap("tree_seconds")
        return draft

    def attempt(self, root: torch.Tensor, effort: Effort) -> None:
        self.block.catch_up()
        self.block.grow(root, effort.width, effort.depth)

    def observe(self, verified: Verified) -> None:
        self.block.accept(verified)
        super().observe(verified)

    def compact(self, rows: list[int]) -> None:
        self.block.compact(rows)

    def details(self) -> dict[str, Any]:
        """Return the parts of drafting, in seconds of the whole run."""
        seconds = self.watch.totals()
        seconds.pop("elsewhere", None)
        return {**seconds, **self.arm.details()}
