"""Training of DFlash's drafter (arXiv 2602.06036) and of causal ones, as JetFlow's (2606.18394)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from specattn.blocks import TORCH
from specattn.decoding import DFlash, JetFlow
from specattn.decoding.methods.dflash import fused, layers_of, run_block
from specattn.decoding.passes.decoder import rotated
from specattn.drafters import DFlashConfig, DFlashDrafter, TrainedDrafter
from specattn.training.dflash_start import start_from_target
from specattn.training.features import layer_features
from specattn.training.loss import IGNORED, linear_cross_entropy, soft_cross_entropy
from specattn.training.recipe import Objective, Preset, Recipe
from specattn.training.steps import means

TRAINER_DEFAULTS = {
    "optim": "adamw_torch",
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.04,
    "max_grad_norm": 1.0,
    "num_train_epochs": 6.0,
}
"""Fields of `transformers.TrainingArguments`, as DFlash's authors have them."""

DECAY = 7 / 16
"""Rows over which a hard label's weight falls to 1/e, of those of a block: the paper's at 16."""

_MOST_FEATURES, _START_ROWS, _BLOCKS_AT_ONCE = 5, 64, 8


@dataclass(frozen=True)
class BlockPreset(Preset):
    """How many blocks are drafted while the drafter learns.

    Attributes
    ----------
    anchors : int
        Blocks of a row, each behind a token of it.
    """

    anchors: int


DFLASH_PRESET = BlockPreset(3072, 8, 6e-4, 512)
"""Rows, rate and anchors of DFlash's paper."""


def draft_blocks(
    drafter: DFlashDrafter,
    table: torch.Tensor,
    input_ids: torch.Tensor,
    features: torch.Tensor,
    anchors: torch.Tensor,
) -> torch.Tensor:
    """Draft a block behind every anchor of whole sequences, as at inference.

    Parameters
    ----------
    drafter : DFlashDrafter
    table : Tensor [V, H]
        The target's embedding.
    input_ids : Tensor, int64 [B, L]
    features : Tensor [B, L, layers * H]
        The target's, of the same tokens.
    anchors : Tensor, int64 [B, A]
        Positions of the roots. A block sees the text before its own.

    Returns
    -------
    Tensor [B, A, block_size, H]
        What the target's head reads; row i is of the token i behind the anchor.
    """
    (batch, length), config, device = input_ids.shape, drafter.config, input_ids.device
    size, count = config.block_size, anchors.shape[1]
    behind = torch.arange(size, device=device)
    tokens = torch.full((batch, count, size), config.mask_token_id, device=device)
    tokens[..., 0] = input_ids.gather(1, anchors)
    x = TORCH.rows(table, tokens.flatten(1)).to(drafter.dtype)
    text = fused(TORCH, drafter, features.to(drafter.dtype))
    own = drafter.rotated(x, (anchors[..., None] + behind).flatten(1))
    before = drafter.rotated(x, torch.arange(length, device=device)[None])
    parts = _parts(anchors, size, bool(config.causal))

    def attend(n: int, weights: Any, read: torch.Tensor) -> torch.Tensor:
        q, k, v = rotated(TORCH, weights, read, config.head_dim, own, None)
        heads = TORCH.linear(text, weights.k, weights.v).unflatten(-1, (-1, config.head_dim))
        _, k_text, v_text = TORCH.rotate(heads, 0, before, norms=(None, weights.k_norm))
        outs = list[torch.Tensor]()
        # Split, not sliced: a slice's gradient is written over all rows.
        few = (one.split(_BLOCKS_AT_ONCE * size, 1) for one in (q, k, v))
        for q_few, k_few, v_few, (end, mask) in zip(*few, parts, strict=True):
            seen = torch.cat([k_text[:, :end], k_few], 1), torch.cat([v_text[:, :end], v_few], 1)
            q_t, k_t, v_t = (one.transpose(1, 2) for one in (q_few, *seen))
            out = scaled_dot_product_attention(q_t, k_t, v_t, mask, enable_gqa=True)
            outs.append(out.transpose(1, 2))
        return torch.cat(outs, 1)

    return run_block(TORCH, drafter, layers_of(drafter), x, attend).unflatten(1, (count, size))


def _parts(anchors: torch.Tensor, size: int, causal: bool) -> list[tuple[int, torch.Tensor]]:
    """Return, a few blocks at a time, the text that they see, and a mask of it and of their rows.

    Every row sees the text before its anchor, and of the blocks its own. `anchors` [B, A] ascend,
    so no more of the text is read than before the last of the few.
    """
    few = anchors.split(_BLOCKS_AT_ONCE, 1)
    ends = torch.stack([one[:, -1].max() for one in few]).tolist()
    parts = list[tuple[int, torch.Tensor]]()
    for end, some in zip(ends, few, strict=True):
        seen = torch.arange(end, device=some.device) < some[..., None]
        block = torch.arange(some.shape[1] * size, device=some.device) // size
        among = block[:, None] == block
        among = (among.tril() if causal else among).expand(len(some), -1, -1)
        parts.append((end, torch.cat([seen.repeat_interleave(size, 1), among], -1)[:, None]))
    return parts


