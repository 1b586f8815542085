"""What a model's configuration says of decoding it: windows, shapes, logits, and what rules it out.

A model is taken because it agrees with itself (`proving.py`), whatever its family. A record here
says what the configurations of a tested family do not, and that its tests are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from transformers import PretrainedConfig

from specattn.states import StateShape

Sliding = Literal["none", "by type", "all"]


@dataclass(frozen=True)
class Family:
    """What the models of one ``config.model_type`` do.

    A sliding window holds for no layer, those of type ``sliding_attention``, or all of them,
    whatever ``layer_types`` says. With `gated_delta` layers of type ``linear_attention`` keep a
    state (`specattn.gated_delta_tree`). With `complex_rope` neighbours are turned, and stay so.
    """

    sliding_layers: Sliding
    gated_delta: bool = False
    complex_rope: bool = False


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
    "qwen3_next": Family(sliding_layers="none", gated_delta=True),
    "qwen3_5_text": Family(sliding_layers="none", gated_delta=True),
    "qwen3_5_moe_text": Family(sliding_layers="none", gated_delta=True),
    "olmo_hybrid": Family(sliding_layers="none", gated_delta=True),
    "deepseek_v2": Family(sliding_layers="none", complex_rope=True),
    "deepseek_v3": Family(sliding_layers="none"),
    "glm4_moe_lite": Family(sliding_layers="none"),
    "minicpm3": Family(sliding_layers="none"),
    "youtu": Family(sliding_layers="none"),
}
"""By the ``model_type`` of a model's text configuration; each is tested against transformers."""

_SERVED_LAYERS = {"full_attention", "sliding_attention", "attention"}
_STATE = "linear_attention"
_HEADS = "num_attention_heads", "num_key_value_heads"
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    *_HEADS,
    "head_dim",
    "sliding_window",
)
_MOST = 2**63
_MAX_HEAD_DIM = 256
_MAX_LATENT = 576, 512  # of keys, with what is turned; of values


class CacheShape(NamedTuple):
    """What a cache holds for every token, in `layers` that have keys and values.

    With a `latent` the first so many channels of a key are the value, too: it is no other row.
    """

    layers: int
    kv_heads: int
    head_dim: int
    latent: int | None = None


def check_supported(config: PretrainedConfig) -> None:
    """Raise ValueError where the configuration alone says that a model cannot be decoded.

    It keeps something other than keys and values that can be taken back, or its heads are not what
    the kernels take.
    """
    config = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    if reason := _reason_against(config):
        raise ValueError(f"models of type {config.model_type!r} are not supported: {reason}")


def check_fields(config: PretrainedConfig) -> None:
    """Raise ValueError where a field of a configuration that is read here cannot be meant so."""
    for name in _COUNTS:
        value = getattr(config, name, None)
        if value is not None and not (isinstance(value, int) and 0 < value < _MOST):
            raise _no_field(name, "a number from 1, fewer than 2**63", value)
    heads, kv_heads = (getattr(config, name, None) for name in _HEADS)
    if heads and kv_heads and heads % kv_heads:
        raise _no_field("num_key_value_heads", f"a divisor of {heads} attention heads", kv_heads)
    types = getattr(config, "layer_types", None)
    if types is not None:
        listed = isinstance(types, (list, tuple))
        if not listed or not all(isinstance(kind, str) for kind in types):
            raise _no_field("layer_types", "a list of words", types)
        if "sliding_attention" in types and getattr(config, "sliding_window", None) is None:
            raise _no_field("sliding_window", "a number, as layer_types has sliding layers", None)
    if not isinstance(config.model_type, str):
        raise _no_field("model_type", "a word", config.model_type)
    family = FAMILIES.get(config.model_type)
    if types is None and family is not None and family.sliding_layers == "by type":
        raise _no_field("layer_types", "a list of words", None)


def _no_field(name: str, expected: str, value: object) -> ValueError:
    return ValueError(f"the model's configuration: {name} must be {expected}, got {value!r}")


