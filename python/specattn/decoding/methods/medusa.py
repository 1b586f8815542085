"""Medusa: draft with heads on the hidden state of the last accepted token.

The last verification has computed that state, so a draft costs two matrix products per head and no
pass of a model. Head i predicts the token i positions behind the root, independently of those
between; a tree of fixed shape combines their first ranks. (*Medusa: Simple LLM Inference
Acceleration Framework with Multiple Decoding Heads*, arXiv 2401.10774.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from specattn.blocks import Ops
from specattn.decoding.drafting.calibrating import pass_sizes
from specattn.decoding.drafting.gains import Effort, Nodes, TreeGains
from specattn.decoding.drafting.pace import FixedSize, PacedDrafter, Share
from specattn.decoding.drafting.pruning import pruned
from specattn.decoding.drafting.trained import Headed
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter, Verified
from specattn.drafters import MedusaHeads
from specattn.tree import Tree


@dataclass(frozen=True)
class Medusa(Headed[MedusaHeads], name="medusa"):
    """Drafting with independent heads, as a tree of their first guesses.

    Drafts are chosen by rank and tested by the target's own sample at every node, which preserves
    the target's distribution; Medusa's own "typical acceptance" does not, and is not offered.

    Parameters
    ----------
    drafter : MedusaHeads or path, optional
        Heads, or the folder that holds them. By default the folder ``medusa`` within the target's.
        A path is loaded once; heads are used as they are.
    widths : sequence of int or None
        Entry i: how many of head i's first guesses follow every node of the level above. None: of
        `most_widths`, as deep as there are heads, the most probable nodes, as many as gain the most
        tokens per second by the times of the run's own rounds, or none.

    Raises
    ------
    ValueError
        A parameter is out of range. From `prepared`, and so when a run starts: there are no heads,
        or they do not fit the target, or there are fewer than `widths` has levels.
    """

    reads_features = True
    kind = MedusaHeads
    most_widths = (3, 3, 3)  # TokenSwift's without its first 1, here the root

    @property
    def max_nodes(self) -> int:
        """The root and all combinations of guesses."""
        return Tree.full(self.widths or self.most_widths).size

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter for one run."""
        heads = self.loaded(context.target.model)
        widths = self.widths_of(heads)
        effort = Effort(max(widths), len(widths))  # all heads at once
        drafter = _MedusaDrafter(heads, widths, context, FixedSize(effort))
        if self.widths is None:
            sizes = pass_sizes(context, Tree.full(widths).size)
            drafter.arm = Share(context, "medusa", [effort], sizes, TreeGains, drafter.attempt)
        return drafter


class _MedusaDrafter(PacedDrafter):
    def __init__(
        self,
        heads: MedusaHeads,
        widths: tuple[int, ...],
        context: DraftContext,
        arm: FixedSize,
    ):
        self.arm, self.most_rows = arm, Tree.full(widths).size
        target = self.target = context.target
        self.heads, self.widths, self.sequences = heads, widths, context.sequences
        self.programs = target.recall(("medusa", widths), heads, target.programs)
        # The tree of any depth: it begins as the whole one does, where a text has no use for more.
        depths = range(len(widths) + 1)
        self.trees = [Tree.full(widths[:depth], device=target.device) for depth in depths]
        self.levels = Tree.full(widths).depths[1:].numpy()  # on the host
        self.guess_of = torch.tensor(_guesses(widths), device=target.device)
        # The features that the root's token was drawn from; zeros behind a prompt of one token.
        shape = (target.cache.batch_size, heads.config.hidden_size)
        self.features = torch.zeros(shape, dtype=target.model.dtype, device=target.device)

    def on_prefill(self, start: int, features: Sequence[torch.Tensor]) -> None:
        """Keep the features of every prompt's last token but one, in whichever chunk it is."""
        before = zip(features, self.features, strict=True)
        self.features = torch.stack([own[-1] if len(own) else last for own, last in before])

    def draft(self, root: torch.Tensor, effort: Effort) -> Draft:
        """Return the tree of the heads' first guesses, or what pays of it."""
        if not effort.depth:
            return Draft(self.trees[0], root[:, None])
        depth = min(len(self.widths), self.sequences.draft_depth)
        tree = self.trees[depth]
        best, scores = (x.flatten(1) for x in self._guesses(depth))
        guess_of = self.guess_of[: tree.size - 1]
        drafted = best.index_select(1, guess_of)
        parents = tree.parents[1:] - 1

        @cache
        def of_paths() -> torch.Tensor:
            found = scores.index_select(1, guess_of)
            for level in range(1, depth):  # parents' are complete level by level
                nodes = slice(self.trees[level].size - 1, self.trees[level + 1].size - 1)
                found[:, nodes] += found[:, parents[nodes]]
            return found

        place = self.levels[: tree.size - 1], np.zeros(tree.size - 1, int)
        nodes = lambda: Nodes(drafted, of_paths(), parents, *place)  # noqa: E731
        count = self.arm.rows(effort, tree.size, nodes) - 1
        if count == tree.size - 1:
            return Draft(tree, torch.cat([root[:, None], drafted], 1))
        above, width = parents.expand(len(root), -1), max(self.widths)
        return pruned(root, drafted, of_paths(), above, count, depth=depth, width=width)[0]

    def attempt(self, root: torch.Tensor, effort: Effort) -> None:
        """Run all heads."""
        self._guesses(effort.depth)

    def _guesses(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first guesses of `depth` heads, and log-probabilities: [B, depth, widest]."""
        batch, rows = len(self.features), range(len(self.widths) + 1)
        heads = self.programs.depth_for("heads", depth, rows, batch)
        program = partial(self._best, heads, max(self.widths))
        inputs = {"features": self.features}
        best, scores = self.programs.run(("heads", heads), program, inputs, batch)
        return best[:, :depth], scores[:, :depth]

    def _best(
        self, depth: int, width: int, ops: Ops, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = ops.stack(self.heads.hidden(ops, features, depth))
        nothing = torch.zeros(len(features), depth, device=features.device, dtype=torch.float32)
        return ops.children(ops.head(hidden, self.target.head), nothing, width)

    def observe(self, verified: Verified) -> None:
        super().observe(verified)
        features = verified.result.features
        if max(verified.counts):
            self.features = _rows(features, verified.accepted.last)
        else:  # the root was the last everywhere: ten operators fewer
            self.features = features[:, 0].clone()

    def compact(self, rows: list[int]) -> None:
        self.features = self.features[rows]


def _guesses(widths: tuple[int, ...]) -> list[int]:
    """Return which guess each node of the full tree is: of every head as many as of the widest."""
    nodes, above = list[int](), 1
    for head, width in enumerate(widths):
        nodes += [head * max(widths) + rank for _ in range(above) for rank in range(width)]
        above *= width
    return nodes


def _rows(features: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return one row of each request: [B, T, H] and [B] to [B, H]."""
    return features.gather(1, rows[:, None, None].expand(-1, 1, features.shape[-1]))[:, 0]
