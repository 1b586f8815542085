"""Training of an MTP head by repeated use: it drafts on what it has made itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from specattn.blocks import TORCH
from specattn.decoding import Mtp
from specattn.decoding.model.mtp import head_of
from specattn.decoding.passes.decoder import rotated
from specattn.decoding.passes.mtp import drafted, fuse
from specattn.drafters import MtpDrafter, TrainedDrafter
from specattn.drafters.layer import check_texts
from specattn.drafters.path_attention import along_paths
from specattn.training.features import features_of
from specattn.training.loss import soft_cross_entropy
from specattn.training.recipe import Objective, Preset, Recipe
from specattn.training.steps import by_token, of_steps
from specattn.training.target import ridge_solution

DECAY = 0.8
"""Weight of a step's loss over that of the one before, as in EAGLE-3's training-time test."""

_START_ROWS = 64


@dataclass(frozen=True)
class MtpPreset(Preset):
    """How far the head drafts while it learns.

    Attributes
    ----------
    depth : int
        Drafted tokens behind every token of a row.
    """

    depth: int


MTP_PRESET = MtpPreset(2048, 8, 1e-4, 4)
"""Our own choice: papers train the head with the model."""


def draft_texts(
    drafter: MtpDrafter, inputs_embeds: torch.Tensor, features: torch.Tensor, depth: int
) -> list[torch.Tensor]:
    """Draft `depth` tokens behind every token of whole sequences, along their own text.

    As at inference, a pair sees the target's features up to its root and the head's own behind it;
    gradients go through these. `inputs_embeds` and `features`, [B, L, H], are of the same L tokens;
    `depth` is from 1 to L - 1 (else ValueError). Entry s of the result, [B, L - 1 - s, H]: row t is
    drafted at depth s behind the root t + 1, and stands for the feature of token ``t + s + 1``.
    """
    length, width = inputs_embeds.shape[1], drafter.config.hidden_size
    check_texts(inputs_embeds, features, depth, width, width)
    head, known = head_of(drafter), features
    places = drafter.rotated(inputs_embeds, torch.arange(length, device=features.device)[None])
    outs, seen = list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()

    def attend(n: int, weights: Any, read: torch.Tensor) -> torch.Tensor:
        place = places.part(len(outs), read)
        q, k, v = rotated(TORCH, weights, read, head.head_dim, place, None)
        seen.append((k, v))
        return along_paths(seen, q.shape[1])(q)

    for step in range(depth):
        x = fuse(TORCH, head, inputs_embeds[:, step + 1 :], known[:, : length - 1 - step])
        outs.append(drafted(TORCH, head, x, attend))
        known = outs[-1]
    return outs


@torch.no_grad()
def start_from_target(
    drafter: MtpDrafter, target: PreTrainedModel, rows: Iterable[torch.Tensor]
) -> MtpDrafter:
    """Initialise a new head as the target's last layer behind a least-squares projection.

    That one becomes the map from a pair, normed, to what the last layer reads of the pair's token,
    fitted to `rows` of text, int64 [L]. Behind it are the last layer and the last norm themselves.
    """
    width, eps = drafter.config.hidden_size, drafter.config.rms_norm_eps
    base = cast(Any, target.base_model)
    square = torch.zeros(2 * width, 2 * width, dtype=torch.float64, device=target.device)
    cross = torch.zeros(2 * width, width, dtype=torch.float64, device=target.device)
    for row in rows:
        ids = row[None].to(target.device)
        features, before = _around_last_layer(target, ids)
        embeds = target.get_input_embeddings()(ids).double()
        pairs = (rms_norm(one, (width,), None, eps) for one in (embeds[0, 1:], features[0, :-1]))
        x = torch.cat([*pairs], -1)
        square += x.T @ x
        cross += x.T @ before[0, 1:]
    drafter.eh_proj.weight.copy_(ridge_solution(square, cross))
    weights = {f"shared_head.norm.{n}": x for n, x in base.norm.state_dict().items()}
    weights |= base.layers[-1].state_dict()
    weights |= {
        f"{name}.weight": torch.ones(width, dtype=torch.float32) for name in ("enorm", "hnorm")
    }
    drafter.load_state_dict({**weights, "eh_proj.weight": drafter.eh_proj.weight})
    return drafter


def _around_last_layer(
    model: PreTrainedModel, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features of rows, and what the last layer reads: float64 [B, L, H]."""
    taken: list[torch.Tensor] = []
    hook = (
        cast(Any, model.base_model)
        .layers[-1]
        .register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0].double()))
    )
    try:
        return features_of(model, ids).double(), taken[0]
    finally:
        hook.remove()


class MtpObjective(Objective):
    """Draft behind every token of a row by repeated use, and compare tokens with the target's.

    Every step's loss is the cross entropy between the distributions that the target's head gives
    the target's feature and the drafted one.

    Parameters
    ----------
    target : PreTrainedModel
        Frozen here, and never in training mode.
    drafter : MtpDrafter
    depth : int
        Steps, each on what the one before has drafted.
    """

    def __init__(self, target: PreTrainedModel, drafter: MtpDrafter, *, depth: int = 4):
        super().__init__(target, drafter)
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.depth = depth

    def losses(
        self, input_ids: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int
    ) -> dict[str, torch.Tensor]:
        """Return the weighted mean of the steps' losses per label, and each by itself.

        The first tokens of a row have no draft at some steps, for which they count nothing.
        """
        drafter = cast(MtpDrafter, self.drafter)
        read = features_of(self.target, input_ids)
        embeds = self.target.get_input_embeddings()(input_ids)
        embeds, features = (x.to(drafter.dtype) for x in (embeds, read))
        outs = draft_texts(drafter, embeds, features, self.depth)
        hidden, counts = by_token(outs, labels)
        weight = self.target.get_output_embeddings().weight
        known, rows = features.flatten(0, 1), hidden.flatten(1, 2)
        unlike = soft_cross_entropy(rows, known, weight, counts.flatten(1))
        return of_steps(unlike, counts, items, DECAY)


@dataclass(frozen=True)
class MtpRecipe(Recipe):
    """How an MTP head is trained beside a target that has none.

    Parameters
    ----------
    preset : MtpPreset
    """

    preset: MtpPreset = MTP_PRESET

    drafter_class = MtpDrafter
    trainer_defaults = {
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.01,
        "adam_beta2": 0.95,
    }

    @property
    def method(self) -> Callable[[Any], Mtp]:
        """Trees as `Grown` has them."""
        return Mtp

    def new_drafter(self, target: PreTrainedModel, name: str) -> MtpDrafter:
        """Return a head at random; `fit_start` makes it the target's last layer."""
        return MtpDrafter.for_target(target, target=name)

    def fit_start(
        self, drafter: TrainedDrafter, target: PreTrainedModel, rows: Iterable[torch.Tensor]
    ) -> None:
        """Initialise a new head from the target's last layer."""
        assert isinstance(drafter, MtpDrafter)
        start_from_target(drafter, target, islice(rows, _START_ROWS))

    def objective(self, target: PreTrainedModel, drafter: TrainedDrafter) -> MtpObjective:
        """Return the drafter's loss."""
        assert isinstance(drafter, MtpDrafter)
        return MtpObjective(target, drafter, depth=self.preset.depth)
