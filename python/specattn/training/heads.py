"""Training of decoding heads: TokenSwift's (arXiv 2502.18890, appendix B) and Medusa's.

The target is frozen, so a row costs one pass of it without gradients, whatever the heads. Head i
learns the token i after the one that the target's own head predicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specattn.decoding import Medusa, TokenSwift
from specattn.drafters import Heads, MedusaHeads, TokenSwiftHeads, TrainedDrafter
from specattn.drafters.heads import NUM_HEADS
from specattn.training.loss import IGNORED, linear_cross_entropy, top1_hits
from specattn.training.recipe import Objective, Preset, Recipe

TABLE_9 = Preset(row_length=8192, batch_size=120, learning_rate=5e-3)
"""TokenSwift's table 9: 3 rows on each of 4 GPUs, 10 passes a step; rows of the first 8K tokens."""

TRAINER_DEFAULTS = {
    "optim": "adamw_torch",
    "lr_scheduler_type": "cosine",
    "warmup_steps": 50,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_steps": 200,
}
"""Fields of `transformers.TrainingArguments`, all of them from table 9."""

MEDUSA_DECAY = 0.8
"""Each head's loss weighs this much of the one before (Medusa, section 2.2.1)."""


class HeadsObjective(Objective):
    """Weighted sum of the heads' cross entropies.

    Beside the loss, `forward` returns each head's own: ``loss_1``, ``loss_2``, ..., and in
    evaluation the share of tokens that its first guess is right about: ``accuracy_1``, ...

    Parameters
    ----------
    target : PreTrainedModel
        Frozen here, and never in training mode.
    drafter : Heads
    decay : float
        Weight of a head's loss as a share of that of the head before; the first weighs 1.
    """

    def __init__(self, target: PreTrainedModel, drafter: Heads, *, decay: float = 1.0):
        super().__init__(target, drafter)
        self.decay = decay

    def losses(
        self, input_ids: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int
    ) -> dict[str, torch.Tensor]:
        """Return the loss, and each head's; the last i tokens of a row have no label for head i."""
        with torch.no_grad():
            features = self.target.base_model(input_ids, use_cache=False).last_hidden_state
        # The heads may be trained in more bits than the target is stored in.
        hidden = self.drafter(features.to(self.drafter.dtype))
        weight = self.target.get_output_embeddings().weight
        found = {"loss": torch.zeros((), device=input_ids.device, dtype=torch.float32)}
        for i, states in enumerate(hidden.unbind(-2), start=1):
            shifted = pad(labels[:, i:], (0, i), value=IGNORED)
            total = linear_cross_entropy(states, weight, shifted)
            found["loss"] = found["loss"] + self.decay ** (i - 1) * total / items
            count = (shifted != IGNORED).sum()
            found[f"loss_{i}"] = total.detach() / count
            if not self.training:
                found[f"accuracy_{i}"] = top1_hits(states, weight, shifted) / count
        return found


@dataclass(frozen=True)
class HeadsRecipe(Recipe):
    """How heads of either kind are trained; `num_heads` are those of a new drafter."""

    num_heads: int = NUM_HEADS
    preset: Preset = TABLE_9

    drafter_class: ClassVar[type[Heads]]
    trainer_defaults = TRAINER_DEFAULTS
    decay: ClassVar[float] = 1.0

    def new_drafter(self, target: PreTrainedModel, name: str) -> Heads:
        """Return heads that repeat the target's next-token distribution."""
        return self.drafter_class.for_target(target, target=name, num_heads=self.num_heads)

    def objective(self, target: PreTrainedModel, drafter: TrainedDrafter) -> HeadsObjective:
        """Return the heads' loss."""
        assert isinstance(drafter, Heads)
        return HeadsObjective(target, drafter, decay=self.decay)


class TokenSwiftRecipe(HeadsRecipe):
    """Table 9, and the plain sum of the heads' losses."""

    drafter_class = TokenSwiftHeads

    @property
    def method(self) -> Callable[[TokenSwiftHeads], TokenSwift]:
        """The method with its default tree, as deep as there are heads."""
        return lambda heads: TokenSwift(
            heads, widths=TokenSwift.most_widths[: 1 + heads.config.num_heads]
        )


class MedusaRecipe(HeadsRecipe):
    """Medusa's weights, and for the rest what TokenSwift's heads get, so that the two compare."""

    drafter_class = MedusaHeads
    decay = MEDUSA_DECAY

    @property
    def method(self) -> Callable[[MedusaHeads], Medusa]:
        """The method with its default tree, as deep as there are heads."""
        return lambda heads: Medusa(heads, widths=Medusa.most_widths[: heads.config.num_heads])
