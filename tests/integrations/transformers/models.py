"""What tests of the adapter for transformers share."""

import torch

import specattn.integrations.transformers  # noqa: F401 - registers "specattn"
from tests.decoding.models import prompts

FAMILIES = ["llama", "qwen3", "qwen2-sliding", "mistral-sliding", "gpt_oss", "gemma2", "gemma3"]
LEFT = "leaves some attention to transformers"  # what a call that we do not serve is warned with


def ours(model):
    """Return the model, which attends by specattn from now on."""
    model.set_attn_implementation("specattn")
    return model


def eager(model):
    """Return the model, which attends as its authors wrote it from now on."""
    model.set_attn_implementation("eager")
    return model


def padded(lengths, *, side="left"):
    """Return prompts of the given lengths in one batch, and its mask."""
    texts, most = prompts(lengths), max(lengths)
    ids, mask = torch.zeros(2, len(lengths), most, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(most - len(text), most) if side == "left" else slice(len(text))
        ids[row, place], mask[row, place] = text, 1
    return ids, mask
