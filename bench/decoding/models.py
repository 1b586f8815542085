"""The model that decodes: a checkpoint, or a real model's shape with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specattn.drafters import (
    Eagle3Drafter,
    LongSpecDrafter,
    MedusaHeads,
    MtpDrafter,
    PosSDrafter,
    TokenSwiftHeads,
)
from specattn.planning import MODELS
from specattn.widening import widened_target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

POSITIONS = 1 << 17  # of models with random weights
SHAPES = [name for name, shape in MODELS.items() if shape.family in ("llama", "qwen3")]
"""Models of families whose configuration follows from the shape."""
WIDE_SHAPES = [name for name, shape in MODELS.items() if name in SHAPES or shape.state_layers]
WIDE = Path(__file__).parents[2] / "build" / "wide"


def widened(shape: str) -> Path:
    """Return an embedded target, with its drafters, in the sizes of a real model: made once."""
    transformers.logging.disable_progress_bar()
    return widened_target(shape, WIDE)


def checkpoint(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, Any]:
    """Load model and tokenizer from a folder; raises ValueError where it holds no safetensors."""
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        raise ValueError(f"--model: {path} is not a folder with *.safetensors")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = {"local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    options |= {"dtype": dtype, "use_safetensors": True}
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    return model.eval().to(device=device), tokenizer


def random_weights(
    shape: str, layers: int | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Build a model of a real shape on the device; `layers` may be fewer than the model has."""
    sizes = MODELS[shape]
    config = AutoConfig.for_model(
        sizes.family,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=layers or sizes.layers,
        num_attention_heads=sizes.q_heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=sizes.tied,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


DRAFTERS: dict[str, Callable[..., PreTrainedModel]] = {
    "longspec": LongSpecDrafter.for_target,
    "eagle3": Eagle3Drafter.for_target,
    "medusa": MedusaHeads.for_target,
    "mtp": MtpDrafter.for_target,
    "poss": partial(PosSDrafter.for_target, layers=3, positions_per_layer=2),  # PosS-2, depth 6
    "tokenswift": TokenSwiftHeads.for_target,
}
"""By the method that needs one; trained, it lies in a folder of that name within the model's."""


def random_drafter(method: str, model: PreTrainedModel, shape: str) -> PreTrainedModel:
    """Build a method's drafter for a model of that shape, untrained, on its device."""
    with torch.device(model.device):
        drafter = DRAFTERS[method](model, target=shape)
    return drafter.to(model.dtype).eval()
