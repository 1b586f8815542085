"""What a model's configuration says of decoding it: windows, shapes, logits, and what rules it out.

A model is taken because it agrees with itself (`proving.py`), whatever its family. A record here
says what the configurations of a tested family do not, and that its tests are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from transformers import PretrainedConfig

Sliding = Literal["none", "by type", "all"]


@dataclass(frozen=True)
class Family:
    """What the models of one ``config.model_type`` do.

    A sliding window holds for no layer, those of type ``sliding_attention``, or all of them,
    whatever ``layer_types`` says.
    """

    sliding_layers: Sliding


FAMILIES = {
    "llama": Family(sliding_layers="none"),
    "qwen2": Family(sliding_layers="by type"),
    "qwen3": Family(sliding_layers="by type"),
    "qwen3_moe": Family(sliding_layers="all"),
    "mistral": Family(sliding_layers="all"),
    "ministral": Family(sliding_layers="by type"),
    "ministral3": Family(sliding_layers="all"),
    "mixtral": Family(sliding_layers="all"),
    "gpt_oss": Family(sliding_layers="by type"),
    "gemma2": Family(sliding_layers="by type"),
    "gemma3_text": Family(sliding_layers="by type"),
    "phi3": Family(sliding_layers="all"),
    "smollm3": Family(sliding_layers="by type"),
    "olmo2": Family(sliding_layers="none"),
    "olmo3": Family(sliding_layers="by type"),
    "granite": Family(sliding_layers="none"),
    "glm4": Family(sliding_layers="none"),
    "glm4_moe": Family(sliding_layers="none"),
    "seed_oss": Family(sliding_layers="none"),
    "cohere2": Family(sliding_layers="by type"),
    "exaone4": Family(sliding_layers="by type"),
}
"""By the ``model_type`` of a model's text configuration; each is tested against transformers."""

_SERVED_LAYERS = {"full_attention", "sliding_attention", "attention"}
_MAX_HEAD_DIM = 256


class CacheShape(NamedTuple):
    """What a cache holds for every token."""

    layers: int
    kv_heads: int
    head_dim: int


def check_supported(config: PretrainedConfig) -> None:
    """Raise ValueError where the configuration alone says that a model cannot be decoded.

    It keeps something other than keys and values that can be taken back, or its heads are not what
    the kernels take.
    """
    config = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    if reason := _reason_against(config):
        raise ValueError(f"models of type {config.model_type!r} are not supported: {reason}")


def _reason_against(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "an encoder-decoder attends to its encoder, which this cache does not hold"
    if getattr(config, "kv_lora_rank", None):
        return (
            "multi-head latent attention (MLA) caches one compressed vector per token, "
            "not keys and values of heads"
        )
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    if others := sorted(set(kinds) - _SERVED_LAYERS):
        return (
            f"it has layers of type {', '.join(others)}; only full and sliding attention "
            "keep nothing but keys and values, from which rejected tokens can be taken back"
        )
    if getattr(config, "num_kv_shared_layers", None):
        return f"its last {config.num_kv_shared_layers} layers share the keys of earlier ones"
    if not getattr(config, "num_attention_heads", None):
        return "its configuration names no attention heads"
    head_dim = cache_shape(config).head_dim
    if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
        return f"head_dim must be a multiple of 8 up to {_MAX_HEAD_DIM}, got {head_dim}"
    return None


def check_length(config: PretrainedConfig, capacity: int) -> None:
    """Raise ValueError unless the rope turns alike at every length up to `capacity` tokens."""
    for rope in _ropes(config):
        kind = rope.get("rope_type")
        if kind not in ("dynamic", "longrope") or _same_factors(rope):
            continue
        limit = rope.get("original_max_position_embeddings") if kind == "longrope" else None
        limit = limit or config.max_position_embeddings
        if capacity > limit:
            raise ValueError(
                f"rope of type {kind!r} turns with the current length beyond {limit} tokens, so "
                "tokens that are verified together would differ from plain decoding; the run "
                f"needs room for {capacity}"
            )


def _ropes(config: PretrainedConfig) -> list[dict]:
    """Return the settings of each kind of rope that a model has."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _same_factors(rope: dict) -> bool:
    factors = rope.get("short_factor"), rope.get("long_factor")
    return factors[0] is not None and factors[0] == factors[1]


def cache_shape(config: PretrainedConfig) -> CacheShape:
    """Return what a cache for models of this configuration holds."""
    heads = config.num_attention_heads
    return CacheShape(
        config.num_hidden_layers,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def windows_of(config: PretrainedConfig, capacity: int) -> list[int | None]:
    """Return each layer's sliding window, None where the cache is never longer than it."""
    window, layers = getattr(config, "sliding_window", None), config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    family = FAMILIES.get(config.model_type)
    sliding = family.sliding_layers if family else "by type" if types else "all"
    if sliding == "none" or window is None or window >= capacity:
        return [None] * layers
    if sliding == "all" or types is None:
        return [window] * layers
    return [window if kind == "sliding_attention" else None for kind in types]


def transforms_logits(config: PretrainedConfig) -> bool:
    """Whether a model does anything to its head's logits."""
    one = torch.ones(1)
    return transform_logits(config, one) is not one


def transform_logits(config: PretrainedConfig, logits: torch.Tensor) -> torch.Tensor:
    """Return what a model makes of its head's logits: scaled, divided, or softly capped."""
    if (scale := getattr(config, "logit_scale", None)) not in (None, 1.0):
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) not in (None, 1.0):
        logits = logits / divisor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits
