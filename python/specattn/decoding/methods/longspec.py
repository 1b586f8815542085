"""LongSpec: draft with one trained block that reads the target's last layer where it is cached.

A tree is grown by beam search over the drafter's cumulative log-probability. Nodes that leave the
beam stay in the tree, so the drafter's keys and values never move while drafting; the target
verifies all nodes in one pass, or the most probable of them. (*LongSpec: Long-Context Lossless
Speculative Decoding with Efficient Drafting and Verification*, arXiv 2502.17421, section 3 and
appendix D.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from specattn.decoding.drafting.calibrating import pass_sizes
from specattn.decoding.drafting.chain import ChainBuilder
from specattn.decoding.drafting.gains import ChainGains, Effort, Nodes, TreeGains, beams, chains
from specattn.decoding.drafting.pace import FixedSize, PacedDrafter, Share
from specattn.decoding.drafting.pruning import pruned
from specattn.decoding.drafting.trained import Trained, check_widths
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter, Verified
from specattn.decoding.methods.longspec_block import DraftBlock
from specattn.drafters import LongSpecDrafter
from specattn.tree import Tree

MOST_WIDTHS = (4, 16, 16, 16, 16)
"""Levels of the largest tree unless one is given."""

MOST_GAMMA = 8
"""Tokens of the longest chain unless a length is given."""


@dataclass(frozen=True)
class LongSpec(Trained[LongSpecDrafter], name="longspec"):
    """Drafting with a trained block, as a tree or as a chain.

    Trees are chosen by rank, at every temperature; chains are greedy at temperature 0 and drawn
    from the drafter's own distribution, shaped by the same processors as the target's, above it.
    Both preserve the target's distribution.

    Parameters
    ----------
    drafter : LongSpecDrafter or path, optional
        A drafter, or the folder that holds one. By default the folder ``longspec`` within the
        target's. A path is loaded once; a drafter is used as it is.
    widths : sequence of int or None
        Nodes per level of the tree, the level below the root first. None: of `MOST_WIDTHS` as wide
        and deep a part, and of its nodes the most probable, as gain the most tokens per second by
        the times of the run's own rounds, or none.
    nodes : int, optional
        Verify so many of a tree's drafted nodes, best first: those with the most probable paths. Of
        levels of `nodes` nodes and more these are the best that there are. Without `widths` the
        levels are those of `MOST_WIDTHS`, no wider than `nodes`.
    gamma : int or "auto", optional
        Draft a chain of so many tokens instead of a tree; "auto": as many as pay, up to
        `MOST_GAMMA`, or none.
    rejection : bool
        Sample a chain by itself and test it by the rejection rule. By default it is drawn with the
        target's own noise: then a seed decides the text, whatever is drafted.

    Raises
    ------
    ValueError
        A parameter is out of range. From `prepared`, and so when a run starts: there is no drafter,
        or it does not fit the target, or its window is shorter than the draft is deep.
    """

    kind = LongSpecDrafter

    widths: tuple[int, ...] | None = None
    nodes: int | None = None
    gamma: int | Literal["auto"] | None = None
    rejection: bool = False

    def __post_init__(self) -> None:
        check_widths(self)
        self._require(1, "nodes", *(["gamma"] if self.gamma != "auto" else []))
        if self.nodes is not None and self.gamma is not None:
            raise ValueError(f"nodes={self.nodes} are of a tree, gamma={self.gamma} is of a chain")

    @property
    def max_nodes(self) -> int:
        """The root and all levels."""
        return 1 + sum(self._levels)

    def clipped(self, depth: int) -> LongSpec:
        """Return this method with at most `depth` levels, and 1 at least."""
        if isinstance(self.gamma, int):
            return replace(self, gamma=max(1, min(self.gamma, depth)))
        if self.gamma is None and (self.widths is not None or self.nodes is not None):
            return replace(self, widths=self._levels[: max(1, depth)])
        return self

    @property
    def _levels(self) -> tuple[int, ...]:
        """Nodes per level of the largest draft; where none is given, no deeper than the window."""
        if isinstance(self.gamma, int):
            return (1,) * self.gamma
        if self.gamma is None and self.widths is not None:
            return self.widths
        levels = MOST_WIDTHS if self.gamma is None else (1,) * MOST_GAMMA
        levels = tuple(min(width, self.nodes or width) for width in levels)
        drafter = self.drafter
        depth = drafter.config.window - 1 if isinstance(drafter, LongSpecDrafter) else len(levels)
        return levels[: max(1, depth)]

    def prepared(self, model: PreTrainedModel) -> LongSpec:
        """Return this method with its drafter loaded and found to fit `model`."""
        method = super().prepared(model)
        config, levels = cast(LongSpecDrafter, method.drafter).config, method._levels
        window, depth = config.window, len(levels)
        if window <= depth:
            raise ValueError(
                f"the drafter's window of {window} must be greater than the depth of the draft, "
                f"{depth}"
            )
        vocabulary, above = config.vocab_size, 1
        for level, width in enumerate(levels, start=1):
            if width > above * vocabulary:
                raise ValueError(
                    f"widths: {above} nodes have {above * vocabulary} children over this "
                    f"vocabulary, not the {width} of level {level}"
                )
            above = width
        return method

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter for one run."""
        method = self.prepared(context.target.model)
        module, levels = method.loaded(context.target.model), method._levels
        block = DraftBlock(module, context, 1 + sum(levels), len(levels))
        most = None if self.nodes is None else self.nodes + 1
        arm = FixedSize(Effort(max(levels), len(levels)), most)
        if self.gamma is not None:
            chain = ChainBuilder(len(levels), context, rejection=self.rejection)
            drafter: _BlockDrafter = _ChainDrafter(block, chain, arm)
            if self.gamma == "auto":
                efforts = chains(len(levels))
                sizes = [1, *(effort.depth + 1 for effort in efforts)]
                given: Any = ("longspec, chain", efforts, sizes, ChainGains, drafter.attempt)
                drafter.arm = Share(context, *given)
            else:
                block.given = levels
            return drafter
        drafter = _TreeDrafter(block, levels, arm)
        if self.widths is None and self.nodes is None:
            efforts, sizes = beams(max(levels), len(levels)), pass_sizes(context, 1 + sum(levels))
            drafter.arm = Share(context, "longspec", efforts, sizes, TreeGains, drafter.attempt)
        else:
            block.given = levels
        return drafter


