"""LongSpec's drafter: one block between the target's own embedding and head.

With x the embedding of a token at position t (arXiv 2502.17421, section 3.1)::

    x += self_attention(norm(x))     the last `window` positions, the drafter's own keys and values
    x += cross_attention(norm(x))    the keys and values of the target's last layer, where they lie
    x += swiglu(norm(x))
    logits = target's head (norm(x))

Cross attention projects no keys and no values: its queries are rotated like the target's and meet
the target's cache as it is. So the drafter's own memory is `window` tokens, whatever the context.

Two points on which the paper is silent. A norm stands before the head, as the frozen head expects
normed input (the authors' program has none). Queries and keys are shaped as in the target: with a
norm per head where the target has one, with a bias where it has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from specattn.blocks import TORCH, Ops, Rotation, Store, norm_of, projection, swiglu
from specattn.drafters.layer import LayerConfig, LayerDrafter, check_shapes
from specattn.drafters.training_attention import shifted_attention, windowed_attention

SelfAttend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
CrossAttend = Callable[[torch.Tensor], torch.Tensor]


class LongSpecConfig(LayerConfig):
    """What a LongSpec drafter is made of; ``config.json`` of its folder.

    Its fields beside these are `LayerConfig`'s, all of them as the target has them.

    Attributes
    ----------
    window : int
        Positions that self attention reaches back, the token's own included.

    Raises
    ------
    ValueError
        The window is not positive, or the rope is not static.
    """

    model_type = "longspec"
    # All that it takes to read the target's cache.
    shared = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rope_parameters",
    )

    window: int = 512

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.window < 1:
            raise ValueError(f"window must be at least 1 position, got {self.window}")


class LongSpecDrafter(LayerDrafter):
    """The drafter's block. Embedding and head are the target's and not part of it.

    `forward` is for whole sequences, as training sees them; decoding calls `block` with attentions
    of its own.

    Parameters
    ----------
    config : LongSpecConfig
    """

    config_class = LongSpecConfig
    title = "LongSpec"
    _supports_sdpa = True

    def __init__(self, config: LongSpecConfig):
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_norm = nn.RMSNorm(width, eps)
        self.self_attention = _Projections(config, config.num_key_value_heads)
        self.cross_norm = nn.RMSNorm(width, eps)
        self.cross_attention = _Projections(config, kv_heads=0)
        self.mlp_norm = nn.RMSNorm(width, eps)
        self.gate_up_proj = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)
        self.norm = nn.RMSNorm(width, eps)
        self.post_init()

    @classmethod
    def for_target(
        cls, model: PreTrainedModel, *, target: str, window: int = 512
    ) -> LongSpecDrafter:
        """Return a new drafter for `model`: random, but with a copy of the target's last norm.

        `target` is the name or path by which the drafter's folder will know the model.
        """
        drafter = cls(LongSpecConfig.for_target(model, target=target, window=window))
        with torch.no_grad():
            drafter.norm.weight.copy_(cast(Any, model.base_model).norm.weight)
        cast(Any, drafter).to(model.device)
        return drafter

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        target_keys: torch.Tensor,
        target_values: torch.Tensor,
        shift: int = 1,
    ) -> torch.Tensor:
        """Return what the target's head reads, each token as if drafted `shift` - 1 steps ahead.

        `inputs_embeds` [B, L, H] are from the target's embedding; `position_ids`, int64 [B, L],
        increase strictly along L; `target_keys` and `target_values`, [B, L, Hk, D], are what the
        target's last layer caches for the same tokens, keys rotated. The result is [B, L, H].

        Token t sees the target's keys of tokens up to ``t - shift`` (flash noisy training, v2
        Algorithm 2). At inference a node at depth d has shift d + 1, the root being at depth 0.
        With shift 0 a token sees even itself, as it never does at inference. Raises ValueError
        where a shape does not fit, or `shift` is not from 0 to L - 1.
        """
        config, (batch, length, *_) = self.config, inputs_embeds.shape
        cache = (batch, length, config.num_key_value_heads, config.head_dim)
        check_shapes(
            inputs_embeds=(inputs_embeds, (batch, length, config.hidden_size)),
            position_ids=(position_ids, (batch, length)),
            target_keys=(target_keys, cache),
            target_values=(target_values, cache),
        )
        if not 0 <= shift < length:
            raise ValueError(f"shift: expected 0 to {length - 1} for {length} tokens, got {shift}")

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return windowed_attention(q, k, v, position_ids, self.config.window)

        def attend_to_target(q: torch.Tensor) -> torch.Tensor:
            return shifted_attention(q, target_keys, target_values, shift)

        place = self.rotated(inputs_embeds, position_ids)
        return block(TORCH, self, inputs_embeds, place, attend, attend_to_target)


class _Projections(nn.Module):
    """The projections around one attention; without KV heads, those of cross attention."""

    def __init__(self, config: LongSpecConfig, kv_heads: int):
        super().__init__()
        self.head_dim, self.kv_heads = config.head_dim, kv_heads
        self.q_heads = config.num_attention_heads
        width, eps = config.hidden_size, config.rms_norm_eps
        heads = self.q_heads + 2 * kv_heads
        self.qkv_proj = nn.Linear(width, heads * self.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.q_heads * self.head_dim, width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps) if config.qk_norm and kv_heads else None


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, each [B, T, heads, D]."""


def block(
    ops: Ops,
    drafter: LongSpecDrafter,
    x: torch.Tensor,
    place: Rotation,
    attend: SelfAttend,
    attend_to_target: CrossAttend,
    store: Store | None = None,
) -> torch.Tensor:
    """Return the equations at the top of this file, what the target's head reads: [B, T, H].

    ``attend(q, k, v)`` and ``attend_to_target(q)`` return [B, T, Hq, D], over this block's own keys
    and those of the target's last layer. `place` are the tokens' positions; new keys and values are
    written to `store`.
    """
    own, cross = drafter.self_attention, drafter.cross_attention
    out = attend(*self_heads(ops, drafter, x, place, store))
    x = ops.linear(out.flatten(2), projection(own.o_proj), residual=x)
    q, _, _ = _heads(ops, cross, ops.norm(x, norm_of(drafter.cross_norm)), place)
    x = ops.linear(attend_to_target(q).flatten(2), projection(cross.o_proj), residual=x)
    x = swiglu(ops, x, norm_of(drafter.mlp_norm), drafter.gate_up_proj, drafter.down_proj)
    return ops.norm(x, norm_of(drafter.norm))


def self_heads(
    ops: Ops,
    drafter: LongSpecDrafter,
    x: torch.Tensor,
    place: Rotation,
    store: Store | None = None,
) -> Heads:
    """Return the heads of self attention; keys and values follow from token and position alone."""
    return _heads(
        ops, drafter.self_attention, ops.norm(x, norm_of(drafter.self_norm)), place, store
    )


def _heads(
    ops: Ops, weights: _Projections, x: torch.Tensor, place: Rotation, store: Store | None = None
) -> Heads:
    heads = ops.linear(x, projection(weights.qkv_proj)).unflatten(-1, (-1, weights.head_dim))
    norms = norm_of(weights.q_norm), norm_of(weights.k_norm)
    return ops.rotate(heads, weights.q_heads, place, norms=norms, store=store)
