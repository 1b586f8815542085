"""LongSpec: draft with one trained block that reads the target's last layer where it is cached.

A tree is grown by beam search over the drafter's cumulative log-probability. Nodes that leave the
beam stay in the tree, so the drafter's keys and values never move while drafting; the target
verifies all nodes in one pass. (*LongSpec: Long-Context Lossless Speculative Decoding with
Efficient Drafting and Verification*, arXiv 2502.17421, section 3 and appendix D.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from specattn.decoding.drafting import Draft, DraftContext, Drafter, Verified
from specattn.decoding.method import Method
from specattn.decoding.methods.chain import ChainBuilder
from specattn.decoding.methods.longspec_block import DraftBlock
from specattn.decoding.methods.trained import fitting_drafter
from specattn.drafters import LongSpecDrafter
from specattn.reference.tree_mask import pack_tree_mask
from specattn.tree import Tree

if TYPE_CHECKING:
    from specattn.decoding.methods.longspec_static import StaticTree


@dataclass(frozen=True)
class LongSpec(Method, name="longspec"):
    """Drafting with a trained block, as a tree or as a chain.

    Trees are chosen by rank, at every temperature; chains are greedy at temperature 0 and drawn
    from the drafter's own distribution, shaped by the same processors as the target's, above it.
    Both preserve the target's distribution.

    Parameters
    ----------
    drafter : LongSpecDrafter or path, optional
        A drafter, or the folder that holds one. By default the folder ``longspec`` within the
        target's. A path is loaded for every run; a drafter is used as it is.
    widths : sequence of int
        Nodes per level of the tree, the level below the root first.
    gamma : int, optional
        Draft a chain of so many tokens instead of a tree.
    rejection : bool
        Sample a chain by itself and test it by the rejection rule. By default it is drawn with the
        target's own noise: then a seed decides the text, whatever is drafted.

    Raises
    ------
    ValueError
        A parameter is out of range. From `prepared`, and so when a run starts: there is no drafter,
        or it does not fit the target, or its window is shorter than the draft is deep.
    """

    drafter: LongSpecDrafter | Path | str | None = None
    widths: tuple[int, ...] = (4, 16, 16, 16, 16)
    gamma: int | None = None
    rejection: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"widths must be one or more positive numbers, got {self.widths}")
        if self.gamma is not None and self.gamma < 1:
            raise ValueError(f"gamma must be at least 1, got {self.gamma}")

    @property
    def max_nodes(self) -> int:
        """The root and all levels."""
        return 1 + sum(self._levels)

    def clipped(self, depth: int) -> LongSpec:
        """Return this method with at most `depth` levels, and 1 at least."""
        if self.gamma is None:
            return replace(self, widths=self.widths[: max(1, depth)])
        return replace(self, gamma=max(1, min(self.gamma, depth)))

    @property
    def _levels(self) -> tuple[int, ...]:
        return self.widths if self.gamma is None else (1,) * self.gamma

    def prepared(self, model: PreTrainedModel) -> LongSpec:
        """Return this method with its drafter loaded and found to fit `model`."""
        drafter = fitting_drafter(LongSpecDrafter, self.drafter, model)
        window, depth = drafter.config.window, len(self._levels)
        if window <= depth:
            raise ValueError(
                f"the drafter's window of {window} must be greater than the depth of the draft, "
                f"{depth}"
            )
        vocabulary, above = drafter.config.vocab_size, 1
        for level, width in enumerate(self._levels, start=1):
            if width > above * vocabulary:
                raise ValueError(
                    f"widths: {above} nodes have {above * vocabulary} children over this "
                    f"vocabulary, not the {width} of level {level}"
                )
            above = width
        return replace(self, drafter=drafter)

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter for one run."""
        module = self.prepared(context.target.model).drafter
        assert isinstance(module, LongSpecDrafter)
        block = DraftBlock(module.eval(), context, self.max_nodes, len(self._levels))
        if self.gamma is not None:
            return _ChainDrafter(block, ChainBuilder(self.gamma, context, rejection=self.rejection))
        return _TreeDrafter(block, self.widths)