class DFlashObjective(Objective):
    """Draft blocks behind some tokens of a row, and compare each row's token with the target's.

    A causal head learns the target's distribution at every row alike, by the forward KL divergence
    (as cross entropy, which has the same gradient); another the text's own tokens, those that stand
    further behind with less weight (`DECAY`). Anchors are drawn anew each time; in evaluation they
    are evenly spaced.

    Parameters
    ----------
    target : PreTrainedModel
        Frozen here, and never in training mode.
    drafter : DFlashDrafter
    anchors : int
        Blocks of a row, or as many as there are places for.
    """

    def __init__(self, target: PreTrainedModel, drafter: DFlashDrafter, *, anchors: int = 512):
        super().__init__(target, drafter)
        if anchors < 1:
            raise ValueError(f"anchors must be at least 1, got {anchors}")
        self.anchors = anchors

    def losses(
        self, input_ids: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int
    ) -> dict[str, torch.Tensor]:
        """Return the weighted mean over drafted tokens, and that of each row of a block by itself.

        Raises ValueError where rows are shorter than a block.
        """
        drafter = cast(DFlashDrafter, self.drafter)
        config, head = drafter.config, cast(Any, self.target.get_output_embeddings()).weight
        layers = cast(Sequence[int], config.feature_layers)
        features, read = layer_features(self.target, input_ids, layers)
        anchors = self._anchors(input_ids, config.block_size)
        table = cast(Any, self.target.get_input_embeddings()).weight
        hidden = draft_blocks(drafter, table, input_ids, features, anchors)
        sums, counts = list[torch.Tensor](), list[torch.Tensor]()
        for row in range(1, config.block_size):
            at = anchors + row - 1  # whose next token it is
            wanted, own = labels.gather(1, at).flatten(), hidden[:, :, row].flatten(0, 1)
            known = wanted != IGNORED
            if config.causal:
                theirs = read.gather(1, at[..., None].expand(-1, -1, read.shape[-1])).flatten(0, 1)
                one = soft_cross_entropy(own[None], theirs.to(own.dtype), head, known[None])[0]
            else:
                one = linear_cross_entropy(own, head, wanted)
            sums.append(one)
            counts.append(known.sum())
        found, count = torch.stack(sums), torch.stack(counts)
        weights = torch.ones_like(found)
        if not config.causal:
            steps = torch.arange(len(found), device=found.device, dtype=found.dtype)
            weights = (-steps / (DECAY * config.block_size)).exp()
        mean = (weights * found).sum() / (weights * count).sum().clamp_min(1e-9)
        return {"loss": mean * (labels != IGNORED).sum() / items, **means(found, count)}

    def _anchors(self, input_ids: torch.Tensor, size: int) -> torch.Tensor:
        """Return anchors [B, A], ascending: whole blocks fit behind them, and a token before."""
        (batch, length), device = input_ids.shape, input_ids.device
        places = length - size + 1
        if places < 1:
            raise ValueError(f"rows of {length} tokens are shorter than a block of {size}")
        count = min(self.anchors, places)
        if self.training:
            chances = torch.rand(batch, places, device=device, dtype=torch.float32)
            drawn = chances.topk(count).indices.sort(1).values
        else:
            drawn = (torch.arange(count, device=device) * places // count).expand(batch, -1)
        return drawn + 1


@dataclass(frozen=True)
class DFlashRecipe(Recipe):
    """How DFlash's drafter is trained, or a causal one.

    Parameters
    ----------
    preset : BlockPreset
    causal : bool
        Whether rows of a block see no later ones.
    layers, block_size : int
        Of a new drafter.
    feature_layers : sequence of int, optional
        Behind how many of the target's layers features are taken. By default five, spread evenly.
    mask_token_id : int, optional
        By default the last of the target's vocabulary.
    """

    preset: BlockPreset = DFLASH_PRESET
    causal: bool = False
    layers: int = 5
    block_size: int = 16
    feature_layers: Sequence[int] | None = None
    mask_token_id: int | None = None

    drafter_class = DFlashDrafter
    trainer_defaults = TRAINER_DEFAULTS

    @property
    def method(self) -> Callable[[Any], DFlash]:
        """Trees of the best paths."""
        return JetFlow if self.causal else DFlash

    def new_drafter(self, target: PreTrainedModel, name: str) -> DFlashDrafter:
        """Return a drafter at random, as its authors begin."""
        vocabulary, mask = target.config.vocab_size, self.mask_token_id
        config = DFlashConfig.for_target(
            target,
            target=name,
            layers=self.layers,
            block_size=self.block_size,
            feature_layers=list(self.feature_layers or spread(target.config.num_hidden_layers)),
            mask_token_id=vocabulary - 1 if mask is None else mask,
            causal=self.causal,
        )
        return DFlashDrafter(config)

    def fit_start(
        self, drafter: TrainedDrafter, target: PreTrainedModel, rows: Iterable[torch.Tensor]
    ) -> None:
        """Initialise a new drafter from layers of the target."""
        assert isinstance(drafter, DFlashDrafter)
        start_from_target(drafter, target, islice(rows, _START_ROWS))

    def objective(self, target: PreTrainedModel, drafter: TrainedDrafter) -> DFlashObjective:
        """Return the drafter's loss; raise ValueError where it is causal and should not be."""
        assert isinstance(drafter, DFlashDrafter)
        if bool(drafter.config.causal) != self.causal:
            raise ValueError(f"causal: {self.causal}, the drafter has {drafter.config.causal}")
        return DFlashObjective(target, drafter, anchors=self.preset.anchors)


def spread(depth: int) -> list[int]:
    """Return behind how many of a target's layers features are taken: few, evenly spread.

    As the authors have it, from the second layer to the last but two; of shallow targets from all.
    """
    first, last = (2, depth - 2) if depth > _MOST_FEATURES + 2 else (1, depth)
    count = min(_MOST_FEATURES, last - first + 1)
    return [first + round(n * (last - first) / max(1, count - 1)) for n in range(count)]
