"""Training of PosS' specialists, and of EAGLE-2's and HASS' single layer (PosS, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.functional import pad, rms_norm, smooth_l1_loss
from transformers import PreTrainedModel

from specattn.decoding import PosS
from specattn.drafters import PosSDrafter, TrainedDrafter
from specattn.drafters.poss import Specialist
from specattn.training.features import FeatureCache, features_of
from specattn.training.loss import IGNORED, soft_cross_entropy
from specattn.training.recipe import Objective, Preset, Recipe
from specattn.training.target import copy_linears, copy_mlp, copy_output_and_norms

NORMS = ("fc_norm", "norm_output")
"""Fields of `PosSConfig`: EAGLE 3.1's norms."""

_START_ROWS, _RIDGE = 64, 1e-3


@dataclass(frozen=True)
class Variant(Preset):
    """A drafter of the family, and how far it drafts while it learns.

    Attributes
    ----------
    positions_per_layer : int or None
        PosS' n; None is one layer for all positions.
    depth : int
        Drafted tokens behind every token of a row.
    """

    positions_per_layer: int | None
    depth: int

    @property
    def layers(self) -> int:
        """Specialists for `depth`."""
        return -(-self.depth // (self.positions_per_layer or self.depth))


def _variant(positions_per_layer: int | None, depth: int = 6) -> Variant:
    # Rows, steps and rate of the authors' program; the paper's depth for its 8B target.
    return Variant(2048, 8, 3e-5, positions_per_layer, depth)


VARIANTS = {
    "eagle-2": _variant(None, depth=1),
    "hass": _variant(None),
    "poss-1": _variant(1),
    "poss-2": _variant(2),
    "poss-3": _variant(3),
}
"""The drafters of the paper's tables; depth 6 is its choice for the 8B target (appendix C)."""

TRAINER_DEFAULTS = {
    "optim": "adamw_torch",
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.01,
    "adam_beta2": 0.95,
    "num_train_epochs": 20.0,
}
"""Fields of `transformers.TrainingArguments`. Epochs are the paper's (appendix B.2); the rest is in
the authors' program alone."""

FEATURE_WEIGHT, TOKEN_WEIGHT = 1.0, 0.1
"""Of the two losses, as in the authors' program."""


@torch.no_grad()
def start_from_target(
    drafter: PosSDrafter, target: PreTrainedModel, rows: Iterable[torch.Tensor]
) -> PosSDrafter:
    """Initialise a new drafter as the target's last layer behind a least-squares ``fc``; return it.

    ``fc`` becomes the least-squares map from embedding and feature to the next feature, fitted to
    `rows` of text, int64 [L]. Behind it every specialist is a copy of the target's last layer,
    whose output is scaled as the target's final norm scales it on average: features are what that
    norm leaves. The drafter's own norms of features, if it has them, leave these as large as they
    are on average. The paper says no more than that it starts from EAGLE; `docs/training.md` has
    what this saves.
    """
    fc, width = drafter.fc, drafter.config.hidden_size
    square = torch.zeros(2 * width, 2 * width, dtype=torch.float64, device=target.device)
    cross = torch.zeros(2 * width, width, dtype=torch.float64, device=target.device)
    normed = unnormed = 0.0
    count = 0
    for row in rows:
        ids = row[None].to(target.device)
        features, before_norm = _around_norm(target, ids)
        embeds = target.get_input_embeddings()(ids).double()
        known = features[0, :-1]
        if drafter.config.fc_norm:
            known = rms_norm(known, (width,), None, drafter.config.rms_norm_eps)
        x = torch.cat([embeds[0, 1:], known], -1)
        square += x.T @ x
        cross += x.T @ features[0, 1:]
        normed += float(features.square().sum())
        unnormed += float(before_norm.square().sum())
        count += features.numel()
    ridge = _RIDGE * square.diagonal().mean() * torch.eye(2 * width, dtype=torch.float64).to(square)
    fc.weight.copy_(torch.linalg.solve(square + ridge, cross).T)
    size = (normed / count) ** 0.5
    if drafter.fc_norm is not None:
        drafter.fc_norm.weight.fill_(size)
        fc.weight[:, width:] /= size
    if fc.bias is not None:
        fc.bias.zero_()
    for specialist in cast(Any, drafter.specialists):
        _copy_layer(specialist, cast(Any, target.base_model).layers[-1], (normed / unnormed) ** 0.5)
        if specialist.output_norm is not None:
            specialist.output_norm.weight.fill_(size)
    return drafter


def _around_norm(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows after and before the target's final norm, float64 [B, L, H]."""
    taken: list[torch.Tensor] = []
    hook = cast(Any, model.base_model).norm.register_forward_pre_hook(
        lambda _, inputs: taken.append(inputs[0].double())
    )
    try:
        return features_of(model, ids).double(), taken[0]
    finally:
        hook.remove()


def _copy_layer(specialist: Specialist, layer: Any, scale: float) -> None:
    own, theirs = specialist.attention, layer.self_attn
    copy_linears(own.q_proj, theirs.q_proj)
    copy_linears(own.kv_proj, theirs.k_proj, theirs.v_proj)
    copy_output_and_norms(own, theirs, scale)
    copy_mlp(specialist, layer, scale)
    specialist.norm.weight.copy_(layer.post_attention_layernorm.weight)


def start_from_drafter(drafter: PosSDrafter, start: PosSDrafter) -> PosSDrafter:
    """Copy a trained drafter into a new one, and return that: specialists it lacks are its last.

    So PosS starts from EAGLE (PosS, appendix B.2). Raises ValueError where their layers have
    different shapes, or one has a norm that the other lacks.
    """
    for name in NORMS:
        own, theirs = getattr(drafter.config, name), getattr(start.config, name)
        if own != theirs:
            raise ValueError(
                f"the drafter to start from has {name} {theirs}, expected {own} as in the new one"
            )
    weights = dict(start.state_dict())
    last = f"specialists.{start.config.layers - 1}."
    copied = [name for name in weights if name.startswith(last)]
    for layer in range(start.config.layers, drafter.config.layers):
        for name in copied:
            weights[f"specialists.{layer}.{name.removeprefix(last)}"] = weights[name]
    needed = drafter.state_dict()
    try:
        drafter.load_state_dict({name: weights[name] for name in needed})
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"the drafter to start from has other layers: {error}") from None
    return drafter


class PosSObjective(Objective):
    """Draft behind every token of a row, and compare features and tokens with the frozen target's.

    Every depth adds a smooth L1 loss of the drafted feature and the cross entropy between the
    distributions that the target's head gives the target's feature and the drafted one (PosS,
    section 3).

    Parameters
    ----------
    target : PreTrainedModel
        Frozen here, and never in training mode.
    drafter : PosSDrafter
    depth : int
        Drafted tokens behind each token: 1 is EAGLE-2's teacher forcing, more is recursive feature
        alignment.
    feature_weight, token_weight : float
        Of the two losses.
    feature_cache : FeatureCache, optional
        Where the target's features are kept; by default they are computed each time.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PosSDrafter,
        *,
        depth: int = 6,
        feature_weight: float = FEATURE_WEIGHT,
        token_weight: float = TOKEN_WEIGHT,
        feature_cache: FeatureCache | None = None,
    ):
        super().__init__(target, drafter)
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.depth, self.feature_cache = depth, feature_cache
        self.feature_weight, self.token_weight = feature_weight, token_weight

    def losses(
        self, input_ids: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int
    ) -> dict[str, torch.Tensor]:
        """Return the weighted sum of both losses per label and depth, and each by itself.

        The first tokens of a row have no draft at some depths, for which they count nothing.
        """
        embeds = self.target.get_input_embeddings()(input_ids)
        if self.feature_cache is None:
            features = features_of(self.target, input_ids)
        else:
            features = self.feature_cache(self.target, input_ids)
        # The drafter may be trained in more bits than the target is stored in.
        embeds, features = (x.to(self.drafter.dtype) for x in (embeds, features))
        drafted = self.drafter(embeds, features, self.depth)
        # Row t of depth s predicts token t + s + 1: put it there.
        length = input_ids.shape[1]
        hidden = torch.stack([pad(x, (0, 0, length - x.shape[1], 0)) for x in drafted])
        first = torch.arange(1, self.depth + 1, device=labels.device)[:, None, None]
        counts = (labels != IGNORED) & (torch.arange(length, device=labels.device) >= first)
        apart = smooth_l1_loss(hidden, features.expand_as(hidden), reduction="none").mean(-1)
        apart = (apart * counts).sum()
        unlike = soft_cross_entropy(
            hidden.flatten(1, 2),
            features.flatten(0, 1),
            self.target.get_output_embeddings().weight,
            counts.flatten(1),
        )
        own_items = (labels != IGNORED).sum()
        loss = self.feature_weight * apart + self.token_weight * unlike.sum()
        by_depth = {f"token_loss_{n + 1}": x / counts[n].sum() for n, x in enumerate(unlike)}
        return {
            "loss": loss / (self.depth * items),
            "feature_loss": apart / (self.depth * own_items),
            "token_loss": unlike.sum() / (self.depth * own_items),
            **by_depth,
        }


@dataclass(frozen=True)
class PosSRecipe(Recipe):
    """How PosS', EAGLE-2's and HASS' drafters are trained.

    Parameters
    ----------
    preset : Variant
    feature_weight, token_weight : float
        As `PosSObjective` has them.
    fc_norm, norm_output : bool
        Norms of a new drafter, as `PosSConfig` has them.
    start : path, optional
        A drafter to initialise a new one from, its layers repeated; by default the target's last
        layer.
    feature_cache : path, optional
        As `FeatureCache` has it.
    """

    preset: Variant
    feature_weight: float = FEATURE_WEIGHT
    token_weight: float = TOKEN_WEIGHT
    fc_norm: bool = False
    norm_output: bool = False
    start: Path | None = None
    feature_cache: Path | None = None

    drafter_class = PosSDrafter
    trainer_defaults = TRAINER_DEFAULTS

    @property
    def method(self) -> Callable[[Any], PosS]:
        """The paper's trees."""
        return PosS

    def new_drafter(self, target: PreTrainedModel, name: str) -> PosSDrafter:
        """Return a drafter initialised from another one, or at random."""
        drafter = PosSDrafter.for_target(
            target,
            target=name,
            layers=self.preset.layers,
            positions_per_layer=self.preset.positions_per_layer or 1,
            fc_norm=self.fc_norm,
            norm_output=self.norm_output,
        )
        if self.start is not None:
            start_from_drafter(drafter, PosSDrafter.from_pretrained(self.start))
        return drafter

    def fit_start(
        self, drafter: TrainedDrafter, target: PreTrainedModel, rows: Iterable[torch.Tensor]
    ) -> None:
        """Initialise a new drafter from the target's last layer, unless `start` is given."""
        assert isinstance(drafter, PosSDrafter)
        if self.start is None:
            start_from_target(drafter, target, islice(rows, _START_ROWS))

    def objective(self, target: PreTrainedModel, drafter: TrainedDrafter) -> PosSObjective:
        """Return the drafter's loss; raise ValueError where it lacks a norm that was requested."""
        assert isinstance(drafter, PosSDrafter)
        for name in NORMS:
            if getattr(self, name) and not getattr(drafter.config, name):
                raise ValueError(f"{name}: a norm is for new drafters, and this one has none")
        cache = None if self.feature_cache is None else FeatureCache(self.feature_cache, target)
        return PosSObjective(
            target,
            drafter,
            depth=self.preset.depth,
            feature_weight=self.feature_weight,
            token_weight=self.token_weight,
            feature_cache=cache,
        )
