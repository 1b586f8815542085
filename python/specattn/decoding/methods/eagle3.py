"""EAGLE-3: draft by one layer on features of several layers of the target, by a head of its own.

Trees grow as EAGLE-2's (arXiv 2503.01840; `specattn.drafters.eagle3` has the equations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from specattn.blocks import Ops, Place, Store
from specattn.decoding.drafting.grown import Grown
from specattn.decoding.drafting.pairs import Level, PairBlock, caches_of, narrower
from specattn.decoding.engine.contract import DraftContext
from specattn.drafters import Eagle3Drafter
from specattn.drafters.eagle3 import fused, keys_and_values, layer, logits_of, pair


@dataclass(frozen=True)
class Eagle3(Grown[Eagle3Drafter], name="eagle3"):
    """Drafting with an EAGLE-3 drafter.

    Parameters
    ----------
    drafter : Eagle3Drafter or path, optional
        A drafter, or the folder that holds one, as SafeAILab, SGLang and speculators publish them.
        By default the folder ``eagle3`` within the target's. A path is loaded once; a drafter is
        used as it is.
    width, depth, total_tokens, window
        As for `Grown`.

    Raises
    ------
    ValueError
        A parameter is out of range. From `prepared`, and so when a run starts: there is no drafter,
        or it does not fit the target.
    """

    kind = Eagle3Drafter

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return the layers that the drafter reads."""
        return self.loaded(model).config.layers_of(model.config)

    def block(self, context: DraftContext, nodes: int) -> PairBlock:
        """Return the drafter beside the target of a run."""
        module = self.loaded(context.target.model)
        return Eagle3Block(
            module, context, nodes, self.depth, narrower(self.window, module.config.window)
        )


class Eagle3Block(PairBlock):
    """The drafter's one layer, with the keys and values of all pairs before."""

    def __init__(
        self,
        drafter: Eagle3Drafter,
        context: DraftContext,
        nodes: int,
        depth: int,
        window: int | None = None,
    ):
        self.drafter, config = drafter, drafter.config
        own: nn.Module | None = drafter.embed_tokens
        self.embedding = context.target.embed if own is None else own
        self.tokens = drafter.tokens
        super().__init__(context, *caches_of(drafter, 1), nodes, depth, window)
        self.vocabulary = config.head_size

    def taken(self, ops: Ops, features: torch.Tensor) -> torch.Tensor:
        """Return what ``fc`` makes of the target's layers."""
        return fused(ops, self.drafter, features)

    def fuse(self, ops: Ops, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return what the layer reads of pairs."""
        return pair(ops, self.drafter, ops.embed(tokens, self.embedding), features)

    def logits(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the drafter's head, which may know some tokens only."""
        return logits_of(ops, self.drafter, x)

    def named(self, ops: Ops, tokens: torch.Tensor) -> torch.Tensor:
        """Return the target's tokens of the head's."""
        known = self.tokens
        return tokens if known is None else ops.step(lambda: known[tokens])

    def remember(self, ops: Ops, x: torch.Tensor, place: Place, stores: Sequence[Store]) -> None:
        """Store the keys and values of pairs."""
        keys_and_values(ops, self.drafter, x, place, stores[0])

    def drafted(self, ops: Ops, x: torch.Tensor, level: Level) -> torch.Tensor:
        """Return what the layer drafts."""

        def attend(q: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return ops.hybrid_tree_attention(q, *level.read(0), **level.visible)

        return layer(ops, self.drafter, x, level.place, attend, level.stores[0])
