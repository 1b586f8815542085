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
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specattn.drafters.drafter import TrainedDrafter
from specattn.drafters.layer import LayerConfig, Rotation, rotate
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


class LongSpecDrafter(TrainedDrafter):
    """The drafter's block. Embedding and head are the target's and not part of it.

    `forward` is for whole sequences, as training sees them; decoding calls `block` with attentions
    of its own. Both are the same equations.

    Parameters
    ----------
    config : LongSpecConfig
    """

    config_class = LongSpecConfig
    title = "LongSpec"
    main_input_name = "inputs_embeds"
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
        self.rotary_emb = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]
        self.post_init()

    @classmethod
    def for_target(
        cls, model: PreTrainedModel, *, target: str, window: int = 512
    ) -> LongSpecDrafter:
        """Return a new drafter for `model`: random, but its last norm begins as the target's.

        Parameters
        ----------
        model : PreTrainedModel
        target : str
            What the drafter's folder will call the model: a name or a path.
        window : int
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
        """Run over whole sequences, every token as if it were drafted `shift` - 1 steps ahead.

        Parameters
        ----------
        inputs_embeds : Tensor [B, L, H]
            From the target's embedding.
        position_ids : Tensor, int64 [B, L]
            Strictly increasing along L; the window counts them.
        target_keys, target_values : Tensor [B, L, Hk, D]
            What the target's last layer caches for the same tokens at the same positions, keys
            rotated.
        shift : int
            Token t sees the target's keys of tokens up to ``t - shift`` (flash noisy training, v2
            Algorithm 2). At inference a node at depth d has shift d + 1, the root being at depth 0.
            With shift 0 a token sees even itself, as it never does at inference.

        Returns
        -------
        Tensor [B, L, H]
            Normed: the target's head makes logits of it.

        Raises
        ------
        ValueError
            A shape does not fit, or `shift` is not from 0 to L - 1.
        """
        self._check_inputs(inputs_embeds, position_ids, target_keys, target_values, shift)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return windowed_attention(q, k, v, position_ids, self.config.window)

        def attend_to_target(q: torch.Tensor) -> torch.Tensor:
            return shifted_attention(q, target_keys, target_values, shift)

        rotation = self.rotation(inputs_embeds, position_ids)
        return self.block(inputs_embeds, rotation, attend, attend_to_target)

    def block(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        attend: SelfAttend,
        attend_to_target: CrossAttend,
    ) -> torch.Tensor:
        """Apply the equations at the top of this file, with attentions of the caller's choice.

        Parameters
        ----------
        x : Tensor [B, T, H]
        rotation : Rotation
            Of the tokens' positions.
        attend : callable
            ``attend(q, k, v)``: [B, T, Hq, D] from queries and this block's own new keys and
            values.
        attend_to_target : callable
            ``attend_to_target(q)``: [B, T, Hq, D] from the target's last layer.

        Returns
        -------
        Tensor [B, T, H]
        """
        q, k, v = self.self_attention.project(self.self_norm(x), rotation)
        x = x + self.self_attention.o_proj(attend(q, k, v).flatten(2))
        q, _, _ = self.cross_attention.project(self.cross_norm(x), rotation)
        x = x + self.cross_attention.o_proj(attend_to_target(q).flatten(2))
        gate, up = self.gate_up_proj(self.mlp_norm(x)).chunk(2, -1)
        return self.norm(x + self.down_proj(silu(gate) * up))

    def keys_and_values(
        self, x: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what self attention caches for tokens: a function of token and position alone."""
        _, k, v = self.self_attention.project(self.self_norm(x), rotation)
        return k, v

    def rotation(self, like: torch.Tensor, position_ids: torch.Tensor) -> Rotation:
        """Return the target's rotation at positions [B, T], in the dtype of `like`."""
        cos, sin = self.rotary_emb(like, position_ids)
        return cos[:, :, None], sin[:, :, None]

    def _check_inputs(
        self,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        target_keys: torch.Tensor,
        target_values: torch.Tensor,
        shift: int,
    ) -> None:
        config, (batch, length, *_) = self.config, inputs_embeds.shape
        cache = (batch, length, config.num_key_value_heads, config.head_dim)
        for name, tensor, shape in (
            ("inputs_embeds", inputs_embeds, (batch, length, config.hidden_size)),
            ("position_ids", position_ids, (batch, length)),
            ("target_keys", target_keys, cache),
            ("target_values", target_values, cache),
        ):
            if tensor.shape != shape:
                raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
        if not 0 <= shift < length:
            raise ValueError(f"shift: expected 0 to {length - 1} for {length} tokens, got {shift}")


class _Projections(nn.Module):
    """The projections around one attention; without KV heads, those of cross attention."""

    def __init__(self, config: LongSpecConfig, kv_heads: int):
        super().__init__()
        self.head_dim, heads = config.head_dim, config.num_attention_heads
        self.heads = [heads, kv_heads, kv_heads]
        width, eps = config.hidden_size, config.rms_norm_eps
        self.qkv_proj = nn.Linear(width, sum(self.heads) * self.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps) if config.qk_norm and kv_heads else None

    def project(
        self, x: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values [B, T, heads, D], the first two normed and rotated."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split(self.heads, 2)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return rotate(q, rotation), rotate(k, rotation) if k.shape[2] else k, v
