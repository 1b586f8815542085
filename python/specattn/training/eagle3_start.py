"""What a new EAGLE-3 drafter begins as: the target's last layer behind a least-squares ``fc``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from specattn.blocks import TORCH
from specattn.drafters import Eagle3Drafter
from specattn.drafters.eagle3 import fused_input
from specattn.training.features import layer_features
from specattn.training.target import copy_head_norms, copy_linears, least_squares

_SHARPNESS = 16.0  # logit of a token head for its own pair, where heads are not normed


@torch.no_grad()
def start_from_target(
    drafter: Eagle3Drafter, target: PreTrainedModel, rows: Iterable[torch.Tensor]
) -> Eagle3Drafter:
    """Initialise a new drafter as the target's head and its last layer; return it.

    ``fc`` is fitted to the stream behind the last layer, over `rows` of text, int64 [L]. So what
    the drafter makes, the same of the next token, takes its place from step to step. What the last
    layer reads at that token is fitted to the pair. Of that the drafter's stream has the pair's own
    g; the rest cannot enter it but by attention: *token heads*, those beside the target's, begin as
    heads that find the same token, their own pair first, and add it. A reduced vocabulary is made
    of the tokens that are most frequent in the rows.
    """
    texts = list(rows)
    if (d2t := drafter.d2t) is not None:
        counts = torch.bincount(torch.cat(texts), minlength=drafter.config.vocab_size)
        tokens = counts.argsort(descending=True, stable=True)[: len(d2t)].sort().values
        d2t.copy_(tokens - torch.arange(len(tokens)))
    head = target.get_output_embeddings().weight
    drafter.lm_head.weight.copy_(head if drafter.tokens is None else head[drafter.tokens])
    base = cast(Any, target.base_model)
    drafter.norm.weight.copy_(base.norm.weight)
    _copy_layer(drafter, base.layers[-1], _fit(drafter, target, texts))
    return drafter


class _Fit(NamedTuple):
    """What the last layer reads, of the normed pair [H, 2 H]: whole, and without the pair's g."""

    whole: torch.Tensor
    rest: torch.Tensor
    size: float


def _fit(drafter: Eagle3Drafter, target: PreTrainedModel, rows: list[torch.Tensor]) -> _Fit:
    """Fit ``fc``, and what the last layer reads of it."""
    layers, depth = drafter.config.layers_of(target.config), target.config.num_hidden_layers
    width, own = drafter.config.hidden_size, drafter.embed_tokens
    embedding: Any = target.get_input_embeddings() if own is None else own
    known, streams, reads, tokens = (list[torch.Tensor]() for _ in range(4))
    for row in rows:
        ids = row[None].to(target.device)
        features, _ = layer_features(target, ids, (*layers, depth, depth - 1))
        features, stream, read = features[0].split([width * len(layers), width, width], -1)
        known.append(fused_input(TORCH, drafter, features[:-1]).double())
        streams.append(stream[:-1].double())
        reads.append(read[1:].double())
        tokens.append(embedding(ids)[0, 1:].double())
    x, stream, read, token = map(torch.cat, (known, streams, reads, tokens))
    by_features = least_squares(x, stream)
    drafter.fc.weight.copy_(by_features)
    g = x @ by_features.T
    size, eps = g.square().mean().sqrt(), drafter.config.rms_norm_eps
    cast(Any, drafter.midlayer).hidden_norm.weight.fill_(size)
    token, normed = (rms_norm(part, (width,), None, eps) for part in (token, g))
    begins = size * normed if drafter.config.norm_before_residual else g
    pairs = torch.cat([token, size * normed], -1)
    whole, rest = least_squares(pairs, read), least_squares(pairs, read - begins)
    return _Fit(whole, rest, read.square().mean().sqrt().item())


def _copy_layer(drafter: Eagle3Drafter, layer: Any, fit: _Fit) -> None:
    """Copy the target's last layer, reading the fitted stream in its two parts."""
    own, theirs = cast(Any, drafter.midlayer), layer.self_attn
    attention, dtype = own.self_attn, drafter.dtype
    stream = layer.input_layernorm.weight.double()[:, None] * fit.whole / fit.size  # as normed
    for name in ("q_proj", "k_proj", "v_proj"):
        mine, linear = getattr(attention, name), getattr(theirs, name)
        rows = len(linear.weight)
        mine.weight[:rows].copy_((linear.weight.double() @ stream).to(dtype))
        if mine.bias is not None:
            mine.bias.zero_()
            mine.bias[:rows].copy_(linear.bias)
    columns = theirs.o_proj.weight.shape[1]
    attention.o_proj.weight[:, :columns].copy_(theirs.o_proj.weight)
    copy_head_norms(attention, theirs)
    _start_token_heads(attention, columns, fit, drafter.config)
    if isinstance(getattr(layer.mlp, "gate_proj", None), nn.Linear):  # no mixture of experts
        for name in ("gate_proj", "up_proj", "down_proj"):
            copy_linears(own.mlp[name], getattr(layer.mlp, name))
    own.post_attention_layernorm.weight.copy_(layer.post_attention_layernorm.weight)


def _start_token_heads(attention: Any, columns: int, fit: _Fit, config: Any) -> None:
    """Make the heads beside the target's find equal tokens, and add what the embedding gives."""
    kv_rows = columns * config.num_key_value_heads // config.num_attention_heads
    own, width = len(attention.k_proj.weight) - kv_rows, config.hidden_size
    if not own:
        return
    size, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    like = attention.k_proj.weight
    find = torch.nn.init.orthogonal_(
        torch.empty(max(own, width), min(own, width), dtype=torch.float32)
    )
    find = find[:own] if own >= width else find.T
    if not config.qk_norm:
        find *= (_SHARPNESS * size**-0.5) ** 0.5
    u, s, v = torch.linalg.svd(fit.rest, full_matrices=False)
    root = s[:own].sqrt()
    key, value = torch.zeros(2, own, 2 * width, dtype=torch.float32).unbind()
    key[:, :width] = find
    value[: len(root)] = root[:, None] * v[:own]
    out = torch.zeros(own, width, dtype=torch.float32)
    out[: len(root)] = (root * u[:, :own]).T / group
    by_head = (x.unflatten(0, (-1, 1, size)).expand(-1, group, -1, -1) for x in (key, out))
    query, out = (x.flatten(0, 2).to(like) for x in by_head)
    attention.k_proj.weight[kv_rows:].copy_(key)
    attention.v_proj.weight[kv_rows:].copy_(value)
    attention.q_proj.weight[columns:].copy_(query)
    attention.o_proj.weight[:, columns:].copy_(out.T)
