"""MTP: draft with the head that the model's own checkpoint holds, as trees that EAGLE-2 grows.

A head that was trained to predict the token after the next is used again and again: what it makes
of a pair stands for the target's feature in the next one. (DeepSeek-V3, arXiv 2412.19437, section
2.2; `decoding/model/mtp.py` has its equations and where checkpoints keep it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
from transformers import PreTrainedModel

from specattn.blocks import Ops, Place, Store, Unrecognised
from specattn.decoding.drafting.grown import Grown
from specattn.decoding.drafting.pairs import Level, PairBlock
from specattn.decoding.drafting.trained import fitting_drafter
from specattn.decoding.engine.contract import DraftContext
from specattn.decoding.model.checkpoint import folder_of
from specattn.decoding.model.families import CacheShape
from specattn.decoding.model.model import Model
from specattn.decoding.model.mtp import MtpHead, find_head, head_of, looked_for, read_head
from specattn.decoding.passes.decoder import rotated
from specattn.decoding.passes.mtp import angles, drafted, fuse, prove_head, remember
from specattn.drafters import MtpDrafter


@dataclass(frozen=True)
class Mtp(Grown[MtpDrafter], name="mtp"):
    """Drafting with the checkpoint's own MTP head.

    Parameters
    ----------
    drafter : MtpDrafter or path, optional
        A head of one's own, or the folder that holds one. By default what lies among the weights of
        the target's folder (`LAYOUTS`), which is read once, else the folder ``mtp`` within it.
    width, depth, total_tokens, window
        As for `Grown`. A width of 1 drafts chains.

    Raises
    ------
    ValueError
        A parameter is out of range. From `prepared`, and so when a run starts: there is no head, or
        it does not fit the target.
    """

    kind = MtpDrafter

    @classmethod
    def offered(cls, folder: Path, depth: int) -> str | None:
        """Return what drafter of the method lies in a folder of a target of `depth` layers."""
        if (found := find_head(folder, depth)) is not None:
            return f"among its weights, as in {found.family}"
        return super().offered(folder, depth)

    def prepared(self, model: PreTrainedModel) -> Self:
        """Return this method with its head read and found to fit `model`."""
        given: Any = self.drafter
        if isinstance(given, MtpHead):
            return self
        if given is None:
            key = "MTP head", model.dtype, model.device  # which model.to() changes
            given = Model.of(model).recall(key, lambda: _inside(model))
        if given is None:
            folder, depth = folder_of(model), model.config.num_hidden_layers
            if super().offered(folder, depth) is None:
                raise ValueError(
                    f"MTP needs a head: none was given, the weights in {folder} have none "
                    f"({looked_for(depth)}), and {folder / self.name} is not a folder"
                )
        if not isinstance(given, MtpHead):
            given = head_of(cast(Any, fitting_drafter(MtpDrafter, given, model)).eval())
        return replace(self, drafter=given)

    def block(self, context: DraftContext, nodes: int) -> PairBlock:
        """Return the head beside the target of a run."""
        head: Any = self.prepared(context.target.model).drafter
        return MtpBlock(head, context, nodes, self.depth, self.window)


def _inside(model: PreTrainedModel) -> MtpHead | None:
    """Return the head among the weights in a model's folder, None where there is none."""
    found = find_head(folder_of(model), model.config.num_hidden_layers)
    if found is None:
        return None
    try:
        return prove_head(read_head(model, found), model)
    except Unrecognised as error:
        raise ValueError(f"the MTP head of {found.family} is not supported: {error}") from None


class MtpBlock(PairBlock):
    """The head, with the keys and values of its layer."""

    def __init__(
        self,
        head: MtpHead,
        context: DraftContext,
        nodes: int,
        depth: int,
        window: int | None = None,
    ):
        self.drafter = head
        shape = CacheShape(1, head.kv_heads, head.head_dim)
        super().__init__(context, shape, partial(angles, head), nodes, depth, window)

    def fuse(self, ops: Ops, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return what the layer reads of pairs."""
        return fuse(ops, self.drafter, ops.embed(tokens, self.target.embed), features)

    def remember(self, ops: Ops, x: torch.Tensor, place: Place, stores: Sequence[Store]) -> None:
        """Store the keys and values of pairs."""
        remember(ops, self.drafter, x, place, stores[0])

    def drafted(self, ops: Ops, x: torch.Tensor, level: Level) -> torch.Tensor:
        """Return what the layer makes of a level's pairs, whose keys and values are stored."""

        def attend(n: int, weights: Any, read: torch.Tensor) -> torch.Tensor:
            size, store = self.drafter.head_dim, level.stores[0]
            q, _, _ = rotated(ops, weights, read, size, level.place, store)
            options = {**level.visible, **self.drafter.logits}
            return ops.hybrid_tree_attention(q, *level.read(0), **options)

        return drafted(ops, self.drafter, x, attend)
