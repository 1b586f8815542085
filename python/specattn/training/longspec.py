"""Training of LongSpec's drafter (arXiv 2502.17421 v2, §3.2 and appendices D and G)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from specattn.decoding import LongSpec
from specattn.drafters import LongSpecDrafter, TrainedDrafter
from specattn.training.loss import linear_cross_entropy
from specattn.training.positions import anchor_offset_positions
from specattn.training.recipe import Objective, Preset, Recipe
from specattn.training.target import (
    copy_linears,
    copy_mlp,
    copy_output_and_norms,
    last_layer_cache,
)


@dataclass(frozen=True)
class Stage(Preset):
    """One of the paper's three stages: one epoch each, AdamW, cosine learning rate.

    The paper gives no lengths of rows: those of the authors' program.

    Attributes
    ----------
    anchor_offset : bool
        Whether positions are anchor-offset indices; rows that are long enough need none.
    """

    anchor_offset: bool


STAGES = {
    "short": Stage(row_length=1024, batch_size=2048, learning_rate=5e-4, anchor_offset=True),
    "long": Stage(row_length=32768, batch_size=256, learning_rate=5e-6, anchor_offset=False),
    "finetune": Stage(row_length=32768, batch_size=256, learning_rate=5e-6, anchor_offset=False),
}
"""The stages by name, in their order: pre-training text, long text, the text of the task."""

TRAINER_DEFAULTS = {
    "optim": "adamw_torch",
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "weight_decay": 0.1,
    "adam_beta2": 0.98,
    "num_train_epochs": 1.0,
}
"""Fields of `transformers.TrainingArguments` for all stages; a share of warm-up, decay and betas
are not in the paper but in the authors' program."""

LEVELS = 5
"""Levels that the paper's trees have: gamma."""


@torch.no_grad()
def start_from_target(drafter: LongSpecDrafter, target: PreTrainedModel) -> LongSpecDrafter:
    """Copy what fits from the target's layers into a new drafter for it, and return it.

    Its self attention reads embeddings, as the target's first layer does; its cross attention
    queries the keys of the target's last layer, as that layer's own queries do; its MLP leads to
    the head, as that layer's own does. The paper does not say how the drafter begins;
    `docs/training.md` has what this saves.
    """
    layers = cast(Any, target.base_model).layers
    for own, own_norm, layer in (
        (drafter.self_attention, drafter.self_norm, layers[0]),
        (drafter.cross_attention, drafter.cross_norm, layers[-1]),
    ):
        theirs = layer.self_attn
        copied = [theirs.q_proj, theirs.k_proj, theirs.v_proj][: 3 if own.kv_heads else 1]
        copy_linears(own.qkv_proj, *copied)
        copy_output_and_norms(own, theirs)
        own_norm.weight.copy_(layer.input_layernorm.weight)
    if copy_mlp(drafter, layers[-1]):
        drafter.mlp_norm.weight.copy_(layers[-1].post_attention_layernorm.weight)
    return drafter


class LongSpecObjective(Objective):
    """Next-token loss of a drafter that reads the cache of a frozen target as decoding lets it.

    Parameters
    ----------
    target : PreTrainedModel
        Frozen here, and never in training mode.
    drafter : LongSpecDrafter
    levels : int
        Drafted tokens per path, gamma. Flash noisy training hides the target's last j tokens from
        every token, 1 <= j < gamma, with j drawn anew for each batch (v2, Algorithm 2). With
        ``levels=1`` there is no noise, and a token even sees itself (j = 0).
    anchor_offset : bool
        Draw anchor-offset indices for every row in training (v2, Algorithm 1).
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: LongSpecDrafter,
        *,
        levels: int = LEVELS,
        anchor_offset: bool = True,
    ):
        super().__init__(target, drafter)
        if levels < 1:
            raise ValueError(f"levels must be at least 1, got {levels}")
        self.shifts = range(1, levels) if levels > 1 else range(1)
        self.anchor_offset = anchor_offset

    def losses(
        self, input_ids: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int
    ) -> dict[str, torch.Tensor]:
        """Return the loss: in training of one random shift, else the mean over all of them."""
        rows, length = input_ids.shape
        if self.training and self.anchor_offset:
            limit = self.target.config.max_position_embeddings
            positions = anchor_offset_positions(rows, length, limit).to(input_ids.device)
        else:
            positions = torch.arange(length, device=input_ids.device).expand(rows, -1)
        embeds = self.target.get_input_embeddings()(input_ids)
        read = (embeds, *last_layer_cache(self.target, input_ids, positions))
        # The drafter may be trained in more bits than the target is stored in.
        embeds, keys, values = (x.to(self.drafter.dtype) for x in read)
        head = self.target.get_output_embeddings().weight
        shifts = list(self.shifts)
        if self.training:
            shifts = [shifts[int(torch.randint(len(shifts), ()))]]
        total = torch.zeros((), device=input_ids.device, dtype=torch.float32)
        for shift in shifts:
            hidden = self.drafter(embeds, positions, keys, values, shift=shift)
            total = total + linear_cross_entropy(hidden, head, labels)
        return {"loss": total / (len(shifts) * items)}


@dataclass(frozen=True)
class LongSpecRecipe(Recipe):
    """How LongSpec's drafter is trained.

    Parameters
    ----------
    preset : Stage
    levels : int
        As `LongSpecObjective` has it.
    window : int
        Of a new drafter.
    """

    preset: Stage
    levels: int = LEVELS
    window: int = 512

    drafter_class = LongSpecDrafter
    trainer_defaults = TRAINER_DEFAULTS

    @property
    def method(self) -> type[LongSpec]:
        """Trees of the default shape."""
        return LongSpec

    def new_drafter(self, target: PreTrainedModel, name: str) -> LongSpecDrafter:
        """Return a drafter initialised from layers of the target."""
        drafter = LongSpecDrafter.for_target(target, target=name, window=self.window)
        return start_from_target(drafter, target)

    def objective(self, target: PreTrainedModel, drafter: TrainedDrafter) -> LongSpecObjective:
        """Return the drafter's loss."""
        assert isinstance(drafter, LongSpecDrafter)
        offset = self.preset.anchor_offset
        return LongSpecObjective(target, drafter, levels=self.levels, anchor_offset=offset)
