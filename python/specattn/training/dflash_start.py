"""What a new DFlash drafter begins as: some of the target's layers behind a fitted ``fc``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from specattn.drafters import DFlashDrafter
from specattn.training.features import layer_features
from specattn.training.target import copy_head_norms, copy_linears, least_squares


@torch.no_grad()
def start_from_target(
    drafter: DFlashDrafter, target: PreTrainedModel, rows: Iterable[torch.Tensor]
) -> DFlashDrafter:
    """Initialise a new drafter as layers of the target, evenly spread, and its last norm.

    They read a block as they read texts. All of them have keys and values of the text from one c,
    in place of what each reads itself: ``fc`` is fitted to what stands for it best, over `rows` of
    text, int64 [L].
    """
    layers, base = cast(Any, drafter.layers), cast(Any, target.base_model)
    numbers = _numbers(drafter, base.layers)
    for own, number in zip(layers, numbers, strict=True):
        _copy_layer(own, base.layers[number])
    drafter.norm.weight.copy_(base.norm.weight)
    features, wanted = _fit(drafter, target, numbers, rows)
    fitted = least_squares(features, wanted)
    drafter.fc.weight.copy_(fitted)
    drafter.hidden_norm.weight.fill_((features @ fitted.T).square().mean().sqrt())
    return drafter


def _numbers(drafter: DFlashDrafter, layers: Any) -> list[int]:
    """Return which layers of the target are copied: the last, and others evenly spread before."""
    own = cast(Any, drafter.layers)[0].self_attn.k_proj.weight.shape
    able = [
        n
        for n, layer in enumerate(layers)
        if hasattr(layer, "self_attn") and layer.self_attn.k_proj.weight.shape == own
    ]
    count, last = drafter.config.layers, len(able) - 1
    return [able[last - round(n * last / max(1, count - 1))] for n in reversed(range(count))]


def _copy_layer(own: Any, layer: Any) -> None:
    """Copy a layer; its norms' weights become part of what reads them, so that c is read alike."""
    attention, scale = layer.self_attn, layer.input_layernorm.weight
    own.input_layernorm.weight.fill_(1)
    for name in ("q_proj", "k_proj", "v_proj"):
        mine, linear = getattr(own.self_attn, name), getattr(attention, name)
        copy_linears(mine, linear)
        mine.weight.mul_(scale)
    copy_linears(own.self_attn.o_proj, attention.o_proj)
    copy_head_norms(own.self_attn, attention)
    own.post_attention_layernorm.weight.copy_(layer.post_attention_layernorm.weight)
    if isinstance(getattr(layer.mlp, "gate_proj", None), nn.Linear):  # no mixture of experts
        for name in ("gate_proj", "up_proj", "down_proj"):
            copy_linears(own.mlp[name], getattr(layer.mlp, name))


def _fit(
    drafter: DFlashDrafter,
    target: PreTrainedModel,
    numbers: Sequence[int],
    rows: Iterable[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features of `rows`, and the c by which keys and values err least, float64 [n, ..]."""
    config, embedding = drafter.config, cast(Any, target.get_input_embeddings())
    asked, width = cast(Sequence[int], config.feature_layers), config.hidden_size
    reads = [
        torch.cat([one.self_attn.k_proj.weight, one.self_attn.v_proj.weight]).double()
        for one in cast(Any, drafter.layers)
    ]
    squares = [one.T @ one for one in reads]
    known, wanted = list[torch.Tensor](), list[torch.Tensor]()
    for row in rows:
        ids = row[None].to(target.device)
        found, _ = layer_features(target, ids, (*asked, *(n for n in numbers if n)))
        features, *streams = (
            found[0].double().split([width * len(asked), *(width for n in numbers if n)], -1)
        )
        if not numbers[0]:
            streams.insert(0, embedding(ids)[0].double())
        normed = (rms_norm(one, (width,), None, config.rms_norm_eps) for one in streams)
        known.append(features)
        parts = [one @ square for one, square in zip(normed, squares, strict=True)]
        wanted.append(torch.stack(parts).sum(0))
    whole = cast(torch.Tensor, sum(squares))
    whole += 1e-6 * whole.diagonal().mean() * torch.eye(width, dtype=whole.dtype).to(whole)
    return torch.cat(known), torch.linalg.solve(whole, torch.cat(wanted).T).T
