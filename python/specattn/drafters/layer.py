"""Configuration and rope of drafters that are made of transformer layers like the target's."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specattn.blocks import Rotated
from specattn.drafters.drafter import DrafterConfig, TrainedDrafter

STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rope whose rotation of a token depends on its position alone."""

_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "initializer_range",
)

_Config = TypeVar("_Config", bound="LayerConfig")


class LayerConfig(DrafterConfig):
    """Configuration of a drafter's layers: sizes, norms and rope as the target's layers have them.

    `qkv_bias`: projections to queries, keys and values have a bias; `qk_norm`: queries and keys are
    normed per head. Raises ValueError where the rope is not static. See `DrafterConfig`.
    """

    hidden_size: int = 256
    intermediate_size: int = 1024
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 4096
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    rope_parameters: dict | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type not in STATIC_ROPES:
            raise ValueError(
                f"rope of type {rope_type!r} is not supported; expected one of "
                f"{', '.join(STATIC_ROPES)}"
            )

    @classmethod
    def for_target(
        cls: type[_Config], model: PreTrainedModel, *, target: str, **own: Any
    ) -> _Config:
        """Return the configuration of layers shaped as the last one of `model`.

        `target` is the name or path by which the drafter's folder will know the model; `own` are
        further fields of the method. Raises ValueError where no drafter can have that shape.
        """
        config, attention = model.config, cast(Any, model.base_model).layers[-1].self_attn
        if hasattr(attention, "kv_a_proj_with_mqa"):
            kind = config.model_type
            raise ValueError(
                f"no drafter has the shape of a layer of {kind!r}, which caches latents"
            )
        missing = [name for name in _FIELDS if not hasattr(config, name)]
        if missing or not hasattr(attention, "q_proj"):
            what = ", ".join(missing) or "q_proj: its projections are one"
            raise ValueError(
                f"no drafter has the shape of a layer of {config.model_type!r}, without {what}"
            )
        return cls(
            target=target,
            head_dim=attention.head_dim,
            qkv_bias=attention.q_proj.bias is not None,
            qk_norm=hasattr(attention, "q_norm"),
            **{name: getattr(config, name) for name in _FIELDS},
            **own,
        )


def layer_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a layer that our configurations share with those of transformers."""
    return {name: getattr(config, name) for name in (*_FIELDS, "head_dim")}


class LayerDrafter(TrainedDrafter):
    """A drafter of transformer layers, with the target's rope."""

    config: LayerConfig
    main_input_name = "inputs_embeds"

    def __init__(self, config: LayerConfig):
        super().__init__(config)
        with torch.device("cpu"):  # no folder holds it: it is there before the weights are
            self.rotary_emb = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]

    def rotated(self, like: torch.Tensor, position_ids: torch.Tensor) -> Rotated:
        """Return the target's rotation at positions [B, T], in the dtype of `like`."""
        cos, sin = (x[:, :, None] for x in self.rotary_emb(like, position_ids))
        half = cos.shape[-1] // 2  # every angle is there twice
        return Rotated(cos[..., :half], sin[..., :half])


class DecoderLayer(nn.Module):
    """The weights of a layer as the target's, called as transformers calls them.

    Its attention reads rows of width `read`, by default the stream's.
    """

    def __init__(self, config: LayerConfig, *, read: int | None = None):
        super().__init__()
        width, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = _Attention(config, read or width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        sizes = {
            "gate_proj": (width, inner),
            "up_proj": (width, inner),
            "down_proj": (inner, width),
        }
        self.mlp = nn.ModuleDict({n: nn.Linear(*size, bias=False) for n, size in sizes.items()})


class _Attention(nn.Module):
    def __init__(self, config: LayerConfig, read: int):
        super().__init__()
        width, size, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(read, heads * size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(read, kv_heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(read, kv_heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * size, width, bias=False)
        self.q_norm = nn.RMSNorm(size, eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(size, eps) if config.qk_norm else None


def check_shapes(**expected: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    """Raise ValueError naming the first tensor that has another shape than expected."""
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")


def check_texts(
    inputs_embeds: torch.Tensor, features: torch.Tensor, depth: int, width: int, feature_width: int
) -> None:
    """Raise ValueError unless `depth` tokens can be drafted along whole texts, as training does.

    Embeddings [B, L, width] and features [B, L, feature_width] must be of the same tokens, and
    `depth` from 1 to L - 1.
    """
    batch, length, *_ = inputs_embeds.shape
    check_shapes(
        inputs_embeds=(inputs_embeds, (batch, length, width)),
        features=(features, (batch, length, feature_width)),
    )
    if not 1 <= depth < length:
        raise ValueError(f"depth: expected 1 to {length - 1} for {length} tokens, got {depth}")
