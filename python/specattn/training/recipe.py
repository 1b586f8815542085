"""What a method adds to a training run: its preset, its drafter and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from specattn.decoding import Method
from specattn.drafters import TrainedDrafter
from specattn.training.loss import IGNORED


@dataclass(frozen=True)
class Preset:
    """How a paper trains, as far as the command line has options of its own for it.

    Attributes
    ----------
    row_length : int
        Tokens of a row.
    batch_size : int
        Rows of an optimizer step, over all devices and accumulated passes.
    learning_rate : float
        The highest.
    """

    row_length: int
    batch_size: int
    learning_rate: float


class Objective(nn.Module, ABC):
    """A drafter's loss beside a frozen target.

    Parameters
    ----------
    target : PreTrainedModel
        Frozen here, and never in training mode.
    drafter : TrainedDrafter

    Raises
    ------
    ValueError
        The drafter does not fit the target.
    """

    accepts_loss_kwargs = True  # the trainer passes `num_items_in_batch`

    def __init__(self, target: PreTrainedModel, drafter: TrainedDrafter):
        super().__init__()
        drafter.config.check_target(target.config)
        self.target, self.drafter = target.requires_grad_(False), drafter

    def train(self, mode: bool = True) -> Objective:
        """Set the drafter's mode; the target stays in evaluation mode."""
        super().train(mode)
        self.target.eval()
        return self

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the loss of a batch, int64 [B, L], and other scalars to log.

        Label t is the token after token t; `IGNORED` ones add nothing. ``loss``, differentiable, is
        divided by `num_items_in_batch`, the labels of a step of several passes, by default those
        given. The other entries are means over this batch alone: the trainer logs their means over
        batches.
        """
        items = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return self.losses(input_ids, labels, items)

    @abstractmethod
    def losses(
        self, input_ids: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int
    ) -> dict[str, torch.Tensor]:
        """Return what `forward` does, the loss divided by `items`."""


class Recipe(ABC):
    """A method's part of a training run.

    Attributes
    ----------
    drafter_class : type of TrainedDrafter
    preset : Preset
    trainer_defaults : mapping
        Fields of `transformers.TrainingArguments`; the user's own options come before them.
    """

    drafter_class: ClassVar[type[TrainedDrafter]]
    preset: Preset
    trainer_defaults: Mapping[str, Any]

    @property
    def method(self) -> Callable[[Any], Method] | None:
        """What makes a decoding method of a drafter; without it acceptance is not measured."""
        return None

    @abstractmethod
    def new_drafter(self, target: PreTrainedModel, name: str) -> TrainedDrafter:
        """Return a drafter to begin with, for `target`, known as `name`."""

    def fit_start(  # noqa: B027 - most methods have nothing to fit
        self, drafter: TrainedDrafter, target: PreTrainedModel, rows: Iterable[torch.Tensor]
    ) -> None:
        """Fit the initial weights of a new drafter to the run's own text, rows of int64 [L]."""

    @abstractmethod
    def objective(self, target: PreTrainedModel, drafter: TrainedDrafter) -> Objective:
        """Return the loss of `drafter` beside `target`."""
