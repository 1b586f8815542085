"""The causal text model inside a model that reads more than text."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specattn.decoding.model.model import Model


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return `model`, or the causal model of its ``text_config``, made of its own modules.

    A model for images and text (Mistral Small, Gemma 3) continues text with a language model that
    has a class of its own; nothing is copied. ValueError: transformers has no such class.
    """
    config = model.config.get_text_config(decoder=True)
    if config is model.config or model.config.is_encoder_decoder:
        return model
    return Model.of(model).recall("text", lambda: _inside(model, config))


def _inside(model: Any, config: Any) -> PreTrainedModel:
    """Return a causal model of a configuration, made of a larger model's modules."""
    try:
        with torch.device("meta"):
            inside: Any = AutoModelForCausalLM.from_config(config)
    except ValueError:
        raise ValueError(
            f"models of type {model.config.model_type!r} are not supported: transformers has "
            f"no causal model for their text_config, of type {config.model_type!r}"
        ) from None
    setattr(inside, inside.base_model_prefix, model.get_decoder())
    inside.set_output_embeddings(model.get_output_embeddings())
    inside.config, inside.generation_config = config, model.generation_config
    inside.training = model.training
    found: PreTrainedModel = inside
    return found
