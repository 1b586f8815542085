"""PosS: draft with position specialists on the target's features, as trees that EAGLE-2 grows.

One specialist after the other predicts the feature of the next token; the target's head turns
features into tokens. With one specialist for all positions this is EAGLE-2, or HASS. (*PosS:
Position Specialist Generates Better Draft for Speculative Decoding*, and EAGLE-2, arXiv
2406.16858.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specattn.blocks import Ops, Place, Store
from specattn.decoding.drafting.grown import Grown
from specattn.decoding.drafting.pairs import Level, PairBlock, caches_of
from specattn.decoding.engine.contract import DraftContext
from specattn.drafters import PosSDrafter
from specattn.drafters.poss import fuse, keys_and_values, specialist


@dataclass(frozen=True)
class PosS(Grown[PosSDrafter], name="poss"):
    """Drafting with position specialists.

    Parameters
    ----------
    drafter : PosSDrafter or path, optional
        A drafter, or the folder that holds one. By default the folder ``poss`` within the target's.
        A path is loaded once; a drafter is used as it is.
    width, depth, total_tokens, window
        As for `Grown`.

    Raises
    ------
    ValueError
        A parameter is out of range. From `prepared`, and so when a run starts: there is no drafter,
        or it does not fit the target.
    """

    kind = PosSDrafter

    def block(self, context: DraftContext, nodes: int) -> PairBlock:
        """Return the specialists beside the target of a run."""
        module = self.loaded(context.target.model)
        return SpecialistBlock(module, context, nodes, self.depth, self.window)


class SpecialistBlock(PairBlock):
    """The specialists, each with keys and values of its own for all pairs before.

    At a level of the tree one specialist drafts, and the projections of those below it are made.
    """

    def __init__(
        self,
        drafter: PosSDrafter,
        context: DraftContext,
        nodes: int,
        depth: int,
        window: int | None = None,
    ):
        self.drafter, config = drafter, drafter.config
        super().__init__(context, *caches_of(drafter, config.layers), nodes, depth, window)

    def fuse(self, ops: Ops, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return what ``fc`` makes of pairs."""
        return fuse(ops, self.drafter, ops.embed(tokens, self.target.embed), features)

    def remember(self, ops: Ops, x: torch.Tensor, place: Place, stores: Sequence[Store]) -> None:
        """Store the keys and values of pairs under some specialists, the first of them first."""
        for layer, store in enumerate(stores):
            keys_and_values(ops, self.drafter, layer, x, place, store)

    def drafted(self, ops: Ops, x: torch.Tensor, level: Level) -> torch.Tensor:
        """Return what a level's specialist drafts; those of deeper levels remember its pairs."""
        layer, last = map(self.drafter.config.specialist_at, (level.depth, level.deepest))
        for own in range(layer, last + 1):
            keys_and_values(ops, self.drafter, own, x, level.place, level.stores[own])

        def attend(q: torch.Tensor) -> torch.Tensor:
            return ops.hybrid_tree_attention(q, *level.read(layer), **level.visible)

        return specialist(ops, self.drafter, layer, x, level.place, attend)