class _BlockDrafter(PacedDrafter):
    """What trees and chains share: the block follows the accepted path.

    Of rounds without a draft it reads the text before the next one that has one.
    """

    def __init__(self, block: DraftBlock, arm: FixedSize, most_rows: int):
        self.block, self.arm, self.sequences = block, arm, block.sequences
        self.most_rows = most_rows
        self.kept: torch.Tensor | None = None  # which of the block's nodes are verified

    def observe(self, verified: Verified) -> None:
        super().observe(verified)
        if verified.own and verified.draft.tree.size > 1:
            self.block.accept(verified.prefix, verified.accepted.nodes, self.kept)
        else:
            self.block.follow(max(verified.counts))

    def compact(self, rows: list[int]) -> None:
        self.block.compact(rows)


class _TreeDrafter(_BlockDrafter):
    """Beam search that drops nothing before the tree is grown."""

    def __init__(self, block: DraftBlock, widths: tuple[int, ...], arm: FixedSize):
        super().__init__(block, arm, 1 + sum(widths))
        self.widths = widths
        self.chains = [Tree.chain(n, device=block.storage.device) for n in range(len(widths) + 1)]

    def attempt(self, root: torch.Tensor, effort: Effort) -> tuple[Draft, torch.Tensor]:
        """Return the whole tree of an effort, and its nodes' scores."""
        return self.block.grow(root, self._widths(effort))

    def _widths(self, effort: Effort) -> tuple[int, ...]:
        return tuple(min(width, effort.width) for width in self.widths[: effort.depth])

    def draft(self, root: torch.Tensor, effort: Effort) -> Draft:
        self.kept = None
        if not effort.depth:
            return Draft(self.chains[0], root[:, None])
        (grown, scores), widths = self.attempt(root, effort), self._widths(effort)
        drafted = grown.tokens[:, 1:], scores[:, 1:], grown.tree.parents[:, 1:] - 1
        nodes = lambda: Nodes(*drafted, *_places(widths))  # noqa: E731
        count = self.arm.rows(effort, grown.tree.size, nodes) - 1
        if max(widths) == 1:  # the most probable nodes of a path are its first
            return Draft(self.chains[count], grown.tokens[:, : count + 1])
        if count == grown.tree.size - 1:
            return grown
        draft, kept = pruned(root, *drafted, count, depth=len(widths), width=max(widths))
        self.kept = torch.nn.functional.pad(kept + 1, (1, 0))
        return draft


class _ChainDrafter(_BlockDrafter):
    """One path, drawn from the drafter's distribution as the target's tokens are from its own."""

    def __init__(self, block: DraftBlock, chain: ChainBuilder, arm: FixedSize):
        super().__init__(block, arm, len(chain.trees))
        self.chain = chain
        self.probs: list[torch.Tensor] = []

    def draft(self, root: torch.Tensor, effort: Effort) -> Draft:
        self.probs = []
        if not effort.depth:
            return self.chain.draft(root[:, None], self.probs)
        widths, sampler = (1,) * effort.depth, self.chain.sampler
        draw, drawing = None if sampler.takes_largest else self._draw, None
        if draw is not None and not (self.chain.rejection or self.block.programs.in_python):
            drawing = sampler.drawing(root.device)
        grown, _ = self.block.grow(root, widths, draw, drawing)
        return self.chain.draft(grown.tokens, self.probs)

    def attempt(self, root: torch.Tensor, effort: Effort) -> None:
        self.draft(root, effort)

    def _draw(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        step = tokens.shape[1] - 1
        return self.chain.draw(logits, self.chain.trees[step], tokens, step, self.probs)


@cache
def _places(widths: tuple[int, ...]) -> Any:
    """Return level and rank of every drafted node, int [2, nodes]."""
    levels = [np.full(width, level) for level, width in enumerate(widths, start=1)]
    return np.stack([np.concatenate(levels), np.concatenate([*map(np.arange, widths)])])