def _reason_against(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "an encoder-decoder attends to its encoder, which this cache does not hold"
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    served = _SERVED_LAYERS | ({_STATE} if has_states(config) else set())
    if others := sorted(set(kinds) - served):
        return (
            f"it has layers of type {', '.join(others)}; only full and sliding attention, and "
            "gated delta layers of tested families, keep what rejected tokens can be taken out of"
        )
    if getattr(config, "num_kv_shared_layers", None):
        return f"its last {config.num_kv_shared_layers} layers (num_kv_shared_layers) share keys"
    if not getattr(config, "num_attention_heads", None):
        return "its configuration names no attention heads"
    if has_latents(config):
        return _reason_against_latents(config)
    sizes = {"head_dim": cache_shape(config).head_dim}
    if has_states(config):
        shape = state_shape(config)
        sizes |= {"linear_key_head_dim": shape.k_dim, "linear_value_head_dim": shape.v_dim}
        if keeps_state(config).count(False) == 0:
            return "no layer of it has keys and values"
    for name, size in sizes.items():
        if size % 8 or size > _MAX_HEAD_DIM:
            return f"{name} must be a multiple of 8 up to {_MAX_HEAD_DIM}, got {size}"
    return None


def _reason_against_latents(config: PretrainedConfig) -> str | None:
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    if missing := [name for name in names if getattr(config, name, None) is None]:
        return f"it has latents (kv_lora_rank), and no {', '.join(missing)}"
    rank, turned, still, value = (getattr(config, name) for name in names)
    limits = {
        "kv_lora_rank": (rank, _MAX_LATENT[1]),
        "kv_lora_rank + qk_rope_head_dim": (rank + turned, _MAX_LATENT[0]),
        "qk_nope_head_dim + qk_rope_head_dim": (still + turned, _MAX_HEAD_DIM),
        "v_head_dim": (value, _MAX_HEAD_DIM),
    }
    for name, (size, most) in limits.items():
        if size % 8 or size > most:
            return f"{name} must be a multiple of 8 up to {most}, got {size}"
    return None


def has_latents(config: PretrainedConfig) -> bool:
    """Whether a model caches one latent for each token: multi-head latent attention (MLA)."""
    return bool(getattr(config, "kv_lora_rank", None))


def has_states(config: PretrainedConfig) -> bool:
    """Whether some layers keep a state in place of keys and values."""
    family = FAMILIES.get(config.model_type)
    return family is not None and family.gated_delta and any(keeps_state(config))


def keeps_state(config: PretrainedConfig) -> list[bool]:
    """Return of each layer whether it keeps a state."""
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [None] * layers
    return [kind == _STATE for kind in kinds[:layers]]


def state_shape(config: PretrainedConfig) -> StateShape:
    """Return what a layer with a state keeps of a text."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = (getattr(config, f"linear_{name}") for name in (*names, "conv_kernel_dim"))
    return StateShape(*sizes)


def check_length(config: PretrainedConfig, longest: int) -> None:
    """Raise ValueError unless the rope turns alike at every length up to `longest` tokens."""
    for rope in turning_ropes(config):
        kind = rope["rope_type"]
        limit = rope.get("original_max_position_embeddings") if kind == "longrope" else None
        limit = limit or config.max_position_embeddings
        if longest > limit:
            raise ValueError(
                f"rope of type {kind!r} turns with the current length beyond {limit} tokens, so "
                "tokens that are verified together would differ from plain decoding; the run "
                f"may read {longest}"
            )


def turning_ropes(config: PretrainedConfig) -> list[dict]:
    """Return the settings of the ropes that turn with the length of the text."""
    kinds = "dynamic", "longrope"
    return [x for x in _ropes(config) if x.get("rope_type") in kinds and not _same_factors(x)]


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
    if has_latents(config):
        rank = config.kv_lora_rank
        return CacheShape(config.num_hidden_layers, 1, rank + config.qk_rope_head_dim, rank)
    heads = config.num_attention_heads
    states = keeps_state(config).count(True) if has_states(config) else 0
    return CacheShape(
        config.num_hidden_layers - states,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def windows_of(config: PretrainedConfig, capacity: int) -> list[int | None]:
    """Return each layer's sliding window, None where the cache is never longer than it.

    0 stands for a layer that keeps a state: it has no keys at all.
    """
    if has_states(config):
        return [0 if state else None for state in keeps_state(config)]
    window, layers = getattr(config, "sliding_window", None), config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    family = FAMILIES.get(config.model_type)
    sliding = family.sliding_layers if family else "by type" if types else "all"
    if sliding == "none" or window is None or window >= capacity:
        return [None] * layers
    if sliding == "all" or types is None:
        return [window] * layers
    return [window if kind == "sliding_attention" else None for kind in types[:layers]]


def transforms_logits(config: PretrainedConfig) -> bool:
    """Whether a model does anything to its head's logits."""
    one = torch.ones(1, dtype=torch.float32, device="cpu")
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
