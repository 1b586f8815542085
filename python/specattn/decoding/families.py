"""The families of models that can be decoded: one record of what each family does.

A record says what a model's configuration alone does not; what no record covers is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """What the models of one ``config.model_type`` do.

    Attributes
    ----------
    slides_everywhere : bool
        Whether a sliding window holds for every layer, whatever ``layer_types`` of the
        configuration says; otherwise it holds for the layers of type ``sliding_attention``.
    """

    slides_everywhere: bool = False


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(slides_everywhere=True),
    "mistral": Family(slides_everywhere=True),
    "gpt_oss": Family(),
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
        The family, the rope or what the model does to its logits is not supported.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"models of type {config.model_type!r} are not supported; "
            f"supported are {', '.join(FAMILIES)}"
        )
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
    if window is None or window >= capacity:
        return [None] * config.num_hidden_layers
    if FAMILIES[config.model_type].slides_everywhere:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in config.layer_types]
