"""The families of models that can be decoded: one record of what each family does.

A record says what a model's configuration alone does not; what no record covers is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """What the models of one ``config.model_type`` do.

    Attributes
    ----------
    sliding_layers : {"none", "by type", "all"}
        Which layers a sliding window of the configuration holds for: none, those of type
        ``sliding_attention``, or all of them, whatever ``layer_types`` says.
    """

    sliding_layers: Literal["none", "by type", "all"]


FAMILIES = {
    "llama": Family(sliding_layers="none"),
    "qwen2": Family(sliding_layers="by type"),
    "qwen3": Family(sliding_layers="by type"),
    "qwen3_moe": Family(sliding_layers="all"),
    "mistral": Family(sliding_layers="all"),
    "gpt_oss": Family(sliding_layers="by type"),
}
"""By ``model.config.model_type``; each is tested against transformers."""

_LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
# Fields by which models transform the logits of their head, which this package does not do.
_TRANSFORMS_OF_LOGITS = (
    "final_logit_softcapping",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
)


def check_supported(config: PretrainedConfig) -> None:
    """Raise unless models of this configuration can be decoded.

    Raises
    ------
    ValueError
        The family, the size of a head, the rope or what the model does to its logits is not
        supported.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"models of type {config.model_type!r} are not supported; "
            f"supported are {', '.join(FAMILIES)}"
        )
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if head_dim % 8 or head_dim > 256:
        raise ValueError(f"head_dim must be a multiple of 8 up to 256, got {head_dim}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPES:
        raise ValueError(
            f"rope of type {rope['rope_type']!r} is not supported: it turns with the current "
            "length, so tokens that are verified together would differ from plain decoding"
        )
    for name in _TRANSFORMS_OF_LOGITS:
        if (value := getattr(config, name, None)) not in (None, 1.0):
            raise ValueError(f"{name}={value} is not supported: it transforms the head's logits")


def windows_of(config: PretrainedConfig, capacity: int) -> list[int | None]:
    """Return each layer's sliding window, None where the cache is never longer than it."""
    window = getattr(config, "sliding_window", None)
    sliding = FAMILIES[config.model_type].sliding_layers
    if sliding == "none" or window is None or window >= capacity:
        return [None] * config.num_hidden_layers
    if sliding == "all":
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in config.layer_types]
