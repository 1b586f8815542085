"""Loading a causal model whose weights are all there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from specattn.decoding.families import check_supported
from specattn.decoding.text_model import text_model

_NAMED = 5  # tensors that one line has room for


def load_causal_model(
    folder: Path | str, dtype: torch.dtype | str, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Return the folder's model, from safetensors alone, ready to decode.

    transformers fills what a checkpoint lacks with random numbers, and says so where few look.

    Raises
    ------
    ValueError
        What the model does is not supported, its weights are not all there, or a package is
        missing that reads them quantised.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    check_supported(config)
    reads_text_alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    loader: Any = AutoModelForCausalLM if reads_text_alone else AutoModelForImageTextToText
    try:
        loaded: Any = loader.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported just below, with their names
            output_loading_info=True,
        )
    except ImportError as error:  # of what decodes quantised weights
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"the weights in {folder} cannot be loaded: {lines[0]}") from None
    except SafetensorError as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from None
    model, report = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if keys := sorted(map(str, report[kind])):
            names = ", ".join(keys[:_NAMED]) + (", ..." if len(keys) > _NAMED else "")
            raise ValueError(
                f"the weights in {folder} do not fit its config.json: "
                f"{len(keys)} {kind.replace('_', ' ')}: {names}"
            )
    return text_model(model.eval().to(device=device))
