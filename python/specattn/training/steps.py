"""Losses of drafts of several steps, each by itself and together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from specattn.training.loss import IGNORED


def by_token(
    outs: Sequence[torch.Tensor], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return drafts along texts [S, B, L, H] at the tokens whose labels they predict, and of which.

    Row t of step s, [B, L - 1 - s, H], predicts what follows token ``t + s + 1``. The first tokens
    of a text have no draft at some steps: there, and where a label is `IGNORED`, nothing counts.
    """
    length = labels.shape[1]
    hidden = torch.stack([pad(x, (0, 0, length - x.shape[1], 0)) for x in outs])
    first = torch.arange(1, len(outs) + 1, device=labels.device)[:, None, None]
    return hidden, (labels != IGNORED) & (torch.arange(length, device=labels.device) >= first)


def of_steps(
    sums: torch.Tensor, counts: torch.Tensor, items: torch.Tensor | int, decay: float
) -> dict[str, torch.Tensor]:
    """Return the mean of the steps' summed losses [S], each weighing `decay` times the one before.

    It is per label, of `items`; beside it are the steps' `means`, over `counts` [S, B, L].
    """
    weights = decay ** torch.arange(len(sums), device=sums.device, dtype=sums.dtype)
    loss = (weights * sums).sum() / (weights.sum() * items)
    return {"loss": loss, **means(sums, counts.sum((1, 2)))}


def means(sums: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the mean loss of each step, by the name that logs have for it."""
    return {f"token_loss_{n + 1}": x for n, x in enumerate(sums / counts.clamp_min(1))}
