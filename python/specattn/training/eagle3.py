"""Training of EAGLE-3's drafter (arXiv 2503.01840, section 3.2): on what it drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from specattn.blocks import TORCH
from specattn.decoding import Eagle3
from specattn.drafters import Eagle3Drafter, TrainedDrafter
from specattn.drafters.eagle3 import head_rows
from specattn.training.eagle3_start import start_from_target
from specattn.training.features import layer_features
from specattn.training.loss import soft_cross_entropy
from specattn.training.recipe import Objective, Preset, Recipe
from specattn.training.steps import by_token, of_steps

TRAINER_DEFAULTS = {
    "optim": "adamw_torch",
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.01,
    "adam_beta2": 0.95,
    "max_grad_norm": 0.5,
}
"""Fields of `transformers.TrainingArguments`, as in the authors' program."""

DECAY = 0.8
"""Weight of a step's loss over that of the one before, as in the authors' program."""

_START_ROWS = 64


@dataclass(frozen=True)
class TestTimePreset(Preset):
    """How far the drafter drafts while it learns.

    Attributes
    ----------
    depth : int
        Drafted tokens behind every token of a row.
    """

    depth: int


EAGLE3_PRESET = TestTimePreset(2048, 8, 5e-5, 7)
"""Rows, steps and rate of the authors' program."""


class Eagle3Objective(Objective):
    """Draft behind every token of a row by what the drafter itself has made, step by step.

    Every step's loss is the cross entropy between the target's distribution over the drafter's
    vocabulary and the drafter's; there is none of features. Tokens at which the target's own first
    choice is not in that vocabulary count nothing. The head stays as it is (`start_from_target`
    copies the target's), which makes the loss a frozen head's.

    Parameters
    ----------
    target : PreTrainedModel
        Frozen here, and never in training mode.
    drafter : Eagle3Drafter
    depth : int
        Steps of the training-time test.
    """

    def __init__(self, target: PreTrainedModel, drafter: Eagle3Drafter, *, depth: int = 7):
        super().__init__(target, drafter)
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.depth = depth
        drafter.lm_head.requires_grad_(False)

    def losses(
        self, input_ids: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int
    ) -> dict[str, torch.Tensor]:
        """Return the weighted mean of the steps' losses per label, and each by itself.

        The first tokens of a row have no draft at some steps, for which they count nothing.
        """
        drafter = cast(Eagle3Drafter, self.drafter)
        embedding = drafter.embed_tokens or self.target.get_input_embeddings()
        layers = drafter.config.layers_of(self.target.config)
        features, read = layer_features(self.target, input_ids, layers)
        embeds, features = (x.to(drafter.dtype) for x in (embedding(input_ids), features))
        drafted = drafter(embeds, features, self.depth)
        hidden, counts = by_token(drafted, labels)
        weight = self.target.get_output_embeddings().weight
        if (tokens := drafter.tokens) is not None:
            counts &= _within(read, weight, tokens)
            weight = weight[tokens]
        unlike = soft_cross_entropy(
            head_rows(TORCH, drafter, hidden).flatten(1, 2),
            read.flatten(0, 1),
            weight,
            counts.flatten(1),
        )
        return of_steps(unlike, counts, items, DECAY)


def _within(read: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return where the target's first choice [B, L] is one of some tokens."""
    known = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
    known[tokens] = True
    return torch.stack([known[(row.to(weight.dtype) @ weight.T).argmax(-1)] for row in read])


@dataclass(frozen=True)
class Eagle3Recipe(Recipe):
    """How EAGLE-3's drafter is trained.

    Parameters
    ----------
    preset : TestTimePreset
    feature_layers, draft_vocab_size, token_heads, norm_before_residual, fc_norm, norm_output
        Of a new drafter, as for `Eagle3Drafter.for_target`.
    """

    preset: TestTimePreset = EAGLE3_PRESET
    feature_layers: Sequence[int] | None = None
    draft_vocab_size: int | None = None
    token_heads: int = 0
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    drafter_class = Eagle3Drafter
    trainer_defaults = TRAINER_DEFAULTS

    @property
    def method(self) -> Callable[[Any], Eagle3]:
        """EAGLE-2's trees."""
        return Eagle3

    def new_drafter(self, target: PreTrainedModel, name: str) -> Eagle3Drafter:
        """Return a drafter at random; `fit_start` makes it the target's last layer."""
        return Eagle3Drafter.for_target(
            target,
            target=name,
            feature_layers=self.feature_layers,
            draft_vocab_size=self.draft_vocab_size,
            token_heads=self.token_heads,
            norm_before_residual=self.norm_before_residual,
            fc_norm=self.fc_norm,
            norm_output=self.norm_output,
        )

    def fit_start(
        self, drafter: TrainedDrafter, target: PreTrainedModel, rows: Iterable[torch.Tensor]
    ) -> None:
        """Initialise a new drafter from the target; its vocabulary is what is frequent."""
        assert isinstance(drafter, Eagle3Drafter)
        start_from_target(drafter, target, islice(rows, _START_ROWS))

    def objective(self, target: PreTrainedModel, drafter: TrainedDrafter) -> Eagle3Objective:
        """Return the drafter's loss."""
        assert isinstance(drafter, Eagle3Drafter)
        return Eagle3Objective(target, drafter, depth=self.preset.depth)
