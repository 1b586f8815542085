"""The model that decodes: a checkpoint, or a real model's shape with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specattn.drafters import LongSpecDrafter, MedusaHeads, PosSDrafter, TokenSwiftHeads

EMBEDDED_TARGET = Path(__file__).resolve().parents[2] / "examples" / "tiny"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
_QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
}
_TINY = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
}
CONFIGS = {"llama-3.1-8b": _LLAMA_8B, "qwen3-8b": _QWEN3_8B, "tiny": _TINY}
"""Configurations by the names that `run_kernels.py` uses too."""


def checkpoint(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, Any]:
    """Load model and tokenizer from a folder with safetensors.

    Raises
    ------
    ValueError
        The folder is none, or holds no safetensors.
    """
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        raise ValueError(f"--model: {path} is not a folder with *.safetensors")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, local_files_only=True, use_safetensors=True
    )
    return model.eval().to(device=device), tokenizer


def random_weights(
    shape: str, layers: int | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Build a model of a real shape on the device; `layers` may be fewer than the model has."""
    fewer = {"num_hidden_layers": layers} if layers else {}
    config = AutoConfig.for_model(**CONFIGS[shape] | fewer, tie_word_embeddings=shape == "tiny")
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


DRAFTERS: dict[str, Callable[..., PreTrainedModel]] = {
    "longspec": LongSpecDrafter.for_target,
    "medusa": MedusaHeads.for_target,
    "poss": partial(PosSDrafter.for_target, layers=3, positions_per_layer=2),  # PosS-2, depth 6
    "tokenswift": TokenSwiftHeads.for_target,
}
"""By the method that needs one; trained, it lies in a folder of that name within the model's."""


def random_drafter(method: str, model: PreTrainedModel, shape: str) -> PreTrainedModel:
    """Build a method's drafter for a model of that shape, untrained, on its device."""
    with torch.device(model.device):
        drafter = DRAFTERS[method](model, target=shape)
    return drafter.to(model.dtype).eval()


def has_drafter(path: Path, method: str) -> bool:
    """Whether a method's drafter lies where the method looks for it."""
    return (path / method).is_dir()