class _BlockDrafter(Drafter):
    """What trees and chains share: the block follows the accepted path."""

    def __init__(self, block: DraftBlock):
        self.block = block

    def observe(self, verified: Verified) -> None:
        self.block.accept(verified.prefix, verified.accepted.nodes)

    def compact(self, rows: list[int]) -> None:
        self.block.compact(rows)


class _TreeDrafter(_BlockDrafter):
    """Beam search that drops nothing."""

    def __init__(self, block: DraftBlock, widths: tuple[int, ...]):
        super().__init__(block)
        self.widths = widths
        self.static: StaticTree | None = None
        static = block.target.static
        if static is not None and static.parts.is_plain_outside:
            from specattn.decoding.methods.longspec_static import StaticTree  # the C++ kernels

            self.static = StaticTree(block, static)
        # Which bit of a packed mask each node is, level by level.
        size, device = 1 + sum(widths), block.storage.device
        itself = pack_tree_mask(torch.eye(size, dtype=torch.bool, device=device))
        self.root_bit, *self.own_bits = itself.split([1, *widths])

    def propose(self, root: torch.Tensor) -> Draft:
        self.block.begin()
        widths = self.widths[: self.block.sequences.draft_depth]
        if self.static is not None:
            return Draft(*self.static.grow(root, (1, *widths)))
        tokens, mask = root[:, None], self.root_bit.expand(len(root), -1, -1)
        scores = torch.zeros(tokens.shape, device=root.device)
        all_tokens, all_parents, first = [tokens], [torch.full_like(tokens, -1)], 0
        for depth, width in enumerate(widths):
            logits = self.block.logits(tokens, depth, mask)
            children, scores, parents = best_children(logits, scores, width)
            mask = mask.gather(1, parents[..., None].expand(-1, -1, mask.shape[-1]))
            mask = mask | self.own_bits[depth]
            all_tokens.append(children)
            all_parents.append(parents + first)
            first += tokens.shape[1]
            tokens = children
        self.block.keep_leaves(tokens, len(widths))
        parents = torch.cat(all_parents, 1)
        tree = Tree(parents, max_depth=len(widths), max_width=max(widths, default=0))
        return Draft(tree, torch.cat(all_tokens, 1))


class _ChainDrafter(_BlockDrafter):
    """One path, drawn from the drafter's distribution as the target's tokens are from its own."""

    def __init__(self, block: DraftBlock, chain: ChainBuilder):
        super().__init__(block)
        self.chain, self.gamma = chain, len(chain.trees) - 1

    def propose(self, root: torch.Tensor) -> Draft:
        self.block.begin()
        draft = self.chain.build(
            root, self.gamma, lambda token, depth: self.block.logits(token, depth, None)
        )
        self.block.keep_leaves(draft.tokens[:, -1:], draft.tree.max_depth)
        return draft


def best_children(
    logits: torch.Tensor, scores: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the `width` most probable paths that continue those of a level.

    No node has more than `width` children among the best, so each node's own best are found first,
    and the best of those then: nothing of the size of a level times the vocabulary is sorted.

    Parameters
    ----------
    logits : Tensor [B, n, V]
    scores : Tensor, float32 [B, n]
        Log-probability of each node's path.
    width : int
        At most n * V.

    Returns
    -------
    tokens : Tensor, int64 [B, width]
    scores : Tensor, float32 [B, width]
        Descending.
    parents : Tensor, int64 [B, width]
        Which of the n nodes each continues.
    """
    best, tokens = logits.topk(min(width, logits.shape[-1]))
    paths = best.float() + (scores - logits.float().logsumexp(-1))[..., None]
    scores, chosen = paths.flatten(1).topk(width)
    return tokens.flatten(1).gather(1, chosen), scores, chosen // best.shape[-1]
