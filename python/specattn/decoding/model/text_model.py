"""The causal text model of what a caller hands over: itself, or the one inside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specattn.decoding.model.families import check_fields
from specattn.decoding.model.model import Model
from specattn.decoding.model.structure import is_replaced


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return `model`, or the causal model of its ``text_config``, made of its own modules.

    A model for images and text (Mistral Small, Gemma 3) continues text with a language model that
    has a class of its own; nothing is copied. Of one that `torch.compile` has wrapped this is the
    model inside.

    Raises
    ------
    TypeError
        It is no model of transformers, such as a wrapper around one, or has no head.
    ValueError
        transformers has no class for the text model, something was put around the larger one, or
        its weights are elsewhere. A field of its configuration is no number where one is needed.
    """
    model = _unwrapped(model)
    if model.get_output_embeddings() is None:
        raise TypeError(
            "model: expected a PreTrainedModel of transformers with a language-model head, got "
            f"{type(model).__name__}; load it by AutoModelForCausalLM"
        )
    if next(model.parameters()).is_meta:  # callers move prompts to where it is
        check_device(model)
    config = model.config.get_text_config(decoder=True)
    check_fields(config)
    if config is model.config or model.config.is_encoder_decoder:
        return model
    for name, module in (("the model", model), ("its base", model.base_model)):
        if is_replaced(module):
            raise ValueError(
                f"text is continued by the text model inside a {type(model).__name__}, and hooks "
                f"or another forward of {name} would not be called: put them on the text model"
            )
    inside: Any = Model.of(model).recall("text", lambda: _made(model, config))
    if getattr(inside, inside.base_model_prefix) is not (decoder := model.get_decoder()):
        setattr(inside, inside.base_model_prefix, decoder)
    if inside.get_output_embeddings() is not (head := model.get_output_embeddings()):
        inside.set_output_embeddings(head)
    inside.config, inside.generation_config = config, model.generation_config
    inside.training = model.training
    found: PreTrainedModel = inside
    return found


def check_device(model: PreTrainedModel) -> None:
    """Raise ValueError unless all weights of a model are on one device, and there are any."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) == 1 and "meta" not in devices:
        return
    why = "; weights on meta are offloaded or were never loaded" if "meta" in devices else ""
    found = ", ".join(sorted(devices))
    raise ValueError(f"the model must be on one device, got {found}{why}")


def _unwrapped(model: Any) -> PreTrainedModel:
    if isinstance(model, PreTrainedModel):
        return model
    inside = getattr(model, "_orig_mod", None)  # what torch.compile was given
    if isinstance(inside, PreTrainedModel):
        return inside
    hint, tuned = "", getattr(model, "active_peft_config", None)
    if getattr(tuned, "is_prompt_learning", False):  # what was tuned stands before the prompt
        hint = "; prompts that were tuned are not served"
    elif callable(getattr(model, "get_base_model", None)):  # PEFT's: adapters are inside it
        hint = "; hand over model.get_base_model()"
    elif isinstance(getattr(model, "module", None), nn.Module):  # of DataParallel and others
        hint = "; hand over model.module"
    kind = type(model).__name__
    raise TypeError(f"model: expected a PreTrainedModel of transformers, got {kind}{hint}")


def _made(model: Any, config: Any) -> Any:
    """Return a causal model of a configuration, whose modules are to be replaced."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError:
        raise ValueError(
            f"models of type {model.config.model_type!r} are not supported: transformers has "
            f"no causal model for their text_config, of type {config.model_type!r}"
        ) from None
